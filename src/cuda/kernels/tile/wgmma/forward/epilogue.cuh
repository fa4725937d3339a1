// The epilogue of the wgmma forward kernel: a consumer warp writes out, lse and the flags of rows
// that are not finite for its 16 rows.
#pragma once

#include "cuda/kernels/tile/row_again.cuh"
#include "cuda/kernels/tile/row_part.cuh"
#include "cuda/kernels/tile/wgmma/forward/softmax.cuh"

namespace regard {

template <KernelConfig kConfig>
struct Epilogue {
  using Memory = ForwardMemory<kConfig>;
  using Coords = WarpgroupCoords<kConfig>;
  using Out = typename Coords::Out;
  using L = MmaLanes<kConfig.type>;
  using Format = typename ElementOf<kConfig.type>::Format;
  static constexpr Features kOn = kConfig.features;
  static constexpr bool kLooks = kConfig.flags_nonfinite || kConfig.repeats_rows;
  static constexpr int kOutBlocks = Coords::kOutBlocks, kRows = Memory::kRows;
  static constexpr int kPanels = Memory::kLayout.out_panels;  // of out in shared memory; 0: none
  static constexpr bool kSliced = kConfig.tiling.slices > 1;
  static_assert(!kSliced || kPanels == 0);
  static_assert(!(kSliced && (kConfig.split_kv || kConfig.continues || kConfig.repeats_rows)));

  const KernelParams& params;
  const ForwardMaps& maps;
  const Memory memory;
  const ForwardTile<kConfig>& tile;
  const int warp_row;
  WarpgroupSoftmax<kConfig> softmax;
  const int rows_left = uniform(tile.row_count) - warp_row;  // of the warp; may be below 0

  // The index of a row of the lane among the warp's rows.
  REGARD_DEVICE int row_of(int half) const { return half * 8 + lane_index() / 4; }
  REGARD_DEVICE int64 row_index(int half) const {
    const Sequence seq{.first_q = tile.first_q};
    return int64(tile.head) * params.problem.sizes.rows_q +
           flat_row(params.problem, seq, tile.b, tile.first_row + warp_row + row_of(half));
  }

  // Bit r: row r is to be computed again.
  REGARD_DEVICE uint32 write(Out& out) {
    const Problem& p = params.problem;
    softmax.sum_over_lanes();
    if constexpr (kConfig.split_kv) {
      write_part(out);
      return 0;
    }
    if constexpr (kOn.sink) {
      softmax.add_sink(static_cast<const float*>(p.sink.data)[tile.head * p.sink.strides.head]);
      softmax.rescale(out);
    }
    bool nonfinite[2];  // among the lane's own elements
#pragma unroll
    for (int half = 0; half < 2; ++half) nonfinite[half] = normalise(out, half);
    if (rows_left <= 0) return 0;
    if constexpr (kConfig.continues) {
      write_continued(out, nonfinite);
    } else {
      if constexpr (kPanels > 0) {
        store_panels(out);
      } else {
        store_pairs(out);
      }
      if (params.problem.lse.given() || kConfig.flags_nonfinite) write_rows(nonfinite);
    }
    if constexpr (!kConfig.repeats_rows) return 0;
    const uint32 rows = rows_with(nonfinite);
    return rows_left < 16 ? rows & ((1u << rows_left) - 1) : rows;
  }

  // split_kv: what combine merges.
  REGARD_DEVICE void write_part(const Out& out) const {
    const int64 columns = params.problem.sizes.dim_v;
    const bool in_pairs = columns % 2 == 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row_of(half) >= rows_left) continue;
      const int64 part = part_index(params, tile.share, row_index(half));
      float* const to = part_of_out(params, part);
#pragma unroll
      for (int n = 0; n < kOutBlocks; ++n) {
        const int column = Coords::column_of(n, 0);
        const float first = out[n][half * 2], second = out[n][half * 2 + 1];
        if (column >= columns) continue;
        if (in_pairs) {
          store_global_64(to + column, bits_of(first), bits_of(second));
        } else {
          to[column] = first;
          if (column + 1 < columns) to[column + 1] = second;
        }
      }
      const SoftmaxRow<L>& sums = softmax.rows[half];
      if (lane_index() % 4 == 0) *row_part(params, part) = {sums.max, sums.sum};
    }
  }

  // After the block's only tile has been written.
  REGARD_DEVICE void repeat(uint32 rows) const {
    if (rows == 0) return;
    if constexpr (kPanels > 0) {
      if (lane_index() == 0) tma_store_wait();
    }
    sync_warp();  // the rows have been written
    compute_again<kConfig>(params, tile.b, rows,
                           {tile.head, tile.first_row + warp_row, tile.len_q});
  }

  // Divides by the row's sum. True where an element of the lane is not finite, if that matters.
  REGARD_DEVICE bool normalise(Out& out, int half) const {
    constexpr int kChains = 4;
    const float factor = normaliser_of(softmax.rows[half]) *
                         (kOn.dropout ? float(keep_scale(params.problem.dropout)) : 1.0f);
    float zero[kChains] = {};  // NaN once an element was not finite
#pragma unroll
    for (int n = 0; n < kOutBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = out[n][half * 2 + e];
        x *= factor;
        if constexpr (kLooks) zero[(2 * n + e) % kChains] += x * 0.0f;
      }
    }
    return kLooks && !(zero[0] + zero[1] + (zero[2] + zero[3]) == 0);
  }
  // f16 and bf16 round more than an approximate reciprocal does. A division has a branch for
  // denormal numbers, which takes longer than the rest of a row.
  static REGARD_DEVICE float normaliser_of(const SoftmaxRow<L>& row) {
    if constexpr (kConfig.type == Type::f32) return normaliser<L>(row);
    return row.sum == 0 ? 0.0f : rcp_approx(row.sum);
  }
  // Rows of a continued call, merged with what out and lse hold, except those that are computed
  // again.
  REGARD_DEVICE void write_continued(const Out& out, const bool (&nonfinite)[2]) const {
    const Problem& p = params.problem;
    const int columns = int(p.sizes.dim_v) - Coords::column_of(0, 0);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int flagged = 0;
      if constexpr (kLooks) {
        flagged = nonfinite[half];
        flagged |= shuffle_xor(flagged, 1);
        flagged |= shuffle_xor(flagged, 2);
      }
      const bool exists = row_of(half) < rows_left;
      const int row = tile.first_row + warp_row + row_of(half);
      float* const lse = static_cast<float*>(p.lse.data) +
                         offset_of(p.lse.strides, tile.b, tile.head, tile.first_q, row);
      const float own = lse_of_reference<L>(softmax.rows[half]), given = exists ? *lse : 0;
      sync_warp();  // the lanes of a row have read its lse
      if (!exists) continue;
      if constexpr (kConfig.flags_nonfinite) {
        if (lane_index() % 4 == 0) write_row_flag(params, row_index(half), flagged != 0);
      }
      if (flagged || leaves_as_given(given, own)) continue;
      const auto merged = continuation<L>(given, own);
      float* const to = static_cast<float*>(p.out.data) + Coords::column_of(0, 0) +
                        offset_of(p.out.strides, tile.b, tile.head, tile.first_q, row);
#pragma unroll
      for (int n = 0; n < kOutBlocks; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (n * 8 + e >= columns) continue;
          const float held = merged.given == 0 ? 0 : to[n * 8 + e];
          to[n * 8 + e] = fma_of(held, merged.given, out[n][half * 2 + e] * merged.own);
        }
      }
      if (lane_index() % 4 == 0) *lse = merged.lse;
    }
  }

  // Lse and flags; one of the four lanes that hold a row writes them.
  REGARD_DEVICE void write_rows(const bool (&nonfinite)[2]) const {
    const Problem& p = params.problem;
    int flags[2] = {};
    if constexpr (kConfig.flags_nonfinite) {
      if (any_in_warp(nonfinite[0] || nonfinite[1])) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          flags[half] = nonfinite[half];
          flags[half] |= shuffle_xor(flags[half], 1);
          flags[half] |= shuffle_xor(flags[half], 2);
        }
      }
    }
    const int half = lane_index() % 4;
    if (half >= 2 || row_of(half) >= rows_left) return;
    if (p.lse.given() && tile.first_column() == 0) {
      const int64 to = offset_of(p.lse.strides, tile.b, tile.head, tile.first_q,
                                 tile.first_row + warp_row + row_of(half));
      static_cast<float*>(p.lse.data)[to] =
          lse_of_reference<L>(half == 0 ? softmax.rows[0] : softmax.rows[1]);
    }
    if constexpr (kConfig.flags_nonfinite) {
      const bool flagged = (half == 0 ? flags[0] : flags[1]) != 0;
      // Slices of a row only set flags that are clear before.
      if (flagged || !kSliced) write_row_flag(params, row_index(half), flagged);
    }
  }

  // Stores out by TMA, through the warp's rows of shared memory, kPanels panels at a time.
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
        copy_last_rows(first);
      } else if (lane == 0) {
        tma_store_panels(first);
      }
    }
  }
  REGARD_DEVICE void tma_store_panels(int first) const {
    const bool packed = params.problem.packed;
#pragma unroll
    for (int panel = first; panel < first + kPanels && panel < panels_of(kConfig.dim_v); ++panel) {
      tma_store(maps.out,
                {.column = panel * kPanelColumns,
                 .row = tile.first_q + tile.first_row + warp_row,
                 .head = tile.head,
                 .batch = packed ? 0 : tile.b},
                memory.out(panel - first) + warp_row * kPanelRowBytes);
    }
    tma_store_commit();
  }
  // The last rows of a packed sequence.
  REGARD_DEVICE void copy_last_rows(int first) const {
    const View& view = params.problem.out;
    const int64 to =
        offset_of(view.strides, tile.b, tile.head, tile.first_q, tile.first_row + warp_row) +
        first * kPanelColumns;
    copy_rows<kPanels * 8>(
        memory.out(0), kRows, warp_row, rows_left, int(params.problem.sizes.dim_v) / 8 - first * 8,
        reinterpret_cast<uint8*>(static_cast<uint16*>(view.data) + to), view.strides.row * 2);
  }

  // From registers: f32, or rows that TMA cannot write.
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
    const int first = tile.first_column() + Coords::column_of(0, 0);
    const int columns = int(params.problem.sizes.dim_v) - first;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row_of(half) >= rows_left) continue;
      Stored* const to = static_cast<Stored*>(view.data) + first +
                         offset_of(view.strides, tile.b, tile.head, tile.first_q,
                                   tile.first_row + warp_row + row_of(half));
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

  // Before the block ends: TMA has read its shared memory.
  static REGARD_DEVICE void finish() {
    if constexpr (kPanels > 0) {
      if (lane_index() == 0) tma_store_wait_read();
    }
  }
};

}  // namespace regard
