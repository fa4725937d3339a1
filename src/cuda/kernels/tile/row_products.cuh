// What the backward pass computes of every query row: lse and delta = dout . out - dlse.
#pragma once

#include "cuda/kernels/tile/simt/row_vectors.cuh"
#include "semantics/softmax.h"

namespace regard {

// dout . out of kRows rows, `step` apart from row i on, by the kLanes threads that share them. Rows
// are loaded in whole vectors of kElements of q's type, all at once; rows past the end repeat the
// last one.
template <Type kType, int kLanes, int kElements, class Real, int kRows>
REGARD_DEVICE void multiply_vectors(Real (&sums)[kRows], const Problem& p, const Sequence& seq,
                                    int64 b, int64 h, int64 i, int step) {
  using Stored = typename ElementOf<kType>::Stored;
  using Vector = Pack<Stored, kElements>;
  const int64 last = larger<int64>(seq.len_q - 1, 0);
  const auto* const out =
      static_cast<const Stored*>(p.out.data) + offset_of(p.out.strides, b, h, seq.first_q, 0);
  const auto* const dout =
      static_cast<const Stored*>(p.dout.data) + offset_of(p.dout.strides, b, h, seq.first_q, 0);
#pragma unroll
  for (int r = 0; r < kRows; ++r) sums[r] = 0;
  for (int d = lane_index() % kLanes * kElements; d < p.sizes.dim_v; d += kLanes * kElements) {
    Vector x[kRows], y[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64 row = smaller(i + r * step, last);
      x[r] = *reinterpret_cast<const Vector*>(out + row * p.out.strides.row + d);
      y[r] = *reinterpret_cast<const Vector*>(dout + row * p.dout.strides.row + d);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int n = 0; n < kElements; ++n) {
        // A row that sees nothing has out = 0 and takes nothing from dout, whatever that holds.
        const Real of_out = Real(real_of<kType>(x[r].x[n]));
        if (of_out != 0) sums[r] = fma_of(of_out, Real(real_of<kType>(y[r].x[n])), sums[r]);
      }
    }
  }
}

// The same of rows of any types and strides, one after another.
template <Type kType, int kLanes, int kElements, class Real, int kRows>
REGARD_DEVICE void multiply_any(Real (&sums)[kRows], const Problem& p, const Sequence& seq, int64 b,
                                int64 h, int64 i, int step) {
  const int64 dim = p.sizes.dim_v;
#pragma unroll 1
  for (int r = 0; r < kRows; ++r) {
    const int64 row = i + r * step, count = row < seq.len_q ? dim : 0;
    Real sum = 0;
    for (int64 d = lane_index() % kLanes * kElements; d < count; d += kLanes * kElements) {
      Real out[kElements], dout[kElements];
      const auto load = [&](Real(&x)[kElements], const View& view) {
        with_type<kType>(view.type, [&](auto type) {
          load_vector<decltype(type)::kElement>(
              x, view, offset_of(view.strides, b, h, seq.first_q, row) + d, dim - d, false);
        });
      };
      load(out, p.out);
      load(dout, p.dout);
#pragma unroll
      for (int n = 0; n < kElements; ++n) {
        if (out[n] != 0) sum = fma_of(out[n], dout[n], sum);
      }
    }
#pragma unroll
    for (int n = 0; n < kRows; ++n) sums[n] = n == r ? sum : sums[n];
  }
}

// A row's lse, and its dlse: delta = dout . out - dlse. A given delta is -dlse of no product.
template <class Real, bool kGivenDelta>
struct RowInputs {
  Real lse = -infinity<Real>();
  Real dlse = 0;

  REGARD_DEVICE void load(const Problem& p, const Sequence& seq, int64 b, int64 h, int64 row) {
    if (row >= seq.len_q) return;
    lse = static_cast<const Real*>(p.lse.data)[offset_of(p.lse.strides, b, h, seq.first_q, row)];
    if constexpr (kGivenDelta) {
      dlse = -static_cast<const Real*>(
          p.delta.data)[offset_of(p.delta.strides, b, h, seq.first_q, row)];
    } else if (p.dlse.given()) {
      dlse =
          static_cast<const Real*>(p.dlse.data)[offset_of(p.dlse.strides, b, h, seq.first_q, row)];
    }
  }
  REGARD_DEVICE RowState<Real> state(Real product) const {
    if (lse == -infinity<Real>()) return {infinity<Real>(), 0};
    return {lse, product - dlse};
  }
};

template <Type kType, int kElements>
REGARD_DEVICE bool has_row_vectors(const Problem& p) {
  return p.out.type == kType && p.dout.type == kType && is_aligned(p.out) && is_aligned(p.dout) &&
         p.sizes.dim_v % kElements == 0;
}

}  // namespace regard
