// A few query rows of one key head, for decoding: what counts is the time that it takes to read
// keys and values. The backward pass takes their products with keys from here too. Vectors hold
// head elements, where a panel would leave most of its lanes empty. Rows are read as they lie, in
// every type; where they end with a part of a vector, by a masked load.
#pragma once

#include "cpu/kernels/ahead.hpp"
#include "cpu/kernels/few_softmax.hpp"
#include "cpu/kernels/strips.hpp"

namespace regard {
namespace {

// None for pairs: the kernels of f32 serve sequences of few rows (has_few_rows).
template <class L>
inline constexpr int64 kMostFewRows = L::kPack > 1 ? 0 : most_few_rows({.lanes = L::kLanes});

// Computes at most kRows rows; kRows is a power of two.
template <class L, int kRows>
class FewRows {
  using Real = typename L::Real;
  using Vec = typename L::Vec;
  static constexpr int64 kPanel = L::kLanes * L::kVectors;
  static constexpr int kKeys = FewSoftmax<L, kRows>::kKeys;
  static constexpr int kSums = L::kRows * L::kVectors;  // vectors of sums in registers

 public:
  FewRows(const HeadContext& context, HeadSizes dims, char* scratch, const FewRowsScratch& at)
      : context_(context),
        dims_(dims),
        wide_(round_up(dims.dim, L::kLanes)),
        wide_v_(round_up(dims.dim_v, L::kLanes)),
        queries_(reinterpret_cast<Real*>(scratch + at.queries)),
        sums_(reinterpret_cast<Real*>(scratch + at.sums)),
        out_(reinterpret_cast<Real*>(scratch + at.out)) {}

  // Queries have the type of keys, and lie in strips as keys do.
  void begin(const Panel& panel) const {
    for (int64 i = 0; i < kRows * wide_v_; ++i) sums_[i] = out_[i] = 0;
    for (int64 i = panel.rows * wide_; i < kRows * wide_; ++i) queries_[i] = 0;
    const View& q = context_.problem.q;
    with_strips<L>(context_.problem.k, dims_.dim, [&]<class S>(S) {
      for (int row = 0; row < panel.rows; ++row) {
        const char* const from =
            static_cast<const char*>(q.data) + context_.offset_q(q, panel, row) * S::kSize;
        for (int64 d = 0; d < dims_.dim; d += S::kElements) {
          Vec strip[S::kVectors];
          if constexpr (S::kVectors > 1) {
            S::load(from + d * S::kSize, strip);
          } else {
            S::load_part(from + d * S::kSize, dims_.dim - d, strip);
          }
          for (int v = 0; v < S::kVectors; ++v) {
            L::store(queries_ + row * wide_ + d + v * L::kLanes, strip[v]);
          }
        }
      }
    });
  }

  // scores[key][row] = Q K^T. Keys up to a whole vector repeat the last one.
  void multiply_keys(Interval keys, Real* scores) const {
    const View& k = context_.problem.k;
    with_strips<L>(k, dims_.dim, [&]<class S>(S) {
      const Rows rows = rows_of<S>(k, keys);
      Ahead ahead = ahead_of<S>(context_.problem.v, dims_.dim_v, keys.begin);
      for (int64 j = 0; j < rows.count; j += kKeys) {
        L::store(scores + j * kRows, products<S>(rows, j, ahead));
      }
    });
  }

  // Multiplies each row of what was summed by its factor.
  void shrink(const Real* factor) const {
    for (int row = 0; row < kRows; ++row) {
      const Vec by = L::set(factor[row]);
      for (int64 d = row * wide_v_; d < (row + 1) * wide_v_; d += L::kLanes) {
        L::store(sums_ + d, L::mul(L::load(sums_ + d), by));
        L::store(out_ + d, L::mul(L::load(out_ + d), by));
      }
    }
  }

  // The tile's sums[row] += weights[key][row] V. A sum over the keys begins at zero, as that of
  // every product does.
  void multiply_values(Interval keys, const Real* weights) const {
    const View& v = context_.problem.v;
    with_strips<L>(v, dims_.dim_v, [&]<class S>(S) {
      constexpr int kMost = kSums / S::kVectors;
      constexpr int kTogether = smaller(kRows, power_within(kMost));
      constexpr int kStrips = power_within(kMost / kTogether);
      const Rows rows = rows_of<S>(v, keys);
      Ahead ahead = ahead_of<S>(context_.problem.k, dims_.dim, keys.end);
      for (int row = 0; row < kRows; row += kTogether) {
        add_columns<S, kTogether, kStrips>(rows, row, 0, weights, ahead);
      }
    });
  }

  void end_tile() const {
    for (int64 i = 0; i < kRows * wide_v_; ++i) {
      out_[i] += sums_[i];
      sums_[i] = 0;
    }
  }

  // to[dim_v][panel] = out, after the last tile; zeros in lanes of the first vector that are not in
  // use.
  void end(Real* to) const {
    with_strips<L>(context_.problem.v, dims_.dim_v, [&]<class S>(S) {
      for (int64 d = 0; d < dims_.dim_v; d += L::kLanes) {
        Vec tile[L::kLanes];
#pragma GCC unroll 16
        for (int t = 0; t < L::kLanes; ++t) {
          tile[t] = t < kRows ? L::load(out_ + t * wide_v_ + d) : L::set(0);
        }
        L::transpose(tile);
#pragma GCC unroll 16
        for (int t = 0; t < L::kLanes; ++t) {
          const int64 element = S::element(d + t);
          if (element < dims_.dim_v) L::store(to + element * kPanel, tile[t]);
        }
      }
    });
  }

 private:
  // The largest power of two that is not above `most`.
  static constexpr int power_within(int most) {
    int power = 1;
    while (2 * power <= most) power *= 2;
    return power;
  }

  // Rows of a block.
  struct Rows {
    const char* first;
    int64 stride;  // bytes
    int64 count;
  };

  template <class S>
  Ahead ahead_of(const View& view, int64 dim, int64 first) const {
    return Ahead::of_rows(view, context_.offset_k(view, first), dim, S::kElements);
  }

  template <class S>
  Rows rows_of(const View& view, Interval keys) const {
    return {static_cast<const char*>(view.data) + context_.offset_k(view, keys.begin) * S::kSize,
            view.strides.row * S::kSize, keys.end - keys.begin};
  }

  // Lane t * kRows + row: query `row` . key j + t.
  template <class S>
  Vec products(const Rows& keys, int64 j, Ahead& ahead) const {
    const char* at[kKeys];
    for (int t = 0; t < kKeys; ++t) {
      at[t] = keys.first + smaller(j + t, keys.count - 1) * keys.stride;
    }
    Vec sum[L::kLanes];
#pragma GCC unroll 16
    for (Vec& x : sum) x = L::set(0);
    int64 d = 0;
    for (; d + S::kElements <= dims_.dim; d += S::kElements) {
      add_products<S, false>(at, d, ahead, sum);
    }
    if constexpr (S::kVectors == 1) {
      if (d < dims_.dim) add_products<S, true>(at, d, ahead, sum);
    }
    return L::sums(sum);
  }

  // A strip of each key, from element d on; kPart: the last one, which a row does not fill.
  template <class S, bool kPart>
  REGARD_INLINE void add_products(const char* const (&at)[kKeys], int64 d, Ahead& ahead,
                                  Vec (&sum)[L::kLanes]) const {
#pragma GCC unroll 16
    for (int t = 0; t < kKeys; ++t) {
      Vec key[S::kVectors];
      if constexpr (kPart) {
        S::load_part(at[t] + d * S::kSize, dims_.dim - d, key);
      } else {
        S::load(at[t] + d * S::kSize, key);
      }
      ahead.step();
#pragma GCC unroll 16
      for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
        for (int v = 0; v < S::kVectors; ++v) {
          const Vec query = L::load(queries_ + row * wide_ + d + v * L::kLanes);
          sum[t * kRows + row] = L::fma(query, key[v], sum[t * kRows + row]);
        }
      }
    }
  }

  // Columns from `column` on of kTogether rows from `first` on, kStrips strips at a time; fewer at
  // the end.
  template <class S, int kTogether, int kStrips>
  void add_columns(const Rows& values, int first, int64 column, const Real* weights,
                   Ahead& ahead) const {
    constexpr int64 kStep = kStrips * S::kElements;
    for (; column + kStep <= dims_.dim_v; column += kStep) {
      add_strips<S, kTogether, kStrips, false>(values, first, column, weights, ahead);
    }
    if constexpr (kStrips > 1) {
      add_columns<S, kTogether, kStrips / 2>(values, first, column, weights, ahead);
    } else if constexpr (S::kVectors == 1) {
      if (column < dims_.dim_v) {
        add_strips<S, kTogether, 1, true>(values, first, column, weights, ahead);
      }
    }
  }

  // kPart: one strip, the last one, which a row does not fill.
  template <class S, int kTogether, int kStrips, bool kPart>
  void add_strips(const Rows& values, int first, int64 column, const Real* weights,
                  Ahead& ahead) const {
    constexpr int kVectors = kStrips * S::kVectors;
    Vec sum[kTogether][kVectors];
#pragma GCC unroll 16
    for (auto& row : sum) {
#pragma GCC unroll 16
      for (Vec& x : row) x = L::set(0);
    }
    const char* at = values.first + column * S::kSize;
    const Real* weight = weights + first;
    for (int64 j = 0; j < values.count; ++j, at += values.stride, weight += kRows) {
      Vec value[kVectors];
#pragma GCC unroll 16
      for (int s = 0; s < kStrips; ++s) {
        const char* const strip = at + s * S::kElements * S::kSize;
        if constexpr (kPart) {
          S::load_part(strip, dims_.dim_v - column, value);
        } else {
          S::load(strip, value + s * S::kVectors);
        }
        ahead.step();
      }
#pragma GCC unroll 16
      for (int row = 0; row < kTogether; ++row) {
        const Vec each = L::set(weight[row]);
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) sum[row][v] = L::fma(each, value[v], sum[row][v]);
      }
    }
#pragma GCC unroll 16
    for (int row = 0; row < kTogether; ++row) {
      Real* const sums = sums_ + (first + row) * wide_v_ + column;
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        Real* const to = sums + v * L::kLanes;
        L::store(to, L::add(L::load(to), sum[row][v]));
      }
    }
  }

  const HeadContext& context_;
  const HeadSizes dims_;
  const int64 wide_, wide_v_;
  Real* const queries_;
  Real* const sums_;  // of a tile
  Real* const out_;
};

}  // namespace
}  // namespace regard
