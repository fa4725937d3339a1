// Rows of a tensor that are read as they lie, in every type.
#pragma once

#include "problem/problem.h"
#include "semantics/portable.h"

namespace regard {
namespace {

// Elements of a row that are read at once, as one vector or two. Two of bf16 are read as a vector
// of pairs, which become a vector of the even and one of the odd elements.
template <class L, Type kType, int kVectors_ = 1>
struct Strip {
  static constexpr int kVectors = kVectors_;
  static constexpr bool kPairs =
      kType == Type::bf16 && kVectors == 2 && requires { L::load_even_and_odd; };
  static constexpr int64 kElements = kVectors * L::kLanes;
  static constexpr int64 kSize = kType == Type::f64 ? 8 : kType == Type::f32 ? 4 : 2;

  // Whether rows can be read in such strips. One vector may be a part of one, the last of a row.
  REGARD_INLINE static bool fits(const View& view, int64 dim) {
    return view.type == kType && (kVectors == 1 || dim % kElements == 0);
  }
  REGARD_INLINE static void load(const char* from, typename L::Vec* to) {
    if constexpr (kPairs) {
      L::load_even_and_odd(from, to[0], to[1]);
    } else if constexpr (kSize == 2) {
      for (int v = 0; v < kVectors; ++v) {
        to[v] = L::load_as(kType, from, v * L::kLanes, L::kLanes);
      }
    } else {
      to[0] = L::load(reinterpret_cast<const typename L::Real*>(from));
    }
  }
  REGARD_INLINE static void load_part(const char* from, int64 count, typename L::Vec* to) {
    static_assert(kVectors == 1);
    to[0] = L::load_as(kType, from, 0, count);
  }
  // Which element of a row vectors hold at a place.
  REGARD_INLINE static int64 element(int64 place) {
    if constexpr (!kPairs) return place;
    const int64 within = place % kElements;
    return place - within + within % L::kLanes * 2 + within / L::kLanes;
  }
};

// Calls visit with the strips of the tensor's type that its rows are read in.
template <class L, class Visit>
REGARD_INLINE void with_strips(const View& view, int64 dim, Visit visit) {
  constexpr Type kReal = sizeof(typename L::Real) == 4 ? Type::f32 : Type::f64;
  if constexpr (kReal == Type::f32) {
    const auto visited = [&](auto strip) {
      const bool fits = strip.fits(view, dim);
      if (fits) visit(strip);
      return fits;
    };
    if (visited(Strip<L, Type::bf16, 2>()) || visited(Strip<L, Type::bf16>()) ||
        visited(Strip<L, Type::f16, 2>()) || visited(Strip<L, Type::f16>())) {
      return;
    }
  }
  visit(Strip<L, kReal>());
}

}  // namespace
}  // namespace regard
