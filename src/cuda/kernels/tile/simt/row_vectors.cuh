// A few elements of a row at once, for the kernels that only pass over memory.
#pragma once

#include "cuda/kernels/params.h"
#include "cuda/kernels/tile/simt/simt_memory.cuh"

namespace regard {

// Names a type for a generic lambda.
template <Type kType>
struct TypeName {
  static constexpr Type kElement = kType;
};

// Calls of(TypeName) with the type of a tensor that has q's type or f32.
template <Type kType, class Of>
REGARD_DEVICE void with_type(Type type, Of of) {
  if (type == kType) {
    of(TypeName<kType>());
  } else {
    of(TypeName<Type::f32>());
  }
}

// Whether every row of the view begins at a multiple of 16 bytes.
REGARD_DEVICE bool is_aligned(const View& view) {
  const int64 size = view.type == Type::f64 ? 8 : view.type == Type::f32 ? 4 : 2;
  const Strides& s = view.strides;
  const int64 bits = reinterpret_cast<int64>(view.data) | (s.batch | s.head | s.row) * size;
  return (bits & 15) == 0;
}

// Elements moved at once, when so many lie side by side.
template <Type kType, int kCount>
inline constexpr int kPerPack =
    smaller(kCount, 16 / int(sizeof(typename ElementOf<kType>::Stored)));

// Loads the first `count` of kCount elements; the others become 0. `aligned`: to kCount elements or
// 16 bytes.
template <Type kType, class Real, int kCount>
REGARD_DEVICE void load_vector(Real (&x)[kCount], const View& view, int64 at, int64 count,
                               bool aligned) {
  using Stored = typename ElementOf<kType>::Stored;
  constexpr int kPer = kPerPack<kType, kCount>;
  const Stored* const from = static_cast<const Stored*>(view.data) + at;
  if (aligned && count >= kCount) {
#pragma unroll
    for (int n = 0; n < kCount; n += kPer) {
      const auto pack = *reinterpret_cast<const Pack<Stored, kPer>*>(from + n);
#pragma unroll
      for (int e = 0; e < kPer; ++e) x[n + e] = Real(real_of<kType>(pack.x[e]));
    }
  } else {
#pragma unroll
    for (int n = 0; n < kCount; ++n) x[n] = n < count ? Real(real_of<kType>(from[n])) : Real(0);
  }
}

template <Type kType, class Real, int kCount>
REGARD_DEVICE void store_vector(const View& view, int64 at, int64 count, bool aligned,
                                const Real (&x)[kCount]) {
  using Stored = typename ElementOf<kType>::Stored;
  constexpr int kPer = kPerPack<kType, kCount>;
  Stored* const to = static_cast<Stored*>(view.data) + at;
  if (aligned && count >= kCount) {
#pragma unroll
    for (int n = 0; n < kCount; n += kPer) {
      Pack<Stored, kPer> pack;
#pragma unroll
      for (int e = 0; e < kPer; ++e) pack.x[e] = stored_of<kType>(x[n + e]);
      *reinterpret_cast<Pack<Stored, kPer>*>(to + n) = pack;
    }
  } else {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      if (n < count) to[n] = stored_of<kType>(x[n]);
    }
  }
}

// Over kLanes neighbouring threads of a warp; all threads take part.
template <int kLanes, class Real>
REGARD_DEVICE Real sum_of_lanes(Real x) {
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}
template <int kLanes, class Real>
REGARD_DEVICE Real max_of_lanes(Real x) {
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) x = max_of(x, shuffle_xor(x, mask));
  return x;
}

// 0, or NaN if any of the elements is not finite.
template <class Real, int kCount>
REGARD_DEVICE Real zero_if_finite(const Real (&x)[kCount]) {
  Real sum = 0;
#pragma unroll
  for (int n = 0; n < kCount; ++n) sum += x[n] - x[n];
  return sum;
}

}  // namespace regard
