// Copies rows of tensors through registers into shared memory, 16 bytes at a time.
#pragma once

#include "cuda/kernels/element.cuh"
#include "plan/cuda/kernel/simt_layout.h"

namespace regard {

// kCount elements that are moved at once.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T x[kCount];
};

// A pack of 16 bytes, so aligned.
template <class P>
REGARD_DEVICE P load_pack(const void* from) {
  return __builtin_bit_cast(P, load_global_128(from));
}
template <class P>
REGARD_DEVICE void store_pack(void* to, const P& pack) {
  store_global_128(to, __builtin_bit_cast(Bits128, pack));
}

template <Type kType>
REGARD_DEVICE RealOf<kType> real_of(typename ElementOf<kType>::Stored x) {
  if constexpr (kType == Type::f16 || kType == Type::bf16) {
    return widen<typename ElementOf<kType>::Format>(x);
  } else {
    return x;
  }
}
template <Type kType, class Real>
REGARD_DEVICE typename ElementOf<kType>::Stored stored_of(Real x) {
  if constexpr (kType == Type::f16 || kType == Type::bf16) {
    return narrow<typename ElementOf<kType>::Format>(float(x));
  } else {
    return typename ElementOf<kType>::Stored(x);
  }
}

// Some rows of one head, `count` of which exist.
template <Type kType>
struct RowSource {
  static constexpr Type kElement = kType;
  using Stored = typename ElementOf<kType>::Stored;

  const Stored* first;
  int64 stride;
  int64 count;
};

template <Type kType>
REGARD_DEVICE RowSource<kType> row_source(const View& view, int64 b, int64 h, int64 first,
                                          int64 row, int64 end) {
  using Stored = typename ElementOf<kType>::Stored;
  const int64 offset = offset_of(view.strides, b, h, first, row);
  return {static_cast<const Stored*>(view.data) + offset, view.strides.row, end - row};
}

// A thread's part of kRows x kColumns elements in their own type; 0 for missing elements.
template <Type kType, int kRows, int kColumns>
struct Fetched {
  using Stored = typename ElementOf<kType>::Stored;
  static constexpr int kPer = 16 / int(sizeof(Stored));
  static constexpr int kPerRow = kColumns / kPer;
  static constexpr int kPieces = (kRows * kPerRow + kSimtThreads - 1) / kSimtThreads;
  static_assert(kColumns % kPer == 0);

  Pack<Stored, kPer> piece[kPieces];

  // Columns from `column` on; the rows have kWidth.
  template <int kWidth, bool kAligned>
  REGARD_DEVICE void fetch(const RowSource<kType>& rows, int column) {
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
      const int index = thread_index() + n * kSimtThreads;
      const int row = index / kPerRow, at = column + index % kPerRow * kPer;
      piece[n] = {};
      if (row >= rows.count || row >= kRows) continue;
      const Stored* const from = rows.first + row * rows.stride + at;
      if (kAligned && at + kPer <= kWidth) {
        piece[n] = load_pack<Pack<Stored, kPer>>(from);
      } else {
#pragma unroll
        for (int e = 0; e < kPer; ++e) {
          if (at + e < kWidth) piece[n].x[e] = from[e];
        }
      }
    }
  }

  // To rows of kStride elements, converted to Real.
  template <int kStride, class Real>
  REGARD_DEVICE void put(Real* to) const {
    constexpr int kWords = smaller(kPer, 16 / int(sizeof(Real)));
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
      const int index = thread_index() + n * kSimtThreads;
      const int row = index / kPerRow;
      if (kRows * kPerRow % kSimtThreads != 0 && row >= kRows) continue;
      Real* const place = to + row * kStride + index % kPerRow * kPer;
#pragma unroll
      for (int e = 0; e < kPer; e += kWords) {
        Pack<Real, kWords> reals;
#pragma unroll
        for (int w = 0; w < kWords; ++w) reals.x[w] = Real(real_of<kType>(piece[n].x[e + w]));
        *reinterpret_cast<Pack<Real, kWords>*>(place + e) = reals;
      }
    }
  }
};

}  // namespace regard
