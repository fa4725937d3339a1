// Query rows whose results are not finite, computed again by one warp.
//
// Hidden pairs are skipped, not multiplied by 0, and nothing is split into parts, so the results
// are exact on any input. A lane has a key while scores are made, and columns of out while values
// are added.
#pragma once

#include "cuda/kernels/tile/simt/row_vectors.cuh"
#include "cuda/kernels/tile/simt/simt_pairs.cuh"

namespace regard {

struct RowPlace {
  int h;
  int i;
};
// Places of neighbouring rows: `length` of each head, and behind them those of the next.
struct RowPlaces {
  int h;
  int first;
  int length;

  REGARD_DEVICE RowPlace operator()(int row) const {
    const int index = first + row;
    return {h + index / length, index % length};
  }
};

// Rows of one batch entry and one head of keys, kRows at a time. kColumns: the most columns of out
// that are written.
template <KernelConfig kConfig, int kColumns>
struct RowAgain {
  using Lanes = GpuLanes<float>;
  static constexpr Type kType = kConfig.type;
  static constexpr int kOwn = (kColumns + 31) / 32;  // columns of a lane: every 32nd
  static constexpr int kRows = kOwn > 8 ? 1 : 4;
  // Keys whose values are on their way, so many that 16 elements of a lane are.
  static constexpr int kAtOnce = kOwn == 1 ? 16 : kOwn == 2 ? 8 : kOwn <= 4 ? 4 : kOwn <= 8 ? 2 : 1;

  struct Row {
    RowPlace at;
    bool exists;
    Range keys;
    SoftmaxRow<Lanes> sums;  // each lane has the sum of its own keys
    float sink;
    float out[kOwn];
  };

  const Problem& p;
  const int b;
  const int first_column;
  const int columns = int(smaller<int64>(p.sizes.dim_v - first_column, kColumns));
  const Sequence seq = simt_sequence<kConfig>(p, b);
  DropoutCall<kConfig> dropout;
  Row rows[kRows];

  REGARD_DEVICE RowAgain(const Problem& problem, int batch, int column)
      : p(problem), b(batch), first_column(column), dropout(problem) {}

  REGARD_DEVICE SimtHead<kConfig> head(const Row& row) const {
    return SimtHead<kConfig>(p, seq, b, row.at.h);
  }

  REGARD_DEVICE void begin(Row& row, const RowPlace& at, bool exists) const {
    row.at = at;
    row.exists = exists;
    row.keys = range_of(visible_keys(p.mask_params, seq, at.i));
    row.sums = empty_softmax<Lanes>();
    row.sink = -infinity<float>();
#pragma unroll
    for (int n = 0; n < kOwn; ++n) row.out[n] = 0;
    if constexpr (!kConfig.features.sink) return;
    row.sink = static_cast<const float*>(p.sink.data)[at.h * p.sink.strides.head];
    if (row.sink == -infinity<float>()) return;
    row.sums.max = value_of_sink(row.sink, head(row).unit);
    // NaN from a sink that is not finite.
    if (lane_index() == 0) row.sums.sum = 1 + (row.sink - row.sink);
  }

  // q . k of key j and each row.
  REGARD_DEVICE void multiply(float (&products)[kRows], int64 kv, int j) const {
    using Stored = typename ElementOf<kType>::Stored;
    constexpr int kPack = 16 / int(sizeof(Stored));
    const int dim = int(p.sizes.dim);
    const Stored* const k =
        static_cast<const Stored*>(p.k.data) + offset_of(p.k.strides, b, kv, seq.first_k, j);
    const Stored* q[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      q[r] = static_cast<const Stored*>(p.q.data) +
             offset_of(p.q.strides, b, rows[r].at.h, seq.first_q, rows[r].at.i);
      products[r] = 0;
    }
    int d = 0;
    if (is_aligned(p.q) && is_aligned(p.k)) {
#pragma unroll 4
      for (; d + kPack <= dim; d += kPack) {
        const auto y = load_pack<Pack<Stored, kPack>>(k + d);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const auto x = load_pack<Pack<Stored, kPack>>(q[r] + d);
#pragma unroll
          for (int e = 0; e < kPack; ++e) {
            products[r] = fma_of(real_of<kType>(x.x[e]), real_of<kType>(y.x[e]), products[r]);
          }
        }
      }
    }
#pragma unroll 1
    for (; d < dim; ++d) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        products[r] = fma_of(real_of<kType>(q[r][d]), real_of<kType>(k[d]), products[r]);
      }
    }
  }

  // Keys [first, first + 32) before `end`.
  REGARD_DEVICE void add_keys(int64 kv, int first, int end) {
    const int j = first + lane_index();
    float weights[kRows] = {};
    uint32 seen[kRows];
    if (j < end) multiply(weights, kv, j);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      seen[r] = lanes_with(weigh(rows[r], j, weights[r]));
    }
    add_values(kv, first, seen, weights);
  }

  // Whether the row sees key j. The product x becomes the weight after dropout, 0 if the row does
  // not see the key.
  REGARD_DEVICE bool weigh(Row& row, int j, float& x) {
    const SimtHead<kConfig> head = this->head(row);
    const float exponent = head.unit * float(kLog2E);
    float bias;
    const bool sees = row.exists && row.keys.contains(j) && head.visible(row.at.i, j, bias);
    const float score = sees ? head.logit(x, bias, row.at.i, j) : -infinity<float>();
    const float shrink = raise_max<Lanes>(row.sums, max_of_lanes<32>(score), exponent);
    x = sees ? weight_of<Lanes>(score, subtractable<Lanes>(row.sums.max), exponent) : 0.0f;
    row.sums.sum += x;
    if constexpr (kConfig.features.dropout) {
      dropout.forget();
      if (sees && !dropout.keep(head, row.at.i, j)) x = 0;
    }
#pragma unroll
    for (int n = 0; n < kOwn; ++n) row.out[n] *= shrink;
    return sees;
  }

  REGARD_DEVICE void add_values(int64 kv, int first, const uint32 (&seen)[kRows],
                                const float (&weights)[kRows]) {
    using Stored = typename ElementOf<kType>::Stored;
    const Stored* const values = static_cast<const Stored*>(p.v.data) + first_column +
                                 offset_of(p.v.strides, b, kv, seq.first_k, first);
    uint32 seen_by_some = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) seen_by_some |= seen[r];
#pragma unroll 1
    for (int t = 0; t < 32; t += kAtOnce) {
      float x[kAtOnce][kOwn];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
#pragma unroll
        for (int n = 0; n < kOwn; ++n) {
          const int column = n * 32 + lane_index();
          x[u][n] = (seen_by_some >> (t + u) & 1) && column < columns
                        ? real_of<kType>(values[(t + u) * p.v.strides.row + column])
                        : 0.0f;
        }
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float weight = shuffle(weights[r], t + u);
          if (!(seen[r] >> (t + u) & 1)) continue;
#pragma unroll
          for (int n = 0; n < kOwn; ++n) rows[r].out[n] = fma_of(x[u][n], weight, rows[r].out[n]);
        }
      }
    }
  }

  REGARD_DEVICE void write(Row& row, bool writes_lse) const {
    const float unit = head(row).unit;
    row.sums.sum = sum_of_lanes<32>(row.sums.sum);
    // Where nothing joined the sink, the lse is the sink, to the last bit.
    const bool alone =
        kConfig.features.sink && row.sums.sum == 1 && row.sums.max == value_of_sink(row.sink, unit);
    float lse = alone ? row.sink : lse_of<Lanes>(row.sums, unit);
    float factor = normaliser<Lanes>(row.sums), held = 0;
    if constexpr (kConfig.features.dropout) factor *= float(keep_scale(p.dropout));
    float* const to_lse = static_cast<float*>(p.lse.data) +
                          offset_of(p.lse.strides, b, row.at.h, seq.first_q, row.at.i);
    if constexpr (kConfig.continues) {
      const float given = *to_lse;
      sync_warp();  // all lanes have read it
      if (leaves_as_given(given, lse)) return;
      const auto merged = continuation<Lanes>(given, lse);
      factor *= merged.own;
      held = merged.given;
      lse = merged.lse;
    }
    if (writes_lse && p.lse.given() && lane_index() == 0) *to_lse = lse;
    with_type<kType>(p.out.type, [&](auto type) { write_out<decltype(type)>(row, factor, held); });
  }
  template <class Name>
  REGARD_DEVICE void write_out(const Row& row, float factor, float held) const {
    constexpr Type kTo = Name::kElement;
    auto* const to = static_cast<typename ElementOf<kTo>::Stored*>(p.out.data) + first_column +
                     offset_of(p.out.strides, b, row.at.h, seq.first_q, row.at.i);
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      const int column = n * 32 + lane_index();
      if (column >= columns) continue;
      float x = row.out[n] * factor;
      if (held != 0) x = fma_of(float(real_of<kTo>(to[column])), held, x);
      to[column] = stored_of<kTo>(x);
    }
  }

  // Each row n with a bit in `which`.
  REGARD_DEVICE void run(uint32 which, const RowPlaces& places) {
#pragma unroll 1
    while (which != 0) {
      int begin = 0x7fffffff, end = 0;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const bool exists = which != 0;
        this->begin(rows[r], exists ? places(lowest_bit(which)) : rows[0].at, exists);
        begin = smaller(begin, rows[r].keys.begin);
        end = larger(end, rows[r].keys.end);
        which &= which - 1;
      }
      const int64 kv = rows[0].at.h / group_of(p.sizes);
#pragma unroll 1
      for (int first = begin; first < end; first += 32) add_keys(kv, first, end);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (rows[r].exists) write(rows[r], first_column == 0);
      }
    }
  }
};

// Four neighbouring lanes have a row of a fragment, and one eight rows below. Bit r: one of those
// of row r has true.
REGARD_DEVICE uint32 rows_with(const bool (&value)[2]) {
  uint32 rows = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32 lanes = lanes_with(value[half]);
#pragma unroll
    for (int n = 0; n < 8; ++n) rows |= uint32((lanes >> 4 * n & 15) != 0) << (half * 8 + n);
  }
  return rows;
}

// Columns of out from first_column on, and with the first ones lse. The whole warp takes part,
// after it has written what else there is of the rows. Kernels call it at their end, where few
// registers are live.
template <KernelConfig kConfig, int kColumns = kConfig.dim_v>
REGARD_COLD void compute_again(const KernelParams& params, int b, uint32 rows, RowPlaces places,
                               int first_column = 0) {
  if (rows != 0) RowAgain<kConfig, kColumns>(params.problem, b, first_column).run(rows, places);
}

}  // namespace regard
