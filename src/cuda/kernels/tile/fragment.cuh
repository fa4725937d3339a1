// Fragments: the operands of a matrix product as the lanes of a warp hold them, and their loads.
//
// d[16 x 8] += a[16 x step] b[step x 8], in f32. For 16-bit types a step is 16 elements. An f32
// operand is the sum of two TF32 terms, a step is 8, and three products of terms have f32's
// accuracy (the fourth is below it).
//
// Loads named `_transposed`, and operands made of accumulators, have the elements of an f32 step in
// the order 0, 2, 4, 6, 1, 3, 5, 7, in which a lane holds an accumulator's columns. Both operands
// of a product must agree in it; 16-bit types have one order.
#pragma once

#include "cuda/kernels/element.cuh"
#include "plan/cuda/kernel/kernel_config.h"

namespace regard {

using Accumulator = float[4];  // lane l: rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next

REGARD_DEVICE void add(Accumulator& d, const Accumulator& x) {
#pragma unroll
  for (int e = 0; e < 4; ++e) d[e] += x[e];
}

// A tile in shared memory: its first row, and the bytes from row to row. Swizzled: a row's piece of
// 16 bytes lies where the row's number, modulo 8, is exclusively or'ed to the piece's number.
struct TileView {
  SharedAddress begin;
  int row_bytes;
  bool swizzled = false;

  REGARD_DEVICE SharedAddress at(int row, int byte) const {
    return begin + row * row_bytes + (swizzled ? byte ^ row % 8 * 16 : byte);
  }
  // at(row + more, byte), where `first` is at(row, byte).
  REGARD_DEVICE SharedAddress after(SharedAddress first, int row, int more, int byte) const {
    return swizzled && more % 8 != 0 ? at(row + more, byte) : first + more * row_bytes;
  }
};

template <Type kType, Products kProducts>
struct Fragments {  // f16 and bf16
  using Format = typename ElementOf<kType>::Format;
  static constexpr int kStep = 16;
  static constexpr int kBytes = 2;
  static constexpr bool kTwoTerms = false;

  struct A {
    uint32 word[4];
  };
  struct B {
    uint32 word[2];
  };

  // Rows [row, row + 16) and columns [k, k + 16) of a tile.
  static REGARD_DEVICE void load_a(A& a, const TileView& tile, int row, int k) {
    const int lane = lane_index();
    ldmatrix(a.word, tile.at(row + lane % 16, (k + lane / 16 * 8) * 2));
  }
  // Rows of the transposed tile: the tile's columns [row, row + 16) and rows [k, k + 16).
  static REGARD_DEVICE void load_a_transposed(A& a, const TileView& tile, int row, int k) {
    const int lane = lane_index();
    ldmatrix_trans(a.word, tile.at(k + lane / 16 * 8 + lane % 8, (row + lane / 8 % 2 * 8) * 2));
  }
  static REGARD_DEVICE void load_a_in_order(A& a, const TileView& tile, int row, int k) {
    load_a(a, tile, row, k);
  }

  // Two operands: b's columns are the tile's rows [column, column + 16).
  static REGARD_DEVICE void load_b(B (&b)[2], const TileView& tile, int column, int k) {
    const int lane = lane_index();
    uint32 m[4];
    ldmatrix(m, tile.at(column + lane / 16 * 8 + lane % 8, (k + lane / 8 % 2 * 8) * 2));
    b[0] = {{m[0], m[1]}};
    b[1] = {{m[2], m[3]}};
  }
  // b's columns are the tile's columns.
  static REGARD_DEVICE void load_b_transposed(B (&b)[2], const TileView& tile, int column, int k) {
    const int lane = lane_index();
    uint32 m[4];
    ldmatrix_trans(m, tile.at(k + lane % 16, (column + lane / 16 * 8) * 2));
    b[0] = {{m[0], m[1]}};
    b[1] = {{m[2], m[3]}};
  }

  // The accumulators of a step's columns, `index` steps on, as an operand.
  template <int kCount>
  static REGARD_DEVICE void from_accumulators(A& a, const Accumulator (&x)[kCount], int index) {
    const Accumulator &low = x[2 * index], &high = x[2 * index + 1];
    a.word[0] = pack<Format>(low[0], low[1]);
    a.word[1] = pack<Format>(low[2], low[3]);
    a.word[2] = pack<Format>(high[0], high[1]);
    a.word[3] = pack<Format>(high[2], high[3]);
  }

  static REGARD_DEVICE void multiply(Accumulator& d, const A& a, const B& b) {
    mma_m16n8k16<Format>(d, a.word, b.word[0], b.word[1]);
  }

  // An accumulator into a tile: rows [row, row + 16), columns [column, column + 8).
  static REGARD_DEVICE void store(const TileView& tile, int row, int column, const Accumulator& x) {
    const int lane = lane_index();
    const int at = row + lane / 4, byte = (column + lane % 4 * 2) * 2;
    store_shared_32(tile.at(at, byte), pack<Format>(x[0], x[1]));
    store_shared_32(tile.at(at + 8, byte), pack<Format>(x[2], x[3]));
  }
  // The words of an operand as pairs of f32.
  static REGARD_DEVICE void unpack(const A& a, int word, float& low, float& high) {
    low = widen<Format>(uint16(a.word[word]));
    high = widen<Format>(uint16(a.word[word] >> 16));
  }
};

template <Products kProducts>
struct Fragments<Type::f32, kProducts> {
  static constexpr int kStep = 8;
  static constexpr int kBytes = 4;
  static constexpr bool kTwoTerms = kProducts == Products::tf32x3;

  template <int kWords>
  struct Operand {
    uint32 word[kWords];                  // rounded to TF32
    uint32 rest[kTwoTerms ? kWords : 1];  // what that leaves

    // TF32 keeps 10 bits of the fraction; the tensor unit ignores the others. Rounding would make
    // zeros and infinities of some NaN, which the rest keeps.
    REGARD_DEVICE void set(int i, uint32 bits) {
      constexpr uint32 kInfinity = 0x7f800000u, kNan = 0x7fffe000u;
      const uint32 rounded = (bits + 0x1000u) & 0xffffe000u;
      if constexpr (kTwoTerms) {
        word[i] = rounded;
        rest[i] = bits_of(float_of(bits) - float_of(rounded));
      } else {
        word[i] = (bits & 0x7fffffffu) > kInfinity ? kNan : rounded;
      }
    }
  };
  using A = Operand<4>;
  using B = Operand<2>;

  static REGARD_DEVICE void load_a(A& a, const TileView& tile, int row, int k) {
    const int lane = lane_index();
    uint32 m[4];
    ldmatrix(m, tile.at(row + lane % 16, (k + lane / 16 * 4) * 4));
#pragma unroll
    for (int i = 0; i < 4; ++i) a.set(i, m[i]);
  }
  static REGARD_DEVICE void load_a_transposed(A& a, const TileView& tile, int row, int k) {
    const int lane = lane_index();
    const int at = k + lane % 4 * 2, byte = (row + lane / 4) * 4;
    a.set(0, load_shared_32(tile.at(at, byte)));
    a.set(1, load_shared_32(tile.at(at, byte + 32)));
    a.set(2, load_shared_32(tile.at(at + 1, byte)));
    a.set(3, load_shared_32(tile.at(at + 1, byte + 32)));
  }
  static REGARD_DEVICE void load_a_in_order(A& a, const TileView& tile, int row, int k) {
    const int lane = lane_index();
    const int at = row + lane / 4, byte = (k + lane % 4 * 2) * 4;
    a.set(0, load_shared_32(tile.at(at, byte)));
    a.set(2, load_shared_32(tile.at(at, byte + 4)));
    a.set(1, load_shared_32(tile.at(at + 8, byte)));
    a.set(3, load_shared_32(tile.at(at + 8, byte + 4)));
  }

  static REGARD_DEVICE void load_b(B (&b)[2], const TileView& tile, int column, int k) {
    const int lane = lane_index();
    uint32 m[4];
    ldmatrix(m, tile.at(column + lane / 16 * 8 + lane % 8, (k + lane / 8 % 2 * 4) * 4));
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i / 2].set(i % 2, m[i]);
  }
  static REGARD_DEVICE void load_b_transposed(B (&b)[2], const TileView& tile, int column, int k) {
    const int lane = lane_index();
    const int at = k + lane % 4 * 2, byte = (column + lane / 4) * 4;
    b[0].set(0, load_shared_32(tile.at(at, byte)));
    b[0].set(1, load_shared_32(tile.at(at + 1, byte)));
    b[1].set(0, load_shared_32(tile.at(at, byte + 32)));
    b[1].set(1, load_shared_32(tile.at(at + 1, byte + 32)));
  }

  template <int kCount>
  static REGARD_DEVICE void from_accumulators(A& a, const Accumulator (&x)[kCount], int index) {
    a.set(0, bits_of(x[index][0]));
    a.set(1, bits_of(x[index][2]));
    a.set(2, bits_of(x[index][1]));
    a.set(3, bits_of(x[index][3]));
  }

  static REGARD_DEVICE void multiply(Accumulator& d, const A& a, const B& b) {
    if constexpr (kTwoTerms) {
      mma_m16n8k8_tf32(d, a.rest, b.word[0], b.word[1]);
      mma_m16n8k8_tf32(d, a.word, b.rest[0], b.rest[1]);
    }
    mma_m16n8k8_tf32(d, a.word, b.word[0], b.word[1]);
  }
  // The product of the large terms of one step is summed from zero and added to d with rounding to
  // nearest. Scores need it: the exponential turns their absolute error into a relative one. The
  // other terms are summed apart, so that no step waits for the one before it.
  static REGARD_DEVICE void multiply_exactly(Accumulator& d, Accumulator& rest, const A& a,
                                             const B& b) {
    Accumulator product = {};
    mma_m16n8k8_tf32(rest, a.rest, b.word[0], b.word[1]);
    mma_m16n8k8_tf32(product, a.word, b.word[0], b.word[1]);
    mma_m16n8k8_tf32(rest, a.word, b.rest[0], b.rest[1]);
    add(d, product);
  }

  static REGARD_DEVICE void store(const TileView& tile, int row, int column, const Accumulator& x) {
    const int lane = lane_index();
    const int at = row + lane / 4, byte = (column + lane % 4 * 2) * 4;
    store_shared_64(tile.at(at, byte), bits_of(x[0]), bits_of(x[1]));
    store_shared_64(tile.at(at + 8, byte), bits_of(x[2]), bits_of(x[3]));
  }
};

template <int kM, int kBlocks>
REGARD_DEVICE void clear(Accumulator (&x)[kM][kBlocks]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[m][n][e] = 0;
    }
  }
}

// x = A B^T over kSteps steps; B is the tile's rows from `row` on. load_a(a, m, k) loads the
// operand of step k for the 16-row block m.
template <class F, int kSteps, int kM, int kBlocks, class LoadA>
REGARD_DEVICE void multiply_transposed(Accumulator (&x)[kM][kBlocks], const TileView& tile, int row,
                                       LoadA load_a) {
  clear(x);
  Accumulator rest[F::kTwoTerms ? kM : 1][F::kTwoTerms ? kBlocks : 1];
  clear(rest);
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    typename F::A a[kM];
#pragma unroll
    for (int m = 0; m < kM; ++m) load_a(a[m], m, k);
#pragma unroll
    for (int n = 0; n < kBlocks; n += 2) {
      typename F::B b[2];
      F::load_b(b, tile, row + n * 8, k * F::kStep);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if constexpr (F::kTwoTerms) {
            F::multiply_exactly(x[m][n + i], rest[m][n + i], a[m], b[i]);
          } else {
            F::multiply(x[m][n + i], a[m], b[i]);
          }
        }
      }
    }
  }
  if constexpr (F::kTwoTerms) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) add(x[m][n], rest[m][n]);
    }
  }
}

// sums += a B of step k, B the columns of a tile from `column` on.
template <class F, int kM, int kBlocks>
REGARD_DEVICE void add_step(Accumulator (&sums)[kM][kBlocks], const typename F::A (&a)[kM],
                            const TileView& tile, int column, int k) {
#pragma unroll
  for (int n = 0; n < kBlocks; n += 2) {
    typename F::B b[2];
    F::load_b_transposed(b, tile, column + n * 8, k * F::kStep);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      F::multiply(sums[m][n], a[m], b[0]);
      F::multiply(sums[m][n + 1], a[m], b[1]);
    }
  }
}

// sums += A B over kSteps steps; load_a as above.
//
// The tensor unit rounds sums toward zero, which over thousands of steps shows in f32. There each
// tile's product is summed from zero and added with rounding to nearest.
template <class F, int kSteps, int kM, int kBlocks, class LoadA>
REGARD_DEVICE void add_product(Accumulator (&sums)[kM][kBlocks], const TileView& tile, int column,
                               LoadA load_a) {
  if constexpr (F::kBytes == 2) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      typename F::A a[kM];
#pragma unroll
      for (int m = 0; m < kM; ++m) load_a(a[m], m, k);
      add_step<F>(sums, a, tile, column, k);
    }
  } else {
    typename F::A a[kSteps][kM];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) load_a(a[k][m], m, k);
    }
#pragma unroll
    for (int n = 0; n < kBlocks; n += 2) {
      Accumulator part[kM][2];
      clear(part);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) add_step<F>(part, a[k], tile, column + n * 8, k);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          sums[m][n][e] += part[m][0][e];
          sums[m][n + 1][e] += part[m][1][e];
        }
      }
    }
  }
}

// An f16, bf16 or f32 element of a row in shared memory.
template <Type kType>
REGARD_DEVICE float load_staged(SharedAddress row, int column) {
  if constexpr (kType == Type::f32) {
    return float_of(load_shared_32(row + column * 4));
  } else {
    return widen<typename ElementOf<kType>::Format>(uint16(load_shared_16(row + column * 2)));
  }
}

// A pair of neighbouring f16, bf16 or f32 elements in shared memory.
template <Type kType>
REGARD_DEVICE void load_staged_pair(float (&pair)[2], SharedAddress from) {
  if constexpr (kType == Type::f32) {
    pair[0] = float_of(load_shared_32(from));
    pair[1] = float_of(load_shared_32(from + 4));
  } else {
    using Format = typename ElementOf<kType>::Format;
    const uint32 bits = load_shared_32(from);
    pair[0] = widen<Format>(uint16(bits));
    pair[1] = widen<Format>(uint16(bits >> 16));
  }
}

template <KernelConfig kConfig>
using FragmentsOf = Fragments<kConfig.type, kConfig.products>;

}  // namespace regard
