// Gradients from their f32 sums: dq, which is summed in fragment order, and dbias.
#pragma once

#include "cuda/kernels/tile/dq_order.cuh"
#include "cuda/kernels/tile/hi_lo.cuh"
#include "cuda/kernels/tile/simt/row_vectors.cuh"
#include "plan/cuda/kernel/finish_layout.h"

namespace regard {

// Columns of one block of eight for the rows r and r + 8 of a unit: four packs of four sums.
struct DqBlock {
  float low[8];
  float high[8];
};

template <KernelConfig kConfig>
REGARD_DEVICE DqBlock load_dq_block(const float* sums, int64 unit, int block, int r) {
  constexpr bool kPacked = kConfig.level >= 90;  // a lane's four elements lie side by side
  DqBlock x;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int64 at = dq_offset(kConfig, unit, block, kPacked ? 4 * r + n : 4 * r, kPacked ? 0 : n);
    const auto pack = load_pack<Pack<float, 4>>(sums + at);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int lane = kPacked ? n : k, e = kPacked ? k : n;
      (e < 2 ? x.low : x.high)[2 * lane + e % 2] = pack.x[k];
    }
  }
  return x;
}

// The 16 rows of dq that a warp converts. Thread t has rows t / 4 and t / 4 + 8, and every fourth
// block of columns.
template <KernelConfig kConfig>
struct DqRows {
  const float* sums;  // of the head
  int64 unit;         // of 16 rows
  // The factor of each row's sums; with f32 on wgmma, sums are in units of dout's factors.
  float scale[2];
  float least[2] = {}, most[2] = {};
  float nonfinite[2] = {};

  REGARD_DEVICE static int row() { return lane_index() / 4; }

  REGARD_DEVICE DqRows(const KernelParams& params, const Sequence& seq, int64 b, int64 h,
                       int64 first)
      : sums(params.buffers.dq_sums + h * dq_rows(params.problem) * kConfig.dim),
        unit((first_dq_row(params.problem, seq, b) + first) / 16) {
    scale[0] = scale[1] = float(params.problem.score.scale);
    if constexpr (kConfig.row_terms.used) read_terms(params, seq, b, h, first);
  }

  // The hi and lo parts of dS and k make errors of at most 2^-7 of a row's recorded losses. A row
  // is flagged if they may be 2^-13 of its largest element.
  REGARD_DEVICE void read_terms(const KernelParams& params, const Sequence& seq, int64 b, int64 h,
                                int64 first) {
    constexpr float kLeast = 0x1p6f;
    const Problem& p = params.problem;
    const auto* const all = static_cast<const HiLoRowTerm*>(params.buffers.row_terms);
    const auto* const terms =
        all + h * hi_lo_term_rows(p) + first +
        first_hi_lo_row<int64>(p, b, seq.first_q, p.sizes.len_q, kHiLoBackwardUnit) + row();
    const float* const losses = dq_losses(params) + (terms - all);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      scale[n] *= float_of(terms[8 * n].factors << 16);
      const bool sees = terms[8 * n].value < infinity<float>();  // its lse
      least[n] = sees ? losses[8 * n] * kLeast * magnitude_of(scale[n]) : 0.0f;
    }
  }

  template <class Work>
  REGARD_DEVICE void each_block(Work work) const {
#pragma unroll 2
    for (int block = lane_index() % 4; block < kConfig.dim / 8; block += 4) {
      DqBlock x = load_dq_block<kConfig>(sums, unit, block, row());
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        x.low[n] *= scale[0];
        x.high[n] *= scale[1];
      }
      work(block, x);
    }
  }
  REGARD_DEVICE void look(const DqBlock& x) {
    nonfinite[0] += zero_if_finite(x.low);
    nonfinite[1] += zero_if_finite(x.high);
    if constexpr (kConfig.row_terms.used) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        most[0] = max_of(most[0], magnitude_of(x.low[e]));
        most[1] = max_of(most[1], magnitude_of(x.high[e]));
      }
    }
  }
  // After all blocks were looked at.
  REGARD_DEVICE void flag(uint8* flags) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      nonfinite[n] = sum_of_lanes<4>(nonfinite[n]);
      if constexpr (kConfig.row_terms.used) {
        most[n] = max_of_lanes<4>(most[n]);
        if (!(most[n] >= least[n])) nonfinite[n] = infinity<float>();
      }
      if (lane_index() % 4 == 0) flags[warp_index() * 16 + row() + 8 * n] = nonfinite[n] != 0;
    }
  }
};

// Converts a tile of rows of one of batch * heads. Returns whether one of the thread's rows is not
// finite; flags: of the rows of the tile.
template <KernelConfig kConfig>
REGARD_DEVICE bool convert_dq(const KernelParams& params, int head, int64 tile, uint8* flags) {
  const Problem& p = params.problem;
  const auto [b, h] = batch_head(head, p.sizes.heads_q);
  const Sequence seq = safe_sequence(p, b);
  const int64 first = tile * converted_rows(kConfig) + warp_index() * 16;
  if (first >= seq.len_q) return false;
  DqRows<kConfig> rows(params, seq, b, h, first);
  const int64 own = first + rows.row();
  const bool exist[2] = {own < seq.len_q, own + 8 < seq.len_q};
  // With `accumulate`, flagged rows must stay as they are until they are computed again.
  bool written[2] = {exist[0], exist[1]};
  if (kConfig.flags_nonfinite && p.accumulate) {
    rows.each_block([&](int, const DqBlock& x) { rows.look(x); });
    rows.flag(flags);
    written[0] = exist[0] && rows.nonfinite[0] == 0;
    written[1] = exist[1] && rows.nonfinite[1] == 0;
  }
  const int64 to = offset_of(p.dq.strides, b, h, seq.first_q, own);
  const bool aligned = is_aligned(p.dq);
  with_type<kConfig.type>(p.dq.type, [&](auto type) {
    constexpr Type kTo = decltype(type)::kElement;
    rows.each_block([&](int block, DqBlock& x) {
      if (kConfig.flags_nonfinite && !p.accumulate) rows.look(x);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        if (!written[n]) continue;
        auto& sums_of_row = n == 0 ? x.low : x.high;
        const int64 at = to + n * 8 * p.dq.strides.row + block * 8, count = p.sizes.dim - block * 8;
        if (p.accumulate) {
          float old[8];
          load_vector<kTo>(old, p.dq, at, count, aligned);
#pragma unroll
          for (int e = 0; e < 8; ++e) sums_of_row[e] += old[e];
        }
        store_vector<kTo>(p.dq, at, count, aligned, sums_of_row);
      }
    });
  });
  if (kConfig.flags_nonfinite && !p.accumulate) rows.flag(flags);
  return (exist[0] && rows.nonfinite[0] != 0) || (exist[1] && rows.nonfinite[1] != 0);
}

// A tile of one of the bias's batch * heads.
template <KernelConfig kConfig>
REGARD_DEVICE void convert_dbias(const KernelParams& params, int64 head, int64 tile) {
  const Problem& p = params.problem;
  const int64* const n = p.bias_sizes;
  const int64 across = divide_up(n[3], kDbiasColumns), b = head / n[1], h = head % n[1];
  const int64 first_row = tile / across * kDbiasRows;
  const int64 first_column = tile % across * kDbiasColumns;
  const Strides& from = params.buffers.dbias_strides;
#pragma unroll 4
  for (int element = thread_index(); element < kDbiasRows * kDbiasColumns;
       element += kConfig.tiling.warps * 32) {
    const int64 i = first_row + element / kDbiasColumns;
    const int64 j = first_column + element % kDbiasColumns;
    if (i >= n[2] || j >= n[3]) continue;
    float x = params.buffers.dbias_sums[offset_of(from, b, h, 0, i) + j * from.column];
    const int64 at = offset_of(p.dbias.strides, b, h, 0, i) + j * p.dbias.strides.column;
    if (adds_in_f64<kConfig.bias.type>(p, at, x)) continue;
    if (p.accumulate) x += load_element<float>(p.dbias.data, p.dbias.type, at);
    store_element(p.dbias.data, p.dbias.type, at, x);
  }
}

}  // namespace regard
