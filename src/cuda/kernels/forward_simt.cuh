// Forward without tensor cores: a block has a tile of query rows of one head and loops over the
// keys that they see.
//
// The result is exact on any input, because hidden pairs are skipped, not multiplied by 0.
#pragma once

#include "cuda/kernels/tile/simt/simt_tiles.cuh"

namespace regard {

// The online softmax of a thread's rows. Each of the 16 threads of a row has the sum of its own
// keys.
template <KernelConfig kConfig>
struct SimtRows {
  using Tile = SimtTile<kConfig>;
  using Real = typename Tile::Real;
  using Lanes = GpuLanes<Real>;

  SoftmaxRow<Lanes> row[Tile::kRows];

  REGARD_DEVICE void begin(const SimtHead<kConfig>& head, Real sink) {
#pragma unroll
    for (int r = 0; r < Tile::kRows; ++r) {
      row[r] = empty_softmax<Lanes>();
      if (!kConfig.features.sink || sink == -infinity<Real>()) continue;
      row[r].max = value_of_sink(float(sink), head.unit);
      const Real nonfinite = sink - sink;  // 0, or NaN from a sink that is not finite
      if (simt_x() == 0) row[r].sum = 1 + nonfinite;
    }
  }

  // Raw products to weights after dropout; `shrink` is the factor of the previous sums.
  REGARD_DEVICE uint32 weigh(const SimtHead<kConfig>& head, const Range (&keys)[Tile::kRows],
                             int first_row, int first_key, typename Tile::Square& s,
                             Real (&shrink)[Tile::kRows]) {
    const Real exponent = Real(double(head.unit) * kLog2E);
    DropoutCall<kConfig> dropout(head.p);
    uint32 seen = 0;
#pragma unroll kPairRowsAtOnce < kConfig, Tile::kRows>
    for (int r = 0; r < Tile::kRows; ++r) {
      const int i = first_row + simt_y() + r * kSimtSide;
      const Range visible = picked(keys, r);
      SoftmaxRow<Lanes> own = picked(row, r);
      typename Tile::PairRow scores = picked(s, r);
      uint32 sees = 0;
      Real max = -infinity<Real>();
#pragma unroll
      for (int c = 0; c < Tile::kOthers; ++c) {
        const int j = first_key + simt_x() + c * kSimtSide;
        Real bias;
        if (!visible.contains(j) || !head.visible(i, j, bias)) continue;
        sees |= 1u << c;
        scores.x[c] = head.logit(scores.x[c], bias, i, j);
        max = max_of(max, scores.x[c]);
      }
      put(shrink, r, raise_max<Lanes>(own, max_of_row(max), exponent));
      const Real base = subtractable<Lanes>(own.max);
      dropout.forget();
      Real sum = 0;
#pragma unroll
      for (int c = 0; c < Tile::kOthers; ++c) {
        const Real weight = sees >> c & 1 ? weight_of<Lanes>(scores.x[c], base, exponent) : Real(0);
        sum += weight;
        scores.x[c] = weight;
        if constexpr (kConfig.features.dropout) {
          const int j = first_key + simt_x() + c * kSimtSide;
          if (!dropout.keep(head, i, j)) scores.x[c] = 0;
        }
      }
      own.sum += sum;
      put(row, r, own);
      put(s, r, scores);
      seen |= sees << (r * Tile::kOthers);
    }
    return seen;
  }
};

// What the sums of a tile's rows become: each is multiplied by `factor`, and where a call continues
// `held` times what out holds is added.
template <KernelConfig kConfig>
struct SimtRowEnds {
  using Tile = SimtTile<kConfig>;
  using Real = typename Tile::Real;
  using Lanes = GpuLanes<Real>;

  Real factor[Tile::kRows], held[Tile::kRows];
  uint32 written = 0;  // bits of rows

  // Writes the lse.
  REGARD_DEVICE SimtRowEnds(const Problem& p, const OwnTile<kConfig>& own,
                            const SimtRows<kConfig>& rows, Real sink, Real unit) {
#pragma unroll
    for (int r = 0; r < Tile::kRows; ++r) {
      SoftmaxRow<Lanes> row = rows.row[r];
      row.sum = sum_of_row(row.sum);
      factor[r] = normaliser<Lanes>(row) * Real(keep_scale(p.dropout));
      // Where nothing joined the sink, the lse is the sink, to the last bit.
      const auto lse = [&] {
        const bool alone =
            kConfig.features.sink && row.sum == 1 && row.max == value_of_sink(float(sink), unit);
        return alone ? sink : lse_of<Lanes>(row, unit);
      };
      const int64 i = simt_y() + r * kSimtSide;
      const auto lse_at = [&]() -> Real& {
        const int64 at = offset_of(p.lse.strides, own.b, own.h, own.seq.first_q, own.first + i);
        return static_cast<Real*>(p.lse.data)[at];
      };
      if constexpr (kConfig.continues) {
        const bool writes = own.writes(i);
        const Real own_lse = lse(), given_lse = writes ? lse_at() : Real(0);
        sync_warp();  // the threads of a row have read its lse
        if (!writes || leaves_as_given(given_lse, own_lse)) continue;
        const auto merged = continuation<Lanes>(given_lse, own_lse);
        factor[r] *= merged.own;
        held[r] = merged.given;
        written |= 1u << r;
        if (simt_x() == 0) lse_at() = merged.lse;
      } else {
        if (!own.writes(i)) continue;
        written |= 1u << r;
        if (simt_x() == 0 && p.lse.given()) lse_at() = lse();
      }
    }
  }
};

template <KernelConfig kConfig>
REGARD_DEVICE void forward_tile(const KernelParams& params, const OwnTile<kConfig>& own) {
  using Tile = SimtTile<kConfig>;
  using Real = typename Tile::Real;
  constexpr Type kType = kConfig.type;
  constexpr int kCount = SimtColumns<Real, kConfig.dim_v>::kCount;
  const Problem& p = params.problem;
  const Sequence& seq = own.seq;
  const int b = own.b, h = own.h;
  const int64 first = own.first, last = own.end - 1;
  const SimtHead<kConfig> head(p, seq, b, h);
  Range keys[Tile::kRows];
  Real out[Tile::kRows][kCount];
#pragma unroll
  for (int r = 0; r < Tile::kRows; ++r) {
    const int64 i = first + simt_y() + r * kSimtSide;
    if (i <= last) keys[r] = range_of(visible_keys(p.mask_params, seq, i));
#pragma unroll
    for (int n = 0; n < kCount; ++n) out[r][n] = 0;
  }
  Real sink = 0;
  if constexpr (kConfig.features.sink) {
    sink = static_cast<const float*>(p.sink.data)[h * p.sink.strides.head];
  }
  SimtRows<kConfig> rows;
  rows.begin(head, sink);

  const int64 begin = visible_keys(p.mask_params, seq, first).begin;
  const int64 end = visible_keys(p.mask_params, seq, last).end;
  const auto q = row_source<kType>(p.q, b, h, seq.first_q, first, seq.len_q);
  for (int64 j = begin / Tile::kStreamed * Tile::kStreamed; j < end; j += Tile::kStreamed) {
    typename Tile::Square s;
    Real shrink[Tile::kRows];
    const auto k = row_source<kType>(p.k, b, head.kv(), seq.first_k, j, seq.len_k);
    multiply_rows<kConfig, kConfig.dim>(s, q, k);
    const uint32 seen = rows.weigh(head, keys, int(first), int(j), s, shrink);
    store_weights<kConfig>(s, seen);
    const auto v = row_source<kType>(p.v, b, head.kv(), seq.first_k, j, seq.len_k);
    multiply_weights<kConfig, kConfig.dim_v, kConfig.dim_v>(out, shrink, v, 0);
  }

  const SimtRowEnds<kConfig> ends(p, own, rows, sink, head.unit);
  const int64 offset = offset_of(p.out.strides, b, h, seq.first_q, first);
  store_sums<kConfig, kConfig.dim_v, kConfig.dim_v>(p.out, offset, out, ends.factor, ends.written,
                                                    false, 0,
                                                    kConfig.continues ? &ends.held : nullptr);
}

template <KernelConfig kConfig>
REGARD_DEVICE void forward_simt(const KernelParams& params) {
  each_own_tile<kConfig>(params, [&](const OwnTile<kConfig>& own) { forward_tile(params, own); });
}

}  // namespace regard
