// How many blocks share a tile, so that few tiles with much work fill the chip: the keys of a tile
// of query rows (split-KV), and, backward, the query rows of a tile of keys.
#pragma once

#include "plan/cuda/chip.hpp"
#include "plan/cuda/tiling.hpp"
#include "problem/problem.h"

namespace regard {

inline constexpr int64 kMostSplits = 128;

// Blocks that a multiprocessor surely holds at once.
int64 resident_blocks(const KernelConfig&, const Chip&);

// The number whose blocks end first; each block has two key tiles at least. `tiles`: of query rows,
// over all heads; `key_tiles`: of a tile of rows. Decoding has splits of its own (decoding.hpp).
int splits_for(const KernelConfig&, const Chip&, int64 tiles, int64 key_tiles);

// The same for a persistent grid of wgmma, whose blocks take one share of a tile's keys after
// another.
int key_splits_of_wgmma(const KernelConfig&, const Problem&, int64 multiprocessors, int64 tiles);

// The blocks of a backward kernel, each of which has a tile of keys.
struct RowBlocks {
  int64 at_once = 1;        // on the chip
  bool as_wgmma = false;    // for a problem that wgmma computes if its data are aligned
  bool in_pairs = false;    // as_wgmma: two tiles of keys are a cluster
  bool whole_keys = false;  // mma: one tile has all keys of a sequence; at_once: multiprocessors
};

struct RowSplits {
  int count = 1;    // of the query rows of a tile of keys
  double time = 0;  // of the blocks and of the sum of their parts, in microseconds
};

// Backward: the number whose blocks, and the sum of whose parts, end first. It does not depend on
// what is known only when there is data, because the workspace is asked for before.
RowSplits row_splits_for(const Problem&, const RowBlocks&);

}  // namespace regard
