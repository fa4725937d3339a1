// What the choice of a tiling starts from, and how it ends.
#pragma once

#include "plan/cuda/kernel/kernel_config.h"
#include "semantics/mask.h"

namespace regard {

// Bytes of shared memory.
struct SharedLimits {
  int64 block = 0;
  int64 multiprocessor = 0;
};

// What a tiling is chosen for, in addition to the config.
struct TilingRequest {
  int64 dim = 0;  // head sizes as the problem has them
  int64 dim_v = 0;
  int64 rows = 0;        // of a head (packed GQA: of a group of heads)
  int64 usual_rows = 0;  // the same; of short packed sequences their mean
  int64 keys = 0;        // of a sequence
  int64 mean_rows = 0;   // of packed sequences the mean; of others as rows and keys
  int64 mean_keys = 0;
  MaskParams mask;  // the intervals of one head's rows, also where `rows` are those of a group
  int64 heads = 0;  // forward: how many have so many rows
  int64 heads_kv = 0;
  int64 multiprocessors = 0;
  SharedLimits limits;
  const Tiling* forced = nullptr;  // members above 0 replace those of the table
};

enum class Fit : uint8 {
  fits,
  no_room,     // needs more shared memory than a block may use
  impossible,  // the kernel cannot have the tiling that is forced
};

// A row of a table of tilings: the largest head sizes that it is meant for.
struct TilingEntry {
  int dim;
  int dim_v;
  Tiling tiling;
};

// Dynamic shared memory of any kernel.
int64 shared_bytes_of(const KernelConfig&);

}  // namespace regard
