// The numbers that blocks take from a counter that nobody has cleared: who is done takes the next.
//
// A block takes numbers until one is past the end of the `count` there are, and then no more. The
// numbers of first tiles are the blocks' own. So count - blocks numbers are taken that have a tile,
// and one by each block that has none: `count` takes in all, whoever comes first or last.
//
// The counter is one word that counts up from KernelParams::nonce, a random number of 64 bits.
// Until the last take it is at least `call` and less than call + count: a block that sees anything
// else before its first take sees what was there before this call, and writes `call`, if nobody has
// done so since. After the last take nobody looks again, and it is call + count: a graph that comes
// again with the same number begins it anew.
#pragma once

#include "cuda/kernels/params.h"
#include "cuda/kernels/ptx_hopper.cuh"
#include "plan/cuda/kernel/wgmma_layout.h"

namespace regard {

template <KernelConfig kConfig>
struct TileNumbers {
  const KernelParams& params;

  // Before a block's first take.
  REGARD_DEVICE void begin(int count) const {
    if constexpr (!counts_tiles(kConfig)) return;
    uint64* const word = params.buffers.tile_counter;
    const uint64 was = load_relaxed(word);
    if (was - params.nonce >= uint32(count)) atomic_cas(word, was, params.nonce);
  }
  // The number after `last`, the block's present one. Nothing waits for it here.
  REGARD_DEVICE int after(int last) const {
    if constexpr (!counts_tiles(kConfig)) return last + int(block_count());
    return int(block_count()) + int(atomic_increment(params.buffers.tile_counter) - params.nonce);
  }
};

}  // namespace regard
