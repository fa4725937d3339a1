// The two kinds of product of a simt kernel, by 16 x 16 threads.
//
// Thread (y, x) has rows y + 16 r of the block's own tile. In sums over head elements it has rows x
// + 16 c of the streamed tile; in sums over streamed rows it has columns (SimtColumns). So the
// data of one row of the own tile stays within half a warp.
#pragma once

#include "cuda/kernels/tile/simt/simt_memory.cuh"

namespace regard {

REGARD_DEVICE int simt_x() { return thread_index() % kSimtSide; }
REGARD_DEVICE int simt_y() { return thread_index() / kSimtSide; }

// Stands for the weight of a hidden pair, so that the product skips it. No weight that matters has
// this value.
template <class Real>
inline constexpr Real kHidden =
    sizeof(Real) == 4 ? Real(-0x1.fffffep127) : Real(-0x1.fffffffffffffp1023);

// Types and sizes of a kernel of products.
template <KernelConfig kConfig>
struct SimtTile {
  static constexpr Type kType = kConfig.type;
  using Real = RealOf<kType>;
  static constexpr SimtLayout kAt = simt_layout(kConfig);
  static constexpr int kOwn = kAt.own, kStreamed = kAt.streamed;
  static constexpr int kRows = kOwn / kSimtSide;         // own rows of a thread
  static constexpr int kOthers = kStreamed / kSimtSide;  // streamed rows of a thread
  static constexpr int kVector = 16 / int(sizeof(Real));
  // Unrolled steps of a product: more would take more registers than there are.
  static constexpr bool kManySums =
      kOwn * simt_sums(kConfig.kernel, kConfig.dim, kConfig.dim_v) > 32 * kSimtThreads;
  static constexpr int kStepsAtOnce = sizeof(Real) == 8 || kConfig.kernel == Kernel::key_gradient ||
                                              kConfig.only_flagged || kManySums
                                          ? 1
                                          : 2;
  // Whether two rows that exist may be hidden from each other. If not, pairs that do not exist have
  // weight 0, and their rows in shared memory are 0.
  static constexpr bool kVeiled =
      kConfig.features.interval || tests_pairs(kConfig.features) || kConfig.features.bias;
  struct PairRow {  // the thread's pairs of one own row
    Real x[kOthers];
  };
  using Square = PairRow[kRows];

  static REGARD_DEVICE Real* memory() { return &shared_memory<Real>(); }
};

// How the 16 threads that share a row divide its columns: chunks of 64, four columns for each
// thread, and the rest in steps of 16.
template <class Real, int kWidth>
struct SimtColumns {
  static constexpr int kPadded = int(round_up(kWidth, kSimtSide));
  static constexpr int kFull = kPadded / kSimtColumns;
  static constexpr int kRest = kPadded % kSimtColumns / kSimtSide;
  static constexpr int kCount = 4 * kFull + kRest;  // of a thread
  static constexpr int kVector = 16 / int(sizeof(Real));

  // How many of a thread's columns of a chunk lie side by side.
  static constexpr int side_by_side(int columns) { return columns == 4 ? kVector : 1; }

  // The column, within its chunk, of a thread's n-th of it.
  template <int kColumns>
  static REGARD_DEVICE int place(int n) {
    constexpr int kPer = side_by_side(kColumns);
    return (n / kPer * kSimtSide + simt_x()) * kPer + n % kPer;
  }
  // The column of a thread's n-th of all.
  static REGARD_DEVICE int column(int n) {
    return n < 4 * kFull ? n / 4 * kSimtColumns + place<4>(n % 4)
                         : kFull * kSimtColumns + place<1>(n - 4 * kFull);
  }
};

// sums[r][c] = own row r . streamed row c, over kDim head elements.
template <KernelConfig kConfig, int kDim, Type kOwnType, Type kStreamedType>
REGARD_DEVICE void multiply_rows(typename SimtTile<kConfig>::Square& sums,
                                 const RowSource<kOwnType>& own,
                                 const RowSource<kStreamedType>& streamed) {
  using Tile = SimtTile<kConfig>;
  using Real = typename Tile::Real;
  constexpr int kChunk = simt_chunk(kConfig.type, kDim), kStride = Tile::kAt.chunk_stride;
  constexpr int kVector = Tile::kVector;
  Real* const own_stage = Tile::memory();
  Real* const streamed_stage = own_stage + Tile::kAt.streamed_rows;
  Fetched<kOwnType, Tile::kOwn, kChunk> own_part;
  Fetched<kStreamedType, Tile::kStreamed, kChunk> streamed_part;
  const auto fetch = [&](int at) {
    own_part.template fetch<kDim, kConfig.aligned>(own, at);
    streamed_part.template fetch<kDim, kConfig.aligned>(streamed, at);
  };
  fetch(0);
#pragma unroll
  for (int r = 0; r < Tile::kRows; ++r) {
#pragma unroll
    for (int c = 0; c < Tile::kOthers; ++c) sums[r].x[c] = 0;
  }
#pragma unroll 1
  for (int at = 0; at < kDim; at += kChunk) {
    sync_block();  // all threads have read the stage
    own_part.template put<kStride>(own_stage);
    streamed_part.template put<kStride>(streamed_stage);
    sync_block();
    if (at + kChunk < kDim) fetch(at + kChunk);
    const int size = kDim % kChunk == 0 ? kChunk : smaller(kChunk, kDim - at);
#pragma unroll Tile::kStepsAtOnce
    for (int d = 0; d < size; d += kVector) {
      Pack<Real, kVector> x[Tile::kRows], y[Tile::kOthers];
#pragma unroll
      for (int r = 0; r < Tile::kRows; ++r) {
        x[r] = *reinterpret_cast<const Pack<Real, kVector>*>(
            own_stage + (simt_y() + r * kSimtSide) * kStride + d);
      }
#pragma unroll
      for (int c = 0; c < Tile::kOthers; ++c) {
        y[c] = *reinterpret_cast<const Pack<Real, kVector>*>(
            streamed_stage + (simt_x() + c * kSimtSide) * kStride + d);
      }
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
#pragma unroll
        for (int r = 0; r < Tile::kRows; ++r) {
#pragma unroll
          for (int c = 0; c < Tile::kOthers; ++c) {
            sums[r].x[c] = fma_of(x[r].x[e], y[c].x[e], sums[r].x[c]);
          }
        }
      }
    }
  }
}

// Stores the weights of the thread's pairs for multiply_weights: kHidden if `seen` lacks bit r *
// kOthers + c. Only the half warp that shares the own rows reads them.
template <KernelConfig kConfig>
REGARD_DEVICE void store_weights(const typename SimtTile<kConfig>::Square& weights, uint32 seen) {
  using Tile = SimtTile<kConfig>;
  using Real = typename Tile::Real;
  Real* const to = Tile::memory() + Tile::kAt.weights;
  sync_warp();
#pragma unroll
  for (int r = 0; r < Tile::kRows; ++r) {
#pragma unroll
    for (int c = 0; c < Tile::kOthers; ++c) {
      to[(simt_y() + r * kSimtSide) * Tile::kAt.weight_stride + simt_x() + c * kSimtSide] =
          seen >> (r * Tile::kOthers + c) & 1 ? weights[r].x[c]
                                              : (Tile::kVeiled ? kHidden<Real> : Real(0));
    }
  }
  sync_warp();
}

// part[r][n] = sum over streamed rows of weight * the n-th of kColumns columns in shared memory.
template <KernelConfig kConfig, int kColumns>
REGARD_DEVICE void multiply_chunk(
    typename SimtTile<kConfig>::Real (&part)[SimtTile<kConfig>::kRows][kColumns]) {
  using Tile = SimtTile<kConfig>;
  using Real = typename Tile::Real;
  using Columns = SimtColumns<Real, kColumns * kSimtSide>;
  constexpr int kVector = Tile::kVector, kPer = Columns::side_by_side(kColumns);
  const Real* const weights =
      Tile::memory() + Tile::kAt.weights + simt_y() * Tile::kAt.weight_stride;
  const Real* const columns = Tile::memory() + simt_x() * kPer;
#pragma unroll
  for (int r = 0; r < Tile::kRows; ++r) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) part[r][n] = 0;
  }
#pragma unroll Tile::kStepsAtOnce
  for (int streamed = 0; streamed < Tile::kStreamed; streamed += kVector) {
    Pack<Real, kVector> weight[Tile::kRows];
#pragma unroll
    for (int r = 0; r < Tile::kRows; ++r) {
      weight[r] = *reinterpret_cast<const Pack<Real, kVector>*>(
          weights + r * kSimtSide * Tile::kAt.weight_stride + streamed);
    }
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      Pack<Real, kPer> y[kColumns / kPer];
#pragma unroll
      for (int n = 0; n < kColumns / kPer; ++n) {
        y[n] = *reinterpret_cast<const Pack<Real, kPer>*>(
            columns + (streamed + e) * (kColumns * kSimtSide) + n * kSimtSide * kPer);
      }
#pragma unroll
      for (int r = 0; r < Tile::kRows; ++r) {
        if (Tile::kVeiled && weight[r].x[e] == kHidden<Real>) continue;
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
          part[r][n] = fma_of(weight[r].x[e], y[n / kPer].x[n % kPer], part[r][n]);
        }
      }
    }
  }
}

// sums[r][n] = sums[r][n] * shrink[r] + sum over streamed rows of weight * column n of that row,
// for columns [column, column + kWidth) of kDim.
template <KernelConfig kConfig, int kDim, int kWidth, Type kFrom, int kCount>
REGARD_DEVICE void multiply_weights(
    typename SimtTile<kConfig>::Real (&sums)[SimtTile<kConfig>::kRows][kCount],
    const typename SimtTile<kConfig>::Real (&shrink)[SimtTile<kConfig>::kRows],
    const RowSource<kFrom>& streamed, int column) {
  using Tile = SimtTile<kConfig>;
  using Real = typename Tile::Real;
  using Columns = SimtColumns<Real, kWidth>;
  static_assert(kCount == Columns::kCount);
  const auto chunk = [&](auto columns, int first) {
    constexpr int kColumns = decltype(columns)::kCount;
    Fetched<kFrom, Tile::kStreamed, kColumns * kSimtSide> fetched;
    fetched.template fetch<kDim, kConfig.aligned>(streamed, column + first / 4 * kSimtColumns);
    sync_block();  // all threads have read the stage
    fetched.template put<kColumns * kSimtSide>(Tile::memory());
    sync_block();
    Real part[Tile::kRows][kColumns];
    multiply_chunk<kConfig, kColumns>(part);
#pragma unroll
    for (int r = 0; r < Tile::kRows; ++r) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        sums[r][first + n] = fma_of(sums[r][first + n], shrink[r], part[r][n]);
      }
    }
  };
#pragma unroll
  for (int n = 0; n < Columns::kFull; ++n) chunk(SimtColumns<Real, kSimtColumns>(), 4 * n);
  if constexpr (Columns::kRest > 0) {
    chunk(SimtColumns<Real, Columns::kRest * kSimtSide>(), 4 * Columns::kFull);
  }
}

}  // namespace regard
