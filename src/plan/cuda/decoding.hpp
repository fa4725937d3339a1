// How many blocks share the keys of a tile in decoding, and which of them merges.
#pragma once

#include "plan/cuda/chip.hpp"
#include "plan/cuda/tiling.hpp"

namespace regard {

struct DecodingRequest {
  int64 tiles;        // of query rows, over all heads
  int64 key_tiles;    // of a tile of rows, at most
  int64 entries;      // of the batch
  bool lengths_vary;  // of sequences: only the kernel knows them
  bool continues;     // only combine can merge
  bool is_limited;    // to the chip's multiprocessors, which are a part of all
};

// At most one of the ways to merge; without one, combine does.
struct DecodingSplits {
  int splits = 1;            // blocks of a tile; stream_k: all blocks
  int cluster = 1;           // blocks of a cluster, which merges in shared memory; 1: none
  bool last_merges = false;  // the block of the last split merges
  bool stream_k = false;     // blocks have equal shares of all tiles of keys
};

// What ends first.
DecodingSplits splits_of_decoding(const KernelConfig&, const Chip&, const TilingRequest&,
                                  const DecodingRequest&);

}  // namespace regard
