// Sizes of memory, which cannot wrap around: whatever no memory holds is kMost, and stays it.
#pragma once

#include "semantics/portable.h"

namespace regard {

class Count {
 public:
  static constexpr int64 kMost = int64(1) << 62;

  REGARD_INLINE Count() : n_(0) {}
  REGARD_INLINE Count(int64 n) : n_(n < kMost ? n : kMost) {}  // n >= 0

  REGARD_INLINE bool fits() const { return n_ < kMost; }
  REGARD_INLINE int64 value() const { return n_; }

  REGARD_INLINE friend Count operator+(Count a, Count b) {
    return a.n_ < kMost - b.n_ ? a.n_ + b.n_ : kMost;
  }
  REGARD_INLINE friend Count operator*(Count a, Count b) {
    int64 product = 0;
    return __builtin_mul_overflow(a.n_, b.n_, &product) ? kMost : product;
  }
  // To a multiple of 2^10 or less.
  REGARD_INLINE Count rounded_up(int64 step) const {
    return fits() ? Count(round_up(n_, step)) : *this;
  }

 private:
  int64 n_;
};

// Offsets of the parts of a piece of memory, in bytes, one after the other.
template <int64 kAlignment>
class MemoryLayout {
 public:
  REGARD_INLINE int64 take(Count bytes) {
    const int64 offset = size();
    size_ = size_ + bytes.rounded_up(kAlignment);
    return offset;
  }
  REGARD_INLINE int64 size() const { return size_.value(); }  // so far

 private:
  Count size_ = 0;
};

inline constexpr const char* kTooLarge =
    "the call's intermediate results would be larger than any memory";

}  // namespace regard
