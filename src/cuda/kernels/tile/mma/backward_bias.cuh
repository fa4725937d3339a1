// The gradient of the bias: dS, stored, or summed over the pairs that share an element.
#pragma once

#include "cuda/kernels/tile/mma/backward_tile.cuh"

namespace regard {

template <KernelConfig kConfig>
struct BackwardBias {
  using Tile = BackwardTileMma<kConfig>;
  using Scores = typename Tile::Scores;
  using Step = typename Tile::Step;
  static constexpr BiasGradient kHow = kConfig.dbias.how;
  static constexpr int kN = Tile::kN, kScoreBlocks = Tile::kScoreBlocks;

  const Tile at;
  float key_sums[kN][2];  // over the queries, for a bias of one row

  REGARD_DEVICE void clear() {
#pragma unroll
    for (int m = 0; m < kN; ++m) key_sums[m][0] = key_sums[m][1] = 0;
  }

  REGARD_DEVICE float* sums_of(int head) const {
    const Strides& s = at.params.buffers.dbias_strides;
    return at.params.buffers.dbias_sums + at.b * s.batch + head * s.head;
  }
  REGARD_DEVICE int row_at(const Step& step, int n, int e) const {
    return step.first_row() + at.row_of(n, e);
  }
  REGARD_DEVICE int key_at(int m, int half) const { return at.first_key + at.key_of(m, half); }

  // A tile of rows.
  REGARD_DEVICE void add(const Scores& ds, const Step& step) {
    if constexpr (kHow == BiasGradient::store) store(ds, step);
    if constexpr (kHow == BiasGradient::add) add_pairs(ds, step);
    if constexpr (kHow == BiasGradient::add_to_row) add_rows(ds);
    if constexpr (kHow == BiasGradient::add_to_column) add_columns(ds, step);
  }
  // After the last row of a query head.
  REGARD_DEVICE void end_head(int head) {
    if constexpr (kHow == BiasGradient::add_to_row) add_key_sums(head);
  }

  REGARD_DEVICE void store(const Scores& ds, const Step& step) const {
    const View& dbias = at.p.dbias;
    const Strides& s = dbias.strides;
    const int64 first = at.b * s.batch + step.head * s.head;
#pragma unroll
    for (int n = 0; n < kScoreBlocks; ++n) {
#pragma unroll
      for (int m = 0; m < kN; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int i = row_at(step, n, e % 2), j = key_at(m, e / 2);
          if (i >= at.seq.len_q || j >= at.seq.len_k) continue;
          const int64 to = first + i * s.row + j * s.column;
          float x = ds[m][n][e];
          if (adds_in_f64<kConfig.bias.type>(at.p, to, x)) continue;
          if (at.p.accumulate) x += load_element<float>(dbias.data, dbias.type, to);
          store_element(dbias.data, dbias.type, to, x);
        }
      }
    }
  }

  // Adds pairs of keys: lanes of neighbouring keys exchange one of their two rows.
  REGARD_DEVICE void add_pairs(const Scores& ds, const Step& step) const {
    const Strides& s = at.params.buffers.dbias_strides;
    const bool odd = lane_index() / 4 % 2;
    float* const sums = sums_of(step.head);
#pragma unroll
    for (int n = 0; n < kScoreBlocks; ++n) {
#pragma unroll
      for (int m = 0; m < kN; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float low = ds[m][n][half * 2], high = ds[m][n][half * 2 + 1];
          const float other = shuffle_xor(odd ? low : high, 4);
          const int i = row_at(step, n, odd), j = key_at(m, half) - odd;
          if (i < at.seq.len_q) {
            add_pair(sums + i * s.row + j * s.column, j, odd ? other : low, odd ? high : other);
          }
        }
      }
    }
  }
  REGARD_DEVICE void add_pair(float* to, int j, float first, float second) const {
    const int len_k = at.seq.len_k;
    if (kConfig.dbias.pairs && j + 1 < len_k) {
      red_add_2(to, first, second);
    } else {
      if (j < len_k) red_add(to, first);
      if (j + 1 < len_k) red_add(to + at.params.buffers.dbias_strides.column, second);
    }
  }

  // A bias of one row: the rows of a head are summed here.
  REGARD_DEVICE void add_rows(const Scores& ds) {
#pragma unroll
    for (int n = 0; n < kScoreBlocks; ++n) {
#pragma unroll
      for (int m = 0; m < kN; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) key_sums[m][e / 2] += ds[m][n][e];
      }
    }
  }
  REGARD_DEVICE void add_key_sums(int head) {
    const Strides& s = at.params.buffers.dbias_strides;
#pragma unroll
    for (int m = 0; m < kN; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& sum = key_sums[m][half];
        sum += shuffle_xor(sum, 1);
        sum += shuffle_xor(sum, 2);
        const int j = key_at(m, half);
        if (lane_index() % 4 == 0 && j < at.seq.len_k) {
          red_add(sums_of(head) + j * s.column, sum);
        }
        sum = 0;
      }
    }
  }

  // A bias of one column: a row's keys are summed here.
  REGARD_DEVICE void add_columns(const Scores& ds, const Step& step) const {
    const Strides& s = at.params.buffers.dbias_strides;
#pragma unroll
    for (int n = 0; n < kScoreBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float sum = 0;
#pragma unroll
        for (int m = 0; m < kN; ++m) {
          sum += ds[m][n][e];
          sum += ds[m][n][2 + e];
        }
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) sum += shuffle_xor(sum, lanes);
        const int i = row_at(step, n, e);
        if (lane_index() < 4 && i < at.seq.len_q) {
          red_add(sums_of(step.head) + i * s.row, sum);
        }
      }
    }
  }
};

}  // namespace regard
