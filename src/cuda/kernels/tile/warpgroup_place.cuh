// Which rows and keys the accumulators of a lane of a consumer warpgroup are: as ForwardPlace says
// it of a block of the mma kernel, for one tile of rows after another.
#pragma once

#include "cuda/kernels/tile/score_tile.cuh"
#include "cuda/kernels/tile/warpgroup_memory.cuh"

namespace regard {

template <KernelConfig kConfig>
struct WarpgroupPlace {
  static constexpr int kM = 1;
  static constexpr int kRows = kConfig.tiling.rows, kKeys = kConfig.tiling.keys;
  static constexpr int kKeyBlocks = kKeys / 8, kOutBlocks = kConfig.dim_v / 8;
  static_assert(kKeys % 16 == 0 && kConfig.dim % 16 == 0 && kConfig.dim_v % 16 == 0);
  static_assert(kRows == kWarpgroupRows * consumers_of(kConfig.tiling));

  using Scores = Accumulator[kM][kKeyBlocks];
  using Out = Accumulator[kOutBlocks];

  struct Row {
    int head;
    int i;
  };

  const KernelParams& params;
  const Problem& p;
  const ShortSequence seq;
  const int b, head;
  const int first_row, row_count;  // of the tile
  const int warp_row;              // the warp's first row in the tile

  REGARD_DEVICE WarpgroupPlace(const KernelParams& kernel_params, const ForwardTask& task,
                               int first_row_of_warp)
      : params(kernel_params),
        p(kernel_params.problem),
        seq(sequence_of(p, task)),
        b(task.b),
        head(task.head),
        first_row(task.first_row),
        row_count(task.row_count),
        warp_row(first_row_of_warp) {}

  static REGARD_DEVICE ShortSequence sequence_of(const Problem& p, const ForwardTask& task) {
    if constexpr (!kConfig.ragged) return {int(p.sizes.len_q), int(p.sizes.len_k), 0, 0};
    return {task.len_q, task.len_k, task.first_q, task.first_k};
  }

  REGARD_DEVICE Row row_at(int row) const { return {head, first_row + row}; }
  // The row of accumulator element 2 half + e of a block, and the column of block n.
  REGARD_DEVICE int row_of(int, int half) const { return warp_row + half * 8 + lane_index() / 4; }
  static REGARD_DEVICE int column_of(int n, int e) { return n * 8 + lane_index() % 4 * 2 + e; }

  // The keys that every row of the warpgroup sees, as far as intervals say.
  REGARD_DEVICE ShortInterval common_keys(int warpgroup_row) const {
    if (!kConfig.features.interval) return {0, seq.len_k};
    const int last = seq.len_q - 1;
    const int first = smaller(first_row + warpgroup_row, last);
    return {int(keys_of(smaller(first + kWarpgroupRows - 1, last)).begin), int(keys_of(first).end)};
  }
  REGARD_DEVICE Interval keys_of(int i) const {
    return visible_keys(p.mask_params, i, seq.len_q, seq.len_k);
  }
};

}  // namespace regard
