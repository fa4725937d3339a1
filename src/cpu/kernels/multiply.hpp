// The matrix product behind all five of attention: C[m][n] (+)= sum over k of A(m, k) B[k][n].
//
// A is read one Unit at a time and broadcast, by rows or by columns; B and C are rows of vectors.
// The sum over k is formed from zero in registers and added to C once, so that a long sum is a
// short sum of block sums and keeps its accuracy.
#pragma once

#include "cpu/kernels/pace.hpp"

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
  int64 k;         // in Units
  int64 late = 0;  // the last of k, which the first vector of B and C leaves out
  bool a_in_tiles = false, b_in_tiles = false, c_in_tiles = false;  // see vector_at
  // Where elements are sums of terms: from a term of A or B to the next, and how many of the first
  // pairs of terms are too small to matter.
  int64 a_term = 0;
  int64 b_term = 0;
  int skipped_pairs = 0;

  // Elements from a column to one that is n columns on, if both begin a vector.
  REGARD_INLINE static int64 columns(int64 n, bool in_tiles) {
    return in_tiles ? n * L::kLanes : n;
  }
};

// ----------------------------------------------------------------------- vectors, in registers

// Elements of M rows of A, which lie in one column: those of every fourth row have an address of
// their own, and others a multiple of the distance between rows from it. asm hides where addresses
// and distances come from. Otherwise GCC keeps a distance for each row, some of them in vector
// registers, and moving them back takes the slots of multiplications.
template <class L, int M>
struct RowsOfA {
  using Unit = typename L::Unit;
  static constexpr int kGroups = (M + 3) / 4;
  const char* at[kGroups];
  int64 distance, three;  // bytes

  REGARD_INLINE RowsOfA(const Unit* a, int64 lda)
      : distance(lda * int64(sizeof(Unit))), three(3 * distance) {
    for (int g = 0; g < kGroups; ++g) {
      at[g] = reinterpret_cast<const char*>(a + 4 * g * lda);
      asm("" : "+r"(at[g]));
    }
    asm("" : "+r"(distance), "+r"(three));
  }
  REGARD_INLINE const Unit* address(int m) const {
    const int64 offset = m % 4 == 3 ? three : m % 4 * distance;
    return reinterpret_cast<const Unit*>(at[m / 4] + offset);
  }
  REGARD_INLINE void step() {
    for (const char*& group : at) group += sizeof(Unit);
  }
};

// A(m, k) of the next k. Scalar lanes leave the addresses to GCC, which makes vectors of their own
// loops only if it knows them.
template <class L, int M, Walk walk>
struct ElementsOfA {
  const typename L::Unit* a;
  int64 lda;

  REGARD_INLINE ElementsOfA(const typename L::Unit* elements, int64 distance)
      : a(elements), lda(distance) {}
  REGARD_INLINE const typename L::Unit* address(int m) const {
    return a + (walk == Walk::rows ? m * lda : m);
  }
  REGARD_INLINE void step() { a += walk == Walk::rows ? 1 : lda; }
};
template <class L, int M>
  requires(L::kLanes > 1)
struct ElementsOfA<L, M, Walk::rows> : RowsOfA<L, M> {
  using RowsOfA<L, M>::RowsOfA;
};

// Whether a multiplication can broadcast an element from memory itself. It then takes a load for
// each vector of B, but no slot for the broadcast; so every fourth row does, whose address needs no
// instruction of its own.
template <class L>
inline constexpr bool kMultipliesMemory =
    requires(typename L::Vec x, const typename L::Unit* a, typename L::UnitVec b) {
      L::multiply_add(x, a, b);
    };

template <class L, int M, int N, Walk walk, Result result, bool kLate, class Beside>
REGARD_INLINE void multiply_tile(const Product<L>& p, int64 first, Beside& beside) {
  typename L::Vec sum[M][N];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sum[m][n] = L::set(0);
  }
  const int64 ldb = p.ldb;
  ElementsOfA<L, M, walk> a(p.a + (walk == Walk::rows ? first * p.lda : first), p.lda);
  const auto* b = p.b;
  const auto add = [&]<int kFirst>() __attribute__((always_inline)) {
    typename L::UnitVec row[N];
#pragma GCC unroll 4
    for (int n = kFirst; n < N; ++n) row[n] = L::load_units(b + n * L::kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const auto* const at = a.address(m);
      if constexpr (kMultipliesMemory<L>) {
        if (m % 4 == 0) {
#pragma GCC unroll 4
          for (int n = kFirst; n < N; ++n) sum[m][n] = L::multiply_add(sum[m][n], at, row[n]);
          continue;
        }
      }
      const auto each = L::broadcast_unit(*at);
#pragma GCC unroll 4
      for (int n = kFirst; n < N; ++n) sum[m][n] = L::multiply_add(sum[m][n], each, row[n]);
    }
    a.step();
    b += ldb;
  };
  int64 k = kLate ? p.k - p.late : p.k;
  // Two steps in one pass, so that the loop's own instructions take less of the front end. (GCC's
  // own vectors for scalar lanes would read elements past the last row.)
  for (; L::kLanes > 1 && k > 1; k -= 2) {
    add.template operator()<0>();
    add.template operator()<0>();
    beside.step();
  }
  for (; k > 0; --k) add.template operator()<0>();
  if constexpr (kLate) {
    for (k = p.late; k > 0; --k) add.template operator()<1>();
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

// kLate: some of k are. In tiles of few rows each step of a sum waits for the one before it, so
// that the last rows are summed in a whole tile where rows before them may be written twice.
template <class L, int N, Walk walk, Result result, bool kLate, class Beside>
REGARD_INLINE void multiply_in_vectors(const Product<L>& p, Beside& beside) {
  constexpr int64 kRows = L::kRows;
  int64 first = 0;
  for (; first + kRows <= p.m; first += kRows) {
    multiply_tile<L, kRows, N, walk, result, kLate>(p, first, beside);
  }
  if (result == Result::replace && first > 0 && p.m - first > 2) {
    return multiply_tile<L, kRows, N, walk, result, kLate>(p, p.m - kRows, beside);
  }
  if constexpr (result == Result::add && kRows > 4) {
    if (first + 4 <= p.m) {
      multiply_tile<L, 4, N, walk, result, kLate>(p, first, beside);
      first += 4;
    }
  }
  for (; first + 2 <= p.m; first += 2)
    multiply_tile<L, 2, N, walk, result, kLate>(p, first, beside);
  if (first < p.m) multiply_tile<L, 1, N, walk, result, kLate>(p, first, beside);
}

template <class L, int N, Walk walk, Result result, class Beside>
[[gnu::noinline]] void multiply_late(const Product<L>& p, Beside& beside) {
  Beside in_registers = beside;
  multiply_in_vectors<L, N, walk, result, true>(p, in_registers);
  beside = in_registers;
}

// ------------------------------------------------------------------------------ tile registers

// Whether products are those of tile registers. They take A by rows, and whole tiles: callers pad k
// with zeros in A and B, and C has room for whole tiles of rows, of which those after m are
// undefined.
template <class L>
inline constexpr bool kHasTiles = requires { typename L::Tiles; };
template <class L>
inline constexpr int64 kTileElements = L::kLanes * L::kPack;  // of k in one tile

// Where the vector that begins at a row and a column lies in a matrix of `width` columns: with tile
// registers in a dense tile, where one row of tiles follows another. Rows that lie 256 bytes apart
// or more take up to twice as long to load, and longer to store.
template <class L>
REGARD_INLINE int64 vector_at(int64 row, int64 column, int64 width) {
  constexpr int64 kSide = L::kLanes;  // a power of two
  if constexpr (!kHasTiles<L>) return row * width + column;
  return (row & -kSide) * width + (column + (row & (kSide - 1))) * kSide;
}

// The terms that an element is the sum of, and the pairs of terms of A and B whose products make
// the product. From a pair to the next one operand changes.
struct TermPair {
  int a, b;
};
struct OneTerm {
  static constexpr int kTerms = 1;
  static constexpr TermPair kTermPairs[] = {{0, 0}};
};
template <class L>
struct TermsOf : OneTerm {
  template <int>
  using Term = L;  // whose loads make the term
};
template <class L>
  requires requires { L::kTermPairs; }
struct TermsOf<L> {
  static constexpr int kTerms = L::kTerms;
  static constexpr auto& kTermPairs = L::kTermPairs;
  template <int n>
  using Term = typename L::template Term<n>;
};
template <class L>
inline constexpr int kTerms = TermsOf<L>::kTerms;
template <class L>
inline constexpr int kTermPairCount = int(sizeof TermsOf<L>::kTermPairs / sizeof(TermPair));

// How many products of tiles a product takes whose C is a panel wide.
template <class L>
int64 tile_products(const Product<L>& p) {
  return divide_up(p.m, L::kLanes) * divide_up(p.k, L::kLanes) * L::kVectors *
         (kTermPairCount<L> - p.skipped_pairs);
}

// Gives the thread its tile registers as long as it lives; nothing where there are none.
template <class L>
struct TileSession {};
template <class L>
  requires kHasTiles<L>
struct TileSession<L> : L::Tiles::Session {};

template <class L, Result result, int T>
REGARD_INLINE void begin_sum(typename L::Tiles& tiles, const typename L::Real* c, int64 row_bytes) {
  if constexpr (result == Result::add) {
    tiles.template load<T>(c, row_bytes);
  } else {
    tiles.template zero<T>();
  }
}

// Rows of C from `first` to `end`, in blocks of M x N tiles, at most 2 x 2. The sums of a block are
// in tiles 0 to 3, A in 4 and 5, B in 6 and 7. Each sum is loaded right before its first product
// and stored after its last one, behind what runs next to that: both take about as long as a
// product and run next to those of other sums. An operand is loaded right after the last product of
// the one before it.
template <class L, int M, int N, Result result, class Beside>
REGARD_INLINE void multiply_tiles(typename L::Tiles& tiles, const Product<L>& p, int64 first,
                                  int64 end, Beside& beside) {
  constexpr int64 kSide = L::kLanes, kSize = 4;  // bytes of a Unit and of a Real
  const int64 a_row = (p.a_in_tiles ? kSide : p.lda) * kSize;
  const int64 b_row = (p.b_in_tiles ? kSide : p.ldb) * kSize;
  const int64 c_row = (p.c_in_tiles ? kSide : p.ldc) * kSize;
  const int64 a_step = p.columns(kSide, p.a_in_tiles), a_second = kSide * p.lda;
  const int64 b_step = kSide * p.ldb, b_second = p.columns(kSide, p.b_in_tiles);
  const int64 c_second = p.columns(kSide, p.c_in_tiles);
  const int first_pair = kTermPairCount<L> > 1 ? p.skipped_pairs : 0;
  const TermPair first_terms = TermsOf<L>::kTermPairs[first_pair];
  const auto* a = p.a + first * p.lda;
  auto* c = p.c + first * p.ldc;
  tiles.template stream<4>(a + first_terms.a * p.a_term, a_row);
  tiles.template load<6>(p.b + first_terms.b * p.b_term, b_row);
  if (N > 1) tiles.template load<7>(p.b + first_terms.b * p.b_term + b_second, b_row);
  if (M > 1) tiles.template stream<5>(a + first_terms.a * p.a_term + a_second, a_row);
  for (; first < end; first += M * kSide) {
    const auto *a_at = a, *b_at = p.b;
    a += M * a_second;
    for (int64 k = 0; k < p.k; k += kSide) {
      const bool ends_k = k + kSide >= p.k, is_last = ends_k && first + M * kSide >= end;
#pragma GCC unroll 4
      for (int pair = 0; pair < kTermPairCount<L>; ++pair) {
        if (pair < first_pair) continue;
        const bool ends_pairs = pair + 1 == kTermPairCount<L>;
        const bool begins = k == 0 && pair == first_pair, ends = ends_k && ends_pairs;
        if (ends_pairs) {
          a_at = ends_k ? a : a_at + a_step;
          b_at = ends_k ? p.b : b_at + b_step;
        }
        const TermPair terms = TermsOf<L>::kTermPairs[pair];
        const TermPair next = ends_pairs ? first_terms : TermsOf<L>::kTermPairs[pair + 1];
        const bool loads_a = ends_pairs ? !is_last : next.a != terms.a;
        const bool loads_b = ends_pairs ? !is_last : next.b != terms.b;
        const auto* const next_a = a_at + next.a * p.a_term;
        const auto* const next_b = b_at + next.b * p.b_term;
        // Inlined early, so that the compiler keeps `beside` in registers.
        const auto add = [&]<int m, int n>() __attribute__((always_inline)) {
          constexpr int T = 2 * m + n;
          auto* const sum = c + m * kSide * p.ldc + n * c_second;
          if (begins) begin_sum<L, result, T>(tiles, sum, c_row);
          before_product(beside);
          tiles.template multiply_add<T, 4 + m, 6 + n>();
          if (n + 1 == N && loads_a) tiles.template stream<4 + m>(next_a + m * a_second, a_row);
          if (m + 1 == M && loads_b) tiles.template load<6 + n>(next_b + n * b_second, b_row);
          beside.step();
          if (ends) tiles.template store<T>(sum, c_row);
        };
        add.template operator()<0, 0>();
        if constexpr (N > 1) add.template operator()<0, 1>();
        if constexpr (M > 1) add.template operator()<1, 0>();
        if constexpr (M > 1 && N > 1) add.template operator()<1, 1>();
      }
    }
    c += M * kSide * p.ldc;
  }
}

// Two tiles of k, and C two tiles wide: B stays in tiles 4 to 7. A sum is stored behind the product
// after its last one: a store waits for its sum, and what follows a store may have to wait for it.
template <class L, Result result, class Beside>
REGARD_INLINE void multiply_short(typename L::Tiles& tiles, const Product<L>& p, Beside& beside) {
  constexpr int64 kSide = L::kLanes, kSize = 4;
  const int64 a_row = (p.a_in_tiles ? kSide : p.lda) * kSize;
  const int64 b_row = (p.b_in_tiles ? kSide : p.ldb) * kSize;
  const int64 c_row = (p.c_in_tiles ? kSide : p.ldc) * kSize;
  const int64 a_second = p.columns(kSide, p.a_in_tiles);
  const int64 b_second = p.columns(kSide, p.b_in_tiles);
  const int64 c_second = p.columns(kSide, p.c_in_tiles);
  const auto* const below = p.b + kSide * p.ldb;
  tiles.template load<4>(p.b, b_row);
  tiles.template load<5>(p.b + b_second, b_row);
  tiles.template load<6>(below, b_row);
  tiles.template load<7>(below + b_second, b_row);
  typename L::Real* second_sum = nullptr;  // where that of the rows before is stored
  for (int64 m = 0; m < p.m; m += kSide) {
    const auto* const a = p.a + m * p.lda;
    auto* const c = p.c + m * p.ldc;
    begin_sum<L, result, 0>(tiles, c, c_row);
    tiles.template stream<2>(a, a_row);
    before_product(beside);
    tiles.template multiply_add<0, 2, 4>();
    if (second_sum) tiles.template store<1>(second_sum, c_row);
    second_sum = c + c_second;
    begin_sum<L, result, 1>(tiles, second_sum, c_row);
    beside.step();
    before_product(beside);
    tiles.template multiply_add<1, 2, 5>();
    beside.step();
    tiles.template stream<3>(a + a_second, a_row);
    before_product(beside);
    tiles.template multiply_add<0, 3, 6>();
    beside.step();
    before_product(beside);
    tiles.template multiply_add<1, 3, 7>();
    tiles.template store<0>(c, c_row);
    beside.step();
  }
  if (second_sum) tiles.template store<1>(second_sum, c_row);
}

template <class L, int N, Result result, class Beside>
REGARD_INLINE void multiply_in_tiles(const Product<L>& p, Beside& beside) {
  constexpr int64 kSide = L::kLanes;
  typename L::Tiles tiles;
  if constexpr (N == 2 && kTerms<L> == 1) {
    if (p.k > kSide && p.k <= 2 * kSide) return multiply_short<L, result>(tiles, p, beside);
  }
  const int64 tiles_of_rows = divide_up(p.m, kSide), pairs = tiles_of_rows / 2 * 2 * kSide;
  if (pairs > 0) multiply_tiles<L, 2, N, result>(tiles, p, 0, pairs, beside);
  if (pairs < p.m) multiply_tiles<L, 1, N, result>(tiles, p, pairs, p.m, beside);
}

// ----------------------------------------------------------------------------------------- both

// C is N vectors wide.
template <class L, int N, Walk walk, Result result, class Beside>
[[gnu::noinline]] void multiply(const Product<L>& product, Beside& beside) {
  const Product<L> p = product;
  Beside in_registers = beside;
  if constexpr (kHasTiles<L>) {
    static_assert(walk == Walk::rows);
    multiply_in_tiles<L, N, result>(p, in_registers);
  } else {
    if constexpr (N > 1 && walk == Walk::columns) {
      if (p.late > 0) return multiply_late<L, N, walk, result>(p, beside);
    }
    multiply_in_vectors<L, N, walk, result, false>(p, in_registers);
  }
  beside = in_registers;
}

// C and B are `vectors` vectors wide.
template <class L, Walk walk, Result result, class Beside>
void multiply_wide(const Product<L>& product, int64 vectors, Beside& beside) {
  constexpr int N = L::kVectors;
  if (vectors == N) return multiply<L, N, walk, result>(product, beside);
  Product<L> p = product;
  for (; vectors >= N; vectors -= N) {
    multiply<L, N, walk, result>(p, beside);
    p.late = 0;
    p.b += p.columns(N * L::kLanes, p.b_in_tiles);
    p.c += p.columns(N * L::kLanes, p.c_in_tiles);
  }
  p.late = 0;  // one by one, vectors take part in all
  for (; vectors > 0; --vectors) {
    multiply<L, 1, walk, result>(p, beside);
    p.b += p.columns(L::kLanes, p.b_in_tiles);
    p.c += p.columns(L::kLanes, p.c_in_tiles);
  }
}

template <class L, Walk walk, Result result>
void multiply_wide(const Product<L>& p, int64 vectors) {
  Nothing nothing;
  multiply_wide<L, walk, result>(p, vectors, nothing);
}

// Leaves out the first vector of C's rows from `whole` on.
template <class L, Walk walk, Result result, class Beside>
void multiply_rows(Product<L> p, int64 vectors, int64 whole, Beside& beside) {
  Product<L> rest = p;
  p.m = smaller(p.m, whole);
  multiply_wide<L, walk, result>(p, vectors, beside);
  if (p.m == rest.m) return;
  rest.a += p.m * p.lda;
  rest.b += L::kLanes;
  rest.c += p.m * p.ldc + L::kLanes;
  rest.m -= p.m;
  multiply_wide<L, walk, result>(rest, vectors - 1, beside);
}

// Rows of A with B, as `multiply_rows` has them. A long k is cut: its sum is one of sums.
template <class L, class Beside>
void multiply_long_rows(Product<L> p, int64 vectors, int64 whole, Beside& beside) {
  constexpr int64 kLongest = 256;
  int64 left = p.k;
  p.k = smaller(left, kLongest);
  multiply_rows<L, Walk::rows, Result::replace>(p, vectors, whole, beside);
  while ((left -= p.k) > 0) {
    p.a += p.columns(p.k, p.a_in_tiles);
    p.b += p.k * p.ldb;
    p.k = smaller(left, kLongest);
    multiply_rows<L, Walk::rows, Result::add>(p, vectors, whole, beside);
  }
}
template <class L>
void multiply_long_rows(const Product<L>& p, int64 vectors, int64 whole) {
  Nothing nothing;
  multiply_long_rows<L>(p, vectors, whole, nothing);
}

}  // namespace
}  // namespace regard
