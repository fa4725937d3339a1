// The bias and the mask of a tile of rows and the block's keys, on their way to shared memory by
// cp.async. All threads of the dq warpgroup call these functions.
#pragma once

#include "cuda/kernels/tile/mask_copy.cuh"
#include "cuda/kernels/tile/wgmma/backward/memory.cuh"

namespace regard {

template <KernelConfig kConfig>
struct PairTermLoads {
  using Memory = BackwardMemory<kConfig>;
  static constexpr int kRows = Memory::kRows, kKeys = Memory::kKeys, kThreads = 128;

  const KernelParams& params;
  const Memory memory;

  // Copies rows of kBytes bytes, kAtOnce at a time. The first `count` rows exist, with `left` bytes
  // each. The loop is not unrolled: the addresses of all copies at once would take too many
  // registers.
  template <int kBytes, int kAtOnce>
  static REGARD_DEVICE void copy_rows(const TileView& tile, const uint8* from, int64 row_bytes,
                                      int count, int left) {
    constexpr int kChunks = kBytes / kAtOnce, kStep = kThreads / kChunks;
    const int bytes = thread_index() % kChunks * kAtOnce;
    const int exist = clamp_to(left - bytes, 0, kAtOnce);
    int row = thread_index() / kChunks;
    SharedAddress to = tile.begin + row * tile.row_bytes + bytes;
    from += row * row_bytes + bytes;
#pragma unroll 1
    for (; row < kRows; row += kStep) {
      const int some = row < count ? exist : 0;
      cp_async<kAtOnce>(to, some > 0 ? from : nullptr, some);
      from += kStep * row_bytes;
      to += kStep * tile.row_bytes;
    }
  }
  REGARD_DEVICE void load_bias(const BackwardTask& task, const RowTile& tile, int iteration) const {
    constexpr int kBytes = element_bytes(kConfig.bias.type);
    static_assert(stages_bias(kConfig));
    const View& bias = params.problem.bias;
    const int first_row = tile.index * kRows;
    const int64 first = offset_of(bias.strides, task.b, tile.head, 0, first_row) + task.first_key;
    const uint8* const from = static_cast<const uint8*>(bias.data) + first * kBytes;
    if constexpr (kConfig.bias.one_row) {
      load_tile<kThreads, 1, kKeys, kBytes, kConfig.bias.aligned, false>(
          memory.bias_tile(iteration & 1), 1, task.key_count, RowsInMemory{from, 0});
    } else {
      copy_rows<kKeys * kBytes, 16>(memory.bias_tile(iteration & 1), from,
                                    bias.strides.row * kBytes, task.seq.len_q - first_row,
                                    task.key_count * kBytes);
    }
  }
  REGARD_DEVICE void load_mask(const BackwardTask& task, const RowTile& tile, int iteration) const {
    const View& mask = params.problem.mask;
    const int first_row = tile.index * kRows, count = task.seq.len_q - first_row;
    const int64 column = mask.strides.column;
    const int64 first =
        offset_of(mask.strides, task.b, tile.head, 0, first_row) + task.first_key * column;
    const uint8* const from = static_cast<const uint8*>(mask.data) + first;
    if constexpr (kConfig.mask.one_row || kConfig.mask.copy_bytes == 1) {
      constexpr int kStaged = mask_rows(kConfig);
      load_mask_tile<kThreads, kStaged, kKeys, kConfig.mask.copy_bytes>(
          memory.mask_tile(iteration & 1), smaller(count, kStaged), task.key_count, task.first_key,
          column, RowsInMemory{from, mask.strides.row});
    } else {
      copy_rows<kKeys, kConfig.mask.copy_bytes>(memory.mask_tile(iteration & 1), from,
                                                mask.strides.row, count, task.key_count);
    }
  }

  REGARD_DEVICE void start(const BackwardTask& task, const RowTile& tile, int iteration) const {
    if constexpr (kConfig.features.bias) load_bias(task, tile, iteration);
    if constexpr (stages_mask(kConfig)) {
      // A tile that the mask shows as a whole needs none of it.
      if (!kConfig.tile_map || !tile.is_full) load_mask(task, tile, iteration);
    }
    cp_async_commit();
  }
  REGARD_DEVICE void finish(int iteration) const {
    cp_async_wait<0>();
    mbarrier_arrive(memory.barrier(Memory::kPairTermsFull, iteration & 1));
  }
};

}  // namespace regard
