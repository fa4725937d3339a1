// The warpgroup of a wgmma backward block that draws which weights dropout drops: a warp for two
// warps of keys, which would make the same calls of Philox each.
#pragma once

#include "cuda/kernels/tile/wgmma/backward_memory.cuh"
#include "cuda/kernels/tile/wgmma/drops.cuh"

namespace regard {

template <KernelConfig kConfig>
struct BackwardDrops {
  using Memory = BackwardMemory<kConfig>;

  const KernelParams& params;
  const Memory memory;
  const uint32 thresholds = thresholds_of(params.problem.dropout);
  // Of its 32 keys a lane draws for two in each group of eight, and for every eighth row.
  const int warp = warp_index() % 4, pair = lane_index() / 8;
  const int first_row = lane_index() % 8;

  // Of the first and of the last sixteen keys: rows of the tile, in each the pairs of the first and
  // of the last eight keys.
  REGARD_DEVICE void draw(uint32 (&drops)[2], const BackwardTask& task,
                          const BackwardStep& step) const {
    const uint32 call = uint32((task.first_key / 32 + warp) * 4 + pair);
    drops[0] = drops[1] = 0;
#pragma unroll 1
    for (int row = first_row; row < Memory::kRows; row += 8) {
      const int i = step.tile * Memory::kRows + row;
      const Philox numbers = dropout_bits(params.problem.dropout, task.b, step.head, i, call);
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        add_drops(drops[word / 2], numbers.word[word], thresholds);
      }
    }
  }

  // To the lanes that have them, whose pairs are of neighbouring rows, not keys: of two lanes one
  // has the first key's of both, the other the second's.
  REGARD_DEVICE void store(const uint32 (&drops)[2]) const {
    const bool odd = lane_index() % 2 != 0;
    const int lane = (pair * 2 + odd) * 4 + first_row / 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32 own = drops[half], other = shuffle_xor(own, 1);
      const uint32 both = odd ? (other >> 16) | (own & 0xffff0000) : (own & 0xffff) | other << 16;
      store_shared_32(memory.drops(0, (warp * 2 + half) * 32 + lane), both);
    }
  }

  REGARD_DEVICE void run() {
    const BackwardTask task = uniform_task(memory.task());
    BackwardStep step{task.kv * int(params.problem.sizes.group()), task.first_tile};
    DropWriter<Memory> writer{memory};
#pragma unroll 1
    for (int left = task.steps; left > 0; --left) {
      uint32 drops[2];
      draw(drops, task, step);
      writer.begin();
      store(drops);
      writer.end();
      step.advance(task);
    }
    writer.finish();
  }
};

}  // namespace regard
