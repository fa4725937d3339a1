// What the backward pass needs of every query row; and clears the sums of dq.
#pragma once

#include "cuda/kernels/tile/row_terms.cuh"
#include "cuda/kernels/tile/simt_lines.cuh"
#include "semantics/softmax.h"

namespace regard {

// dout . out of kRows rows, `step` apart from row i on, for the kLanes threads that share them.
template <Type kOut, Type kDout, int kLanes, int kElements, class Real, int kRows>
REGARD_DEVICE void multiply_out(Real (&sums)[kRows], const Problem& p, const Sequence& seq, int64 b,
                                int64 h, int64 i, int step, bool aligned) {
  const int64 dim = p.sizes.dim_v;
#pragma unroll
  for (int r = 0; r < kRows; ++r) sums[r] = 0;
  for (int64 d = lane_index() % kLanes * kElements; d < dim; d += kLanes * kElements) {
    Real out[kRows][kElements], dout[kRows][kElements];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64 row = i + r * step, count = row < seq.len_q ? dim - d : 0;
      load_line<kOut>(out[r], p.out, offset_of(p.out.strides, b, h, seq.first_q, row) + d, count,
                      aligned);
      load_line<kDout>(dout[r], p.dout, offset_of(p.dout.strides, b, h, seq.first_q, row) + d,
                       count, aligned);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int n = 0; n < kElements; ++n) {
        // A row that sees nothing has out = 0 and takes nothing from dout, whatever that holds.
        if (out[r][n] != 0) sums[r] = fma_of(out[r][n], dout[r][n], sums[r]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) sums[r] = sum_of_lanes<kLanes>(sums[r]);
}

template <KernelConfig kConfig>
REGARD_DEVICE void clear_dq_sums(const KernelParams& params) {
  const int64 packs = params.problem.sizes.heads_q * dq_rows(params.problem) * (kConfig.dim / 4);
  const int64 part = divide_up(packs, params.grid.blocks());
  const int64 begin = block_index() * part, end = smaller(begin + part, packs);
  auto* const sums = reinterpret_cast<Pack<float, 4>*>(params.buffers.dq_sums);
  for (int64 n = begin + thread_index(); n < end; n += kConfig.tiling.warps * 32) {
    store_pack(sums + n, Pack<float, 4>{});
  }
}

template <KernelConfig kConfig>
REGARD_DEVICE void delta(const KernelParams& params) {
  constexpr Type kType = kConfig.type;
  using Real = RealOf<kType>;
  constexpr int kElements = 16 / int(sizeof(typename ElementOf<kType>::Stored));
  constexpr int kLanes = lanes_of_row(kConfig.dim_v, kElements);
  constexpr int kStep = kConfig.tiling.warps * 32 / kLanes;  // rows that a block has under way
  constexpr int kRows = 2;                                   // of a thread at once
  if constexpr (kConfig.wants_dq) clear_dq_sums<kConfig>(params);
  const Problem& p = params.problem;
  const BlockPlace place = place_of(params.grid, block_index());
  const int64 heads = p.sizes.heads_q, b = place.head / heads, h = place.head % heads;
  const Sequence seq = safe_sequence(p, b);
  const int64 first = int64(place.tile) * kConfig.tiling.rows;
  // Rows past a sequence's end have a state of their own where they have a place of their own.
  const int64 end =
      smaller<int64>(first + kConfig.tiling.rows, p.packed ? seq.len_q : p.sizes.len_q);
  const bool aligned = is_aligned(p.out) && is_aligned(p.dout);
  auto* const states = static_cast<RowState<Real>*>(params.buffers.row_states);

  for (int64 base = first; base < end; base += kRows * kStep) {
    const int64 i = base + thread_index() / kLanes;
    Real sums[kRows];
    with_type<kType>(p.out.type, [&](auto out) {
      with_type<kType>(p.dout.type, [&](auto dout) {
        multiply_out<decltype(out)::kElement, decltype(dout)::kElement, kLanes, kElements>(
            sums, p, seq, b, h, i, kStep, aligned);
      });
    });
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64 row = i + r * kStep;
      if (lane_index() % kLanes != 0 || row >= end) continue;
      RowState<Real> state{infinity<Real>(), 0};
      if (row < seq.len_q) {
        const int64 at = offset_of(p.lse.strides, b, h, seq.first_q, row);
        const Real lse = static_cast<const Real*>(p.lse.data)[at];
        if (lse != -infinity<Real>()) {
          state = {lse, sums[r]};
          if (p.dlse.given()) {
            state.delta -= static_cast<const Real*>(
                p.dlse.data)[offset_of(p.dlse.strides, b, h, seq.first_q, row)];
          }
        }
      }
      states[h * p.sizes.rows_q + flat_row(p, seq, b, row)] = state;
      if constexpr (kConfig.row_terms) {
        store_row_terms<kConfig>(params, h * dq_rows(p) + first_dq_row(p, seq, b) + row, state);
      }
    }
  }
}

}  // namespace regard
