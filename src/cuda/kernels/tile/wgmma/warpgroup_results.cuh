// The results of a warp's 16 rows of a wgmma forward tile: out, lse, marks.
#pragma once

#include "cuda/kernels/tile/wgmma/warpgroup_softmax.cuh"

namespace regard {

template <KernelConfig kConfig>
struct WarpgroupResults {
  using Memory = WarpgroupMemory<kConfig>;
  using Place = WarpgroupPlace<kConfig>;
  using Out = typename Place::Out;
  using L = MmaLanes<kConfig.type>;
  using Format = typename ElementOf<kConfig.type>::Format;
  static constexpr Features kOn = kConfig.features;
  static constexpr int kOutBlocks = Place::kOutBlocks, kRows = Memory::kRows;
  static constexpr int kPanels = Memory::kLayout.out_panels;  // at once

  const KernelParams& params;
  const ForwardMaps& maps;
  const Memory memory;
  const ForwardTask& task;
  const int warp_row;
  WarpgroupSoftmax<kConfig> softmax;
  const int rows_left = uniform(task.row_count) - warp_row;  // of the warp; <= 0: none

  REGARD_DEVICE int row_of(int half) const { return half * 8 + lane_index() / 4; }  // of the warp
  REGARD_DEVICE int64 line_of(int half) const {
    const Sequence seq{.first_q = task.first_q};
    return int64(task.head) * params.problem.sizes.rows_q +
           flat_row(params.problem, seq, task.b, task.first_row + warp_row + row_of(half));
  }

  REGARD_DEVICE void write(Out& out) {
    const Problem& p = params.problem;
    softmax.sum_over_lanes();
    if constexpr (kOn.sink) {
      softmax.add_sink(static_cast<const float*>(p.sink.data)[task.head * p.sink.strides.head]);
      softmax.rescale(out);
    }
    bool spoiled[2];  // by the lane's own results
#pragma unroll
    for (int half = 0; half < 2; ++half) spoiled[half] = divide(out, half);
    if (rows_left <= 0) return;
    if constexpr (kPanels > 0) {
      store_panels(out);
    } else {
      store_pairs(out);
    }
    if (params.problem.lse.given() || kConfig.flags_nonfinite) write_rows(spoiled);
  }

  // By the row's sum. Whether a result of the lane's is not finite, where rows are marked.
  REGARD_DEVICE bool divide(Out& out, int half) const {
    constexpr int kChains = 4;
    const float factor = normaliser_of(softmax.rows[half]) *
                         (kOn.dropout ? float(keep_scale(params.problem.dropout)) : 1.0f);
    float zero[kChains] = {};  // NaN once a result was not finite
#pragma unroll
    for (int n = 0; n < kOutBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = out[n][half * 2 + e];
        x *= factor;
        if constexpr (kConfig.flags_nonfinite) zero[(2 * n + e) % kChains] += x * 0.0f;
      }
    }
    return kConfig.flags_nonfinite && !(zero[0] + zero[1] + (zero[2] + zero[3]) == 0);
  }
  // What 16 bits round needs no division, whose branch for numbers that no sum is takes longer than
  // the rest of a row.
  static REGARD_DEVICE float normaliser_of(const SoftmaxRow<L>& row) {
    if constexpr (kConfig.type == Type::f32) return normaliser<L>(row);
    return row.sum == 0 ? 0.0f : rcp_approx(row.sum);
  }
  // Lse and marks, of each row by one of the four lanes that hold it.
  REGARD_DEVICE void write_rows(const bool (&spoiled)[2]) const {
    const Problem& p = params.problem;
    int marks[2] = {};
    if constexpr (kConfig.flags_nonfinite) {
      if (any_in_warp(spoiled[0] || spoiled[1])) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          marks[half] = spoiled[half];
          marks[half] |= shuffle_xor(marks[half], 1);
          marks[half] |= shuffle_xor(marks[half], 2);
        }
      }
    }
    const int half = lane_index() % 4;
    if (half >= 2 || row_of(half) >= rows_left) return;
    if (p.lse.given()) {
      const int64 to = offset_of(p.lse.strides, task.b, task.head, task.first_q,
                                 task.first_row + warp_row + row_of(half));
      static_cast<float*>(p.lse.data)[to] =
          lse_of_reference<L>(half == 0 ? softmax.rows[0] : softmax.rows[1]);
    }
    if constexpr (kConfig.flags_nonfinite) {
      write_row_flag(params, line_of(half), (half == 0 ? marks[0] : marks[1]) != 0);
    }
  }

  // Through shared memory of the warp's own, as many panels at a time as there are.
  REGARD_DEVICE void store_panels(const Out& out) const {
    const int lane = lane_index();
    constexpr int kAll = panels_of(kConfig.dim_v);
#pragma unroll
    for (int first = 0; first < kAll; first += kPanels) {
      if (lane == 0) tma_store_wait_read();
      sync_warp();
#pragma unroll
      for (int n = first * 8; n < kOutBlocks && n < (first + kPanels) * 8; n += 2) {
        const uint32 m[4] = {pack<Format>(out[n][0], out[n][1]), pack<Format>(out[n][2], out[n][3]),
                             pack<Format>(out[n + 1][0], out[n + 1][1]),
                             pack<Format>(out[n + 1][2], out[n + 1][3])};
        stmatrix(
            memory.out(n / 8 - first) + swizzled_offset(warp_row + lane % 16, n % 8 + lane / 16),
            m);
      }
      fence_proxy_async();
      sync_warp();
      if (kConfig.varlen && rows_left < 16) {
        copy_rows(first);
      } else if (lane == 0) {
        store_boxes(first);
      }
    }
  }
  REGARD_DEVICE void store_boxes(int first) const {
    const bool packed = params.problem.packed;
#pragma unroll
    for (int panel = first; panel < first + kPanels && panel < panels_of(kConfig.dim_v); ++panel) {
      tma_store(maps.out,
                {.column = panel * kPanelColumns,
                 .row = task.first_q + task.first_row + warp_row,
                 .head = task.head,
                 .batch = packed ? 0 : task.b},
                memory.out(panel - first) + warp_row * kPanelRowBytes);
    }
    tma_store_commit();
  }
  // Where rows follow that are not the tile's: the copy engine would write them all.
  REGARD_DEVICE void copy_rows(int first) const {
    const View& view = params.problem.out;
    const int columns = int(params.problem.sizes.dim_v);
    const int count = rows_left * kPanels * kPanelColumns;
#pragma unroll 1
    for (int index = lane_index(); index < count; index += 32) {
      const int row = index / (kPanels * kPanelColumns);
      const int column = index % (kPanels * kPanelColumns);
      const int to_column = first * kPanelColumns + column;
      if (to_column >= columns) continue;
      const SharedAddress from = memory.out(column / kPanelColumns) +
                                 swizzled_offset(warp_row + row, column % kPanelColumns / 8);
      const uint32 word = load_shared_32(from + column % 8 / 2 * 4);
      const int64 to = offset_of(view.strides, task.b, task.head, task.first_q,
                                 task.first_row + warp_row + row) +
                       to_column;
      static_cast<uint16*>(view.data)[to] = uint16(word >> (column % 2 * 16));
    }
  }

  // From registers: f32, or rows that the copy engine cannot write.
  REGARD_DEVICE void store_pairs(const Out& out) const {
    if (kConfig.type == Type::f32 || params.problem.out.type == Type::f32) {
      store_pairs_as<Type::f32>(out);
    } else {
      store_pairs_as<kConfig.type>(out);
    }
  }
  template <Type kType>
  REGARD_DEVICE void store_pairs_as(const Out& out) const {
    using Stored = typename ElementOf<kType>::Stored;
    const View& view = params.problem.out;
    const int columns = int(params.problem.sizes.dim_v) - Place::column_of(0, 0);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row_of(half) >= rows_left) continue;
      Stored* const to = static_cast<Stored*>(view.data) + Place::column_of(0, 0) +
                         offset_of(view.strides, task.b, task.head, task.first_q,
                                   task.first_row + warp_row + row_of(half));
#pragma unroll
      for (int n = 0; n < kOutBlocks; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float x = out[n][half * 2 + e];
          if (n * 8 + e >= columns) continue;
          if constexpr (kType == Type::f32) {
            to[n * 8 + e] = x;
          } else {
            to[n * 8 + e] = narrow<Format>(x);
          }
        }
      }
    }
  }

  // Before the block ends: its shared memory has been read.
  static REGARD_DEVICE void finish() {
    if constexpr (kPanels > 0) {
      if (lane_index() == 0) tma_store_wait_read();
    }
  }
};

}  // namespace regard
