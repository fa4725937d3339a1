// The matrix product behind all five of attention: C[m][n] (+)= sum over k of A(m, k) B[k][n].
//
// A is read one Unit at a time and broadcast, by rows or by columns; B and C are rows of vectors.
// The sum over k is formed from zero in registers and added to C once, so that a long sum is a
// short sum of block sums and keeps its accuracy.
#pragma once

#include "semantics/portable.h"

namespace regard {
namespace {

enum class Walk : bool { rows, columns };  // A(m, k) = a[m * lda + k], or a[k * lda + m]
enum class Result : bool { replace, add };

template <class L>
struct Product {
  const typename L::Unit* a;
  int64 lda;
  const typename L::Unit* b;  // [k][ldb]
  int64 ldb;
  typename L::Real* c;  // [m][ldc]
  int64 ldc;
  int64 m;
  int64 k;  // in Units
};

template <class L, int M, int N, Walk walk, Result result>
REGARD_INLINE void multiply_tile(const Product<L>& p, int64 first) {
  typename L::Vec sum[M][N];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sum[m][n] = L::set(0);
  }
  const int64 lda = p.lda, ldb = p.ldb;
  const auto* a = p.a + (walk == Walk::rows ? first * lda : first);
  const auto* b = p.b;
  for (int64 k = p.k; k > 0; --k) {
    typename L::UnitVec row[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) row[n] = L::load_units(b + n * L::kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const auto each = L::broadcast_unit(walk == Walk::rows ? a[m * lda] : a[m]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sum[m][n] = L::multiply_add(sum[m][n], each, row[n]);
    }
    a += walk == Walk::rows ? 1 : lda;
    b += ldb;
  }
  auto* c = p.c + first * p.ldc;
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      auto* const at = c + m * p.ldc + n * L::kLanes;
      L::store(at, result == Result::add ? L::add(L::load(at), sum[m][n]) : sum[m][n]);
    }
  }
}

// C is N vectors wide.
template <class L, int N, Walk walk, Result result>
[[gnu::noinline]] void multiply(const Product<L> p) {
  int64 first = 0;
  for (; first + L::kRows <= p.m; first += L::kRows) {
    multiply_tile<L, L::kRows, N, walk, result>(p, first);
  }
  for (; first + 2 <= p.m; first += 2) multiply_tile<L, 2, N, walk, result>(p, first);
  if (first < p.m) multiply_tile<L, 1, N, walk, result>(p, first);
}

// C and B are `vectors` vectors wide.
template <class L, Walk walk, Result result>
void multiply_wide(Product<L> p, int64 vectors) {
  constexpr int N = L::kVectors;
  for (; vectors >= N; vectors -= N) {
    multiply<L, N, walk, result>(p);
    p.b += N * L::kLanes;
    p.c += N * L::kLanes;
  }
  for (; vectors > 0; --vectors) {
    multiply<L, 1, walk, result>(p);
    p.b += L::kLanes;
    p.c += L::kLanes;
  }
}

}  // namespace
}  // namespace regard
