// Products of a few query rows with keys and values, for decoding: what counts is the time that it
// takes to read them. Lanes are head elements, where a panel would leave most of its lanes empty.
// Rows of whole vectors are read as they lie, in every type; others are copied, a few at a time.
#pragma once

#include "cpu/kernels/panel.hpp"

namespace regard {
namespace {

template <class L>
class FewRows {
  using Real = typename L::Real;
  using Vec = typename L::Vec;
  static constexpr int64 kWidth = L::kLanes * L::kVectors;
  static constexpr int kKeys = 4;  // of a pass over the sums of the values

 public:
  // `queries`: [most_few_rows][padded(dim)]; `keys`: [kLanes][padded(dim)]; `values`:
  // [kKeys + most_few_rows][padded(dim_v)].
  FewRows(const HeadContext& context, HeadSizes dims, Real* queries, Real* keys, Real* values)
      : context_(context),
        dims_(dims),
        wide_(round_up(dims.dim, L::kLanes)),
        wide_v_(round_up(dims.dim_v, L::kLanes)),
        queries_(queries),
        keys_(keys),
        values_(values),
        sums_(values + kKeys * wide_v_) {}

  void load_queries(const Panel& panel) const {
    const View& q = context_.problem.q;
    for (int row = 0; row < panel.rows; ++row) {
      copy_row(queries_ + row * wide_, q, context_.offset_q(q, panel, row), dims_.dim);
    }
  }

  // scores[key][panel] = K Q^T, zeros in lanes that are not in use.
  void multiply_keys(const Panel& panel, Real* scores) const {
    const int64 count = panel.tile.keys.end - panel.tile.keys.begin;
    for (int64 i = 0; i < count * kWidth; i += L::kLanes) L::store(scores + i, L::set(0));
    with_elements(context_.problem.k, dims_.dim, [&]<Type kType>() {
      for (int64 j = 0; j < count; j += L::kLanes) {
        const int64 present = smaller<int64>(L::kLanes, count - j);
        const Rows<kType, L::kLanes> keys(*this, context_.problem.k, dims_.dim,
                                          panel.tile.keys.begin + j, present, keys_);
        Real* const to = scores + j * kWidth;
        for (int row = 0; row < panel.rows; ++row) {
          Real products[L::kLanes];
          L::store(products, dot_products(queries_ + row * wide_, keys));
          for (int64 t = 0; t < present; ++t) to[t * kWidth + row] = products[t];
        }
      }
    });
  }

  // out[dim_v][panel] += V^T weights[key][panel]. The sum over the keys begins at zero, as that of
  // every product does.
  void multiply_values(const Panel& panel, const Real* weights, Real* out) const {
    const Interval keys = panel.tile.keys;
    for (int64 i = 0; i < panel.rows * wide_v_; i += L::kLanes) L::store(sums_ + i, L::set(0));
    with_elements(context_.problem.v, dims_.dim_v, [&]<Type kType>() {
      const Real* weight = weights;
      int64 key = keys.begin;
      for (; key + kKeys <= keys.end; key += kKeys, weight += kKeys * kWidth) {
        add_values<kType, kKeys>(panel.rows, key, weight);
      }
      for (; key < keys.end; ++key, weight += kWidth) add_values<kType, 1>(panel.rows, key, weight);
    });
    for (int row = 0; row < panel.rows; ++row) {
      const Real* const sum = sums_ + row * wide_v_;
      for (int64 d = 0; d < dims_.dim_v; ++d) out[d * kWidth + row] += sum[d];
    }
  }

 private:
  static constexpr Type kReal = sizeof(Real) == 4 ? Type::f32 : Type::f64;
  static constexpr int64 kAhead = 16;  // rows: those that are prefetched

  // Calls visit with the type of the elements that rows are read as: the tensor's, where they fill
  // whole vectors; others are copied.
  template <class Visit>
  static void with_elements(const View& view, int64 dim, Visit visit) {
    const Type type = dim % L::kLanes == 0 ? view.type : kReal;
    if (type == Type::f16) return visit.template operator()<Type::f16>();
    if (type == Type::bf16) return visit.template operator()<Type::bf16>();
    return visit.template operator()<kReal>();
  }

  // kCount rows of keys or values. Rows after `present` repeat the last one.
  template <Type kType, int kCount>
  struct Rows {
    static constexpr int64 kSize = kType == Type::f64 ? 8 : kType == Type::f32 ? 4 : 2;
    const uint8* at[kCount];
    uint64 ahead;  // bytes, of addresses: there may be no such rows; 0 for copies

    REGARD_INLINE Rows(const FewRows& few, const View& view, int64 dim, int64 first, int64 present,
                       Real* copies)
        : ahead(0) {
      const bool in_place = view.type == kType && dim % L::kLanes == 0;
      if (in_place) ahead = uint64(kAhead * view.strides.row * kSize);
      for (int t = 0; t < kCount; ++t) {
        const int64 offset = few.context_.offset_k(view, first + smaller<int64>(t, present - 1));
        if (in_place) {
          at[t] = static_cast<const uint8*>(view.data) + offset * kSize;
        } else {
          Real* const copy = copies + t * round_up(dim, L::kLanes);
          copy_row(copy, view, offset, dim);
          at[t] = reinterpret_cast<const uint8*>(copy);
        }
      }
    }
    REGARD_INLINE Vec load(int t, int64 d) const {
      if constexpr (kType == kReal) {
        return L::load(reinterpret_cast<const Real*>(at[t]) + d);
      } else {
        return L::load_as(kType, at[t], d, L::kLanes);
      }
    }
    // The element that load(t, d) begins with, in a row that comes later.
    REGARD_INLINE void prefetch(int t, int64 d) const {
      const uint64 address = reinterpret_cast<uint64>(at[t]) + uint64(d * kSize) + ahead;
      __builtin_prefetch(reinterpret_cast<const void*>(address));
    }
  };

  static void copy_row(Real* to, const View& view, int64 offset, int64 dim) {
    for (int64 d = 0; d < dim; d += L::kLanes) {
      L::store(to + d, L::load_as(view.type, view.data, offset + d, dim - d));
    }
  }

  // Lane t: query . keys[t].
  template <Type kType>
  Vec dot_products(const Real* query, const Rows<kType, L::kLanes>& keys) const {
    Vec sum[L::kLanes];
#pragma GCC unroll 16
    for (Vec& x : sum) x = L::set(0);
    for (int64 d = 0; d < wide_; d += L::kLanes) {
      const Vec x = L::load(query + d);
#pragma GCC unroll 16
      for (int t = 0; t < L::kLanes; ++t) {
        sum[t] = L::fma(x, keys.load(t, d), sum[t]);
        keys.prefetch(t, d);
      }
    }
    L::transpose(sum);
#pragma GCC unroll 4
    for (int half = L::kLanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
      for (int t = 0; t < half; ++t) sum[t] = L::add(sum[t], sum[t + half]);
    }
    return sum[0];
  }

  // sums[row][dim_v] += weights[key][row] V[key] for kCount keys.
  template <Type kType, int kCount>
  void add_values(int rows, int64 key, const Real* weights) const {
    const Rows<kType, kCount> values(*this, context_.problem.v, dims_.dim_v, key, kCount, values_);
    for (int row = 0; row < rows; ++row) {
      Vec weight[kCount];
#pragma GCC unroll 4
      for (int t = 0; t < kCount; ++t) weight[t] = L::set(weights[t * kWidth + row]);
      Real* const sums = sums_ + row * wide_v_;
      for (int64 d = 0; d < wide_v_; d += L::kLanes) {
        Vec sum = L::load(sums + d);
#pragma GCC unroll 4
        for (int t = 0; t < kCount; ++t) {
          sum = L::fma(weight[t], values.load(t, d), sum);
          values.prefetch(t, d);
        }
        L::store(sums + d, sum);
      }
    }
  }

  const HeadContext& context_;
  const HeadSizes dims_;
  const int64 wide_, wide_v_;
  Real* const queries_;
  Real* const keys_;
  Real* const values_;
  Real* const sums_;
};

}  // namespace
}  // namespace regard
