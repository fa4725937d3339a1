// Pairs of a query and a key: whether they see each other, their logit, and what dropout keeps.
#pragma once

#include "cuda/kernels/params.h"
#include "cuda/kernels/tile/dropout_of.cuh"
#include "cuda/kernels/tile/simt/simt_products.cuh"
#include "semantics/score.h"
#include "semantics/softmax.h"

namespace regard {

// A range of rows or keys, of which there are fewer than 2^31.
struct Range {
  int32 begin = 0;
  int32 end = 0;

  REGARD_DEVICE bool contains(int x) const { return begin <= x && x < end; }
};
REGARD_DEVICE Range range_of(const Interval& x) { return {int32(x.begin), int32(x.end)}; }

// A sequence, with positions only where the kernel knows them.
template <KernelConfig kConfig>
REGARD_DEVICE Sequence simt_sequence(const Problem& p, int64 b) {
  Sequence s = safe_sequence(p, b);
  if constexpr (!kConfig.features.positions) s.positions = {};
  return s;
}

// One query head of one sequence.
template <KernelConfig kConfig>
struct SimtHead {
  static constexpr Features kOn = kConfig.features;
  using Real = RealOf<kConfig.type>;
  using Lanes = GpuLanes<Real>;

  const Problem& p;
  const Sequence seq;
  const int32 b, h;
  const ScoreParams<Real> params;
  const Real unit;
  const HeadTerms<Lanes> head;
  int64 bias_at = 0, mask_at = 0;

  REGARD_DEVICE SimtHead(const Problem& problem, const Sequence& sequence, int b, int h)
      : p(problem),
        seq(sequence),
        b(b),
        h(h),
        params(score_params<Real>(problem)),
        unit(logit_unit(kOn, params)),
        head(head_terms<Lanes>(kOn, problem, b, h)) {
    if constexpr (kOn.bias) bias_at = offset_of(p.bias.strides, b, h, 0, 0);
    if constexpr (kOn.mask) mask_at = offset_of(p.mask.strides, b, h, 0, 0);
  }

  REGARD_DEVICE int kv() const { return h / group_of(p.sizes); }

  // What the bias adds to a pair. A finite f64 stays finite.
  REGARD_DEVICE Real bias_of(int i, int j) const {
    const int64 at = bias_at + i * p.bias.strides.row + j * p.bias.strides.column;
    if constexpr (kConfig.bias.type == Type::f64 && sizeof(Real) == 4) {
      return narrowed(static_cast<const double*>(p.bias.data)[at]);
    } else {
      return load_element<Real>(p.bias.data, kConfig.bias.type, at);
    }
  }

  // Whether mask, spans and bias leave a pair visible, and what the bias adds to it.
  REGARD_DEVICE bool visible(int i, int j, Real& bias) const {
    bias = 0;
    if constexpr (kOn.mask) {
      const int64 at = mask_at + i * p.mask.strides.row + j * p.mask.strides.column;
      if (static_cast<const uint8*>(p.mask.data)[at] == 0) return false;
    }
    if constexpr (has_spans(kOn)) {
      if (!shown_by_spans(kOn, p, seq, b, h, i, j)) return false;
    }
    if constexpr (kOn.bias) {
      bias = bias_of(i, j);
      if (bias == -infinity<Real>()) return false;
    }
    return true;
  }

  // The logit in units of `unit`.
  REGARD_DEVICE Real logit(Real raw, Real bias, int i, int j) const {
    const Real position = relative_position<Real>(seq, i, j);
    return score<Lanes>(kOn, params, raw, bias, head, position).value;
  }
};

// Dropout bits of one query and keys j, j + 16, j + 32 ...: neighbours among these often share a
// Philox call. Every tile makes them again; the whole warp takes part.
template <KernelConfig kConfig>
struct DropoutCall {
  DropoutParams params;
  Philox bits;
  uint32 call = ~0u;

  // The shuffle hides that the key is the same in every tile; otherwise the compiler would keep the
  // keys of all rounds in registers.
  REGARD_DEVICE explicit DropoutCall(const Problem& p) : DropoutCall(dropout_of<kConfig>(p)) {}
  REGARD_DEVICE explicit DropoutCall(const DropoutParams& x)
      : params{x.threshold, shuffle(x.key_low, 0), shuffle(x.key_high, 0), 0} {}

  // Begins the next query.
  REGARD_DEVICE void forget() { call = ~0u; }

  REGARD_DEVICE bool keep(const SimtHead<kConfig>& head, int i, int j) {
    const Positions& at = head.seq.positions;
    const uint32 wanted = dropout_call(at.first_key + j);
    if (wanted != call) {
      call = wanted;
      bits = dropout_bits(params, at.first_batch + head.b, at.first_head + head.h, at.of_row(i),
                          wanted);
    }
    const int slot = dropout_slot(j);
    // The words are selected: an index at run time would put the bits into local memory.
    const uint32 low = slot & 2 ? bits.word[1] : bits.word[0];
    const uint32 high = slot & 2 ? bits.word[3] : bits.word[2];
    return kept(params, Philox{{slot & 4 ? high : low, 0, 0, 0}}, slot & 1);
  }
};

// Element r of an array in registers, by selection, because registers have no index at run time.
template <class T, int kCount>
REGARD_DEVICE T picked(const T (&from)[kCount], int r) {
  T x = from[0];
#pragma unroll
  for (int n = 1; n < kCount; ++n) {
    if (n == r) x = from[n];
  }
  return x;
}
template <class T, int kCount>
REGARD_DEVICE void put(T (&to)[kCount], int r, const T& x) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    if (n == r) to[n] = x;
  }
}

// Rows of a thread's pairs that are unrolled: all, or one if a pair needs many registers, above all
// for the addresses of its terms.
template <KernelConfig kConfig, int kRows>
inline constexpr int kPairRowsAtOnce =
    kConfig.features.softcap || kConfig.features.bias || tests_pairs(kConfig.features) ||
            kConfig.features.dropout
        ? 1
        : kRows;

// Sum, or maximum without NaN, over the 16 threads that share a row of the block.
template <class Real>
REGARD_DEVICE Real sum_of_row(Real x) {
#pragma unroll
  for (int mask = kSimtSide / 2; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}
template <class Real>
REGARD_DEVICE Real max_of_row(Real x) {
#pragma unroll
  for (int mask = kSimtSide / 2; mask > 0; mask /= 2) x = max_of(x, shuffle_xor(x, mask));
  return x;
}

// Writes the rows in `rows` (bit r), times factor, to the own rows from `offset` on: columns
// [first, first + kWidth) of kDim.
template <KernelConfig kConfig, int kDim, int kWidth, int kCount>
REGARD_DEVICE void store_sums(
    const View& view, int64 offset,
    const typename SimtTile<kConfig>::Real (&sums)[SimtTile<kConfig>::kRows][kCount],
    const typename SimtTile<kConfig>::Real (&factor)[SimtTile<kConfig>::kRows], uint32 rows,
    bool accumulate, int first,
    const typename SimtTile<kConfig>::Real (*held)[SimtTile<kConfig>::kRows] = nullptr) {
  using Tile = SimtTile<kConfig>;
  using Real = typename Tile::Real;
  using Columns = SimtColumns<Real, kWidth>;
  const auto store = [&](auto type) {
    constexpr Type kTo = decltype(type)::kElement;
    using Stored = typename ElementOf<kTo>::Stored;
    Stored* const to = static_cast<Stored*>(view.data) + offset;
#pragma unroll
    for (int r = 0; r < Tile::kRows; ++r) {
      if (!(rows >> r & 1)) continue;
      Stored* const row = to + (simt_y() + r * kSimtSide) * view.strides.row;
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        const int column = first + Columns::column(n);
        if (column >= kDim) continue;
        Real x = sums[r][n] * factor[r];
        if (accumulate) x += Real(real_of<kTo>(row[column]));
        if (held && (*held)[r] != 0) x = fma_of(Real(real_of<kTo>(row[column])), (*held)[r], x);
        row[column] = stored_of<kTo>(x);
      }
    }
  };
  if (view.type == kConfig.type) {
    store(RowSource<kConfig.type>());
  } else {
    store(RowSource<Type::f32>());
  }
}

}  // namespace regard
