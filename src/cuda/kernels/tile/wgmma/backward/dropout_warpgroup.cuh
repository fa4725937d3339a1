// The warpgroup of a wgmma backward block that generates dropout bits. Each of its warps serves two
// warps of keys, which would otherwise make the same calls of Philox.
#pragma once

#include "cuda/kernels/tile/wgmma/backward/memory.cuh"
#include "cuda/kernels/tile/wgmma/dropout_bits.cuh"

namespace regard {

template <KernelConfig kConfig>
struct DropoutWarpgroup {
  using Memory = BackwardMemory<kConfig>;

  const KernelParams& params;
  const Memory memory;
  DropoutOf<kConfig> dropout = dropout_of<kConfig>(params.problem);
  const uint32 thresholds = dropout_thresholds(params.problem.dropout);
  // A lane serves two keys of each eight of its warp's 32, and every eighth row.
  const int warp = warp_index() % 4, pair = lane_index() / 8;
  const int first_row = lane_index() % 8;

  // Word h serves keys 16 h to 16 h + 15. For each row it has the pairs of the first eight keys and
  // of the last eight.
  REGARD_DEVICE void generate(uint32 (&bits)[2], const BackwardTask& task,
                              const RowTile& tile) const {
    const uint32 call = uint32((task.first_key / 32 + warp) * 4 + pair);
    bits[0] = bits[1] = 0;
#pragma unroll 1
    for (int row = first_row; row < Memory::kRows; row += 8) {
      const int i = tile.index * Memory::kRows + row;
      const Philox numbers = dropout_bits_of<kConfig>(
          params.problem, dropout_of_tile<kConfig>(dropout), task.b, tile.head, i, call);
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        append_dropout_bits(bits[word / 2], numbers.word[word], thresholds);
      }
    }
  }

  // The lanes that read the bits have pairs of neighbouring rows, not of neighbouring keys. So of
  // two lanes one stores the first key's bits of both, and the other the second key's.
  REGARD_DEVICE void store(const uint32 (&bits)[2]) const {
    const bool odd = lane_index() % 2 != 0;
    const int lane = (pair * 2 + odd) * 4 + first_row / 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32 own = bits[half], other = shuffle_xor(own, 1);
      const uint32 both = odd ? (other >> 16) | (own & 0xffff0000) : (own & 0xffff) | other << 16;
      store_shared_32(memory.dropout_bits(0, (warp * 2 + half) * 32 + lane), both);
    }
  }

  REGARD_DEVICE void run() {
    const BackwardTask task = uniform_task<kConfig>(memory.task());
    RowWalk<kConfig> tile = row_walk<kConfig>(params, task);
    DropoutBitsWriter<Memory> writer{memory};
#pragma unroll 1
    for (int left = task.iterations; left > 0; --left) {
      uint32 bits[2];
      generate(bits, task, tile);
      writer.begin();
      store(bits);
      writer.end();
      advance<kConfig>(tile, params, task);
    }
    writer.finish();
  }
};

}  // namespace regard
