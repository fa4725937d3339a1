// Gradients without tensor cores, one kernel for each:
//   key_gradient    dk, dv of a tile of keys; loops over the queries that see it
//   query_gradient  dq of a tile of query rows; loops over the keys that they see
//   bias_gradient   dbias of a tile of the bias; loops over the pairs that share its elements
// All are exact on any input and sum in a fixed order.
#pragma once

#include "cuda/kernels/tile/simt/pair_gradient.cuh"
#include "cuda/kernels/tile/simt/row_vectors.cuh"
#include "cuda/kernels/tile/simt/simt_tiles.cuh"

namespace regard {

template <KernelConfig kConfig>
REGARD_DEVICE SimtRowState<RealOf<kConfig.type>> row_state(const KernelParams& params,
                                                           const SimtHead<kConfig>& head, int64 i) {
  using Real = RealOf<kConfig.type>;
  const Problem& p = head.p;
  if (i >= head.seq.len_q) return {};
  const auto* const states = static_cast<const RowState<Real>*>(params.buffers.row_states);
  const int64 at = offset_of(p.lse.strides, head.b, head.h, head.seq.first_q, i);
  const Real lse = static_cast<const Real*>(p.lse.data)[at];
  const int64 row = head.h * p.sizes.rows_q + flat_row(p, head.seq, head.b, i);
  return {lse == -infinity<Real>() ? infinity<Real>() : lse, states[row].delta};
}

// Calls of(TypeName) with the type of dout, which may be f32. Code that computes flagged results
// again is compiled for one type.
template <KernelConfig kConfig, class Of>
REGARD_DEVICE void with_dout_type(Type type, Of of) {
  if constexpr (kConfig.only_flagged) {
    of(TypeName < kConfig.dout_is_f32 ? Type::f32 : kConfig.type > ());
  } else {
    with_type<kConfig.type>(type, of);
  }
}

// sums[r][c] = own row r . streamed row c, one of them of dout.
template <KernelConfig kConfig, class Own, class Streamed>
REGARD_DEVICE void multiply_dout_rows(typename SimtTile<kConfig>::Square& sums, Type dout_type,
                                      Own own, Streamed streamed) {
  with_dout_type<kConfig>(dout_type, [&](auto type) {
    multiply_rows<kConfig, kConfig.dim_v>(sums, own(type), streamed(type));
  });
}

template <KernelConfig kConfig>
REGARD_DEVICE void set_all(typename SimtTile<kConfig>::Real (&to)[SimtTile<kConfig>::kRows],
                           typename SimtTile<kConfig>::Real value) {
#pragma unroll
  for (int r = 0; r < SimtTile<kConfig>::kRows; ++r) to[r] = value;
}

// -------------------------------------------------------------------------------------- dk and dv

// The queries of a tile of keys.
template <KernelConfig kConfig>
struct OwnKeys : OwnTile<kConfig> {
  using Tile = SimtTile<kConfig>;

  Range queries[Tile::kRows];
  Range hull;                             // of all keys of the tile
  uint32 dk_written = 0, dv_written = 0;  // bits of the thread's keys

  REGARD_DEVICE OwnKeys(const Problem& p, const OwnTile<kConfig>& own) : OwnTile<kConfig>(own) {
    const auto queries_of = [&](int64 j) { return visible_queries(p.mask_params, own.seq, j); };
    hull = range_of({queries_of(own.first).begin, queries_of(own.end - 1).end});
#pragma unroll
    for (int r = 0; r < Tile::kRows; ++r) {
      const int64 j = simt_y() + r * kSimtSide;
      if (own.first + j < own.end) queries[r] = range_of(queries_of(own.first + j));
      if (own.writes(j, int(KeyGradient::dk))) dk_written |= 1u << r;
      if (own.writes(j, int(KeyGradient::dv))) dv_written |= 1u << r;
    }
  }
};

// One pass of key_gradient: the slices of dk and dv from columns `at` and `at_v` on.
template <KernelConfig kConfig>
REGARD_DEVICE void key_gradient_pass(const KernelParams& params, const OwnKeys<kConfig>& own,
                                     int at, int at_v) {
  using Tile = SimtTile<kConfig>;
  using Real = typename Tile::Real;
  constexpr Type kType = kConfig.type;
  constexpr int kDim = kConfig.dim, kDimV = kConfig.dim_v, kPasses = simt_passes(kConfig);
  constexpr int kSlice = simt_slice(kDim, kPasses), kSliceV = simt_slice(kDimV, kPasses);
  constexpr int kCount = SimtColumns<Real, kSlice>::kCount;
  constexpr int kCountV = SimtColumns<Real, kSliceV>::kCount;
  const Problem& p = params.problem;
  const Sequence& seq = own.seq;
  Real dk[Tile::kRows][kCount], dv[Tile::kRows][kCountV], factor[Tile::kRows];
  set_all<kConfig>(factor, 1);
#pragma unroll
  for (int r = 0; r < Tile::kRows; ++r) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) dk[r][n] = 0;
#pragma unroll
    for (int n = 0; n < kCountV; ++n) dv[r][n] = 0;
  }
  const int group = group_of(p.sizes);  // own.h is a kv head
  for (int h = own.h * group; h < (own.h + 1) * group; ++h) {
    const SimtHead<kConfig> head(p, seq, own.b, h);
    const int64 begin = own.hull.begin / Tile::kStreamed * Tile::kStreamed;
    for (int64 i = begin; i < own.hull.end; i += Tile::kStreamed) {
      const auto dout = [&](auto type) {
        return row_source<decltype(type)::kElement>(p.dout, own.b, h, seq.first_q, i, seq.len_q);
      };
      const auto q = row_source<kType>(p.q, own.b, h, seq.first_q, i, seq.len_q);
      typename Tile::Square s, dweights;
      multiply_rows<kConfig, kDim>(
          s, row_source<kType>(p.k, own.b, own.h, seq.first_k, own.first, seq.len_k), q);
      if constexpr (kConfig.wanted.dk) {
        const auto v = row_source<kType>(p.v, own.b, own.h, seq.first_k, own.first, seq.len_k);
        multiply_dout_rows<kConfig>(
            dweights, p.dout.type, [&](auto) { return v; }, dout);
      }
      DropoutCall<kConfig> dropout(head.p);
      uint32 seen = 0;
#pragma unroll kPairRowsAtOnce < kConfig, Tile::kOthers>
      for (int c = 0; c < Tile::kOthers; ++c) {
        const int row = int(i) + simt_x() + c * kSimtSide;
        const SimtRowState<Real> state = row_state<kConfig>(params, head, row);
        dropout.forget();
#pragma unroll
        for (int r = 0; r < Tile::kRows; ++r) {
          const int key = int(own.first) + simt_y() + r * kSimtSide;
          Real bias;
          if (!own.queries[r].contains(row) || !head.visible(row, key, bias)) continue;
          seen |= 1u << (r * Tile::kOthers + c);
          const Real dweight = kConfig.wanted.dk ? picked(dweights[r].x, c) : Real(0);
          const auto pair = pair_gradient<kConfig>(head, state, picked(s[r].x, c), dweight, bias,
                                                   row, key, dropout);
          put(s[r].x, c, pair.kept_weight);
          put(dweights[r].x, c, pair.dproduct);
        }
      }
      if constexpr (kConfig.wanted.dv) {
        store_weights<kConfig>(s, seen);
        with_dout_type<kConfig>(p.dout.type, [&](auto type) {
          multiply_weights<kConfig, kDimV, kSliceV>(dv, factor, dout(type), at_v);
        });
      }
      if constexpr (kConfig.wanted.dk) {
        store_weights<kConfig>(dweights, seen);
        multiply_weights<kConfig, kDim, kSlice>(dk, factor, q, at);
      }
    }
  }
  if constexpr (kConfig.wanted.dv) {
    const int64 to = offset_of(p.dv.strides, own.b, own.h, seq.first_k, own.first);
    store_sums<kConfig, kDimV, kSliceV>(p.dv, to, dv, factor, own.dv_written, p.accumulate, at_v);
  }
  if constexpr (kConfig.wanted.dk) {
    set_all<kConfig>(factor, Real(p.score.scale));
    const int64 to = offset_of(p.dk.strides, own.b, own.h, seq.first_k, own.first);
    store_sums<kConfig, kDim, kSlice>(p.dk, to, dk, factor, own.dk_written, p.accumulate, at);
  }
}

template <KernelConfig kConfig>
REGARD_DEVICE void key_gradient_tile(const KernelParams& params, const OwnTile<kConfig>& tile) {
  constexpr int kPasses = simt_passes(kConfig);
  const OwnKeys<kConfig> own(params.problem, tile);
#pragma unroll 1
  for (int pass = 0; pass < kPasses; ++pass) {
    key_gradient_pass(params, own, pass * simt_slice(kConfig.dim, kPasses),
                      pass * simt_slice(kConfig.dim_v, kPasses));
  }
}

template <KernelConfig kConfig>
REGARD_DEVICE void key_gradient_simt(const KernelParams& params) {
  each_own_tile<kConfig>(params,
                         [&](const OwnTile<kConfig>& tile) { key_gradient_tile(params, tile); });
}

// -------------------------------------------------------------------------- dscores of query rows

// ds of the thread's pairs: rows from `first` on, which see `keys`, and keys from j on. ds[r][c] as
// `part` says; returns which pairs are visible.
template <KernelConfig kConfig>
REGARD_DEVICE uint32
dscores(const SimtHead<kConfig>& head, const Range (&keys)[SimtTile<kConfig>::kRows],
        const SimtRowState<RealOf<kConfig.type>> (&states)[SimtTile<kConfig>::kRows], int64 first,
        int64 j, RealOf<kConfig.type> PairGradient<RealOf<kConfig.type>>::*part,
        typename SimtTile<kConfig>::Square& ds) {
  using Tile = SimtTile<kConfig>;
  using Real = typename Tile::Real;
  constexpr Type kType = kConfig.type;
  const Problem& p = head.p;
  const Sequence& seq = head.seq;
  typename Tile::Square s;
  multiply_rows<kConfig, kConfig.dim>(
      s, row_source<kType>(p.q, head.b, head.h, seq.first_q, first, seq.len_q),
      row_source<kType>(p.k, head.b, head.kv(), seq.first_k, j, seq.len_k));
  const auto dout = [&](auto type) {
    return row_source<decltype(type)::kElement>(p.dout, head.b, head.h, seq.first_q, first,
                                                seq.len_q);
  };
  const auto v = row_source<kType>(p.v, head.b, head.kv(), seq.first_k, j, seq.len_k);
  multiply_dout_rows<kConfig>(ds, p.dout.type, dout, [&](auto) { return v; });
  DropoutCall<kConfig> dropout(head.p);
  uint32 seen = 0;
#pragma unroll kPairRowsAtOnce < kConfig, Tile::kRows>
  for (int r = 0; r < Tile::kRows; ++r) {
    const int row = int(first) + simt_y() + r * kSimtSide;
    const Range visible = picked(keys, r);
    const SimtRowState<Real> state = picked(states, r);
    const typename Tile::PairRow raw = picked(s, r), dweight = picked(ds, r);
    typename Tile::PairRow result = {};
    dropout.forget();
#pragma unroll
    for (int c = 0; c < Tile::kOthers; ++c) {
      const int key = int(j) + simt_x() + c * kSimtSide;
      Real bias;
      if (!visible.contains(key) || !head.visible(row, key, bias)) continue;
      seen |= 1u << (r * Tile::kOthers + c);
      result.x[c] =
          pair_gradient<kConfig>(head, state, raw.x[c], dweight.x[c], bias, row, key, dropout).*
          part;
    }
    put(ds, r, result);
  }
  return seen;
}

// Ranges and states of the thread's own rows, those from `first` on up to `last`.
template <KernelConfig kConfig>
struct OwnQueries {
  using Tile = SimtTile<kConfig>;

  Range keys[Tile::kRows];
  SimtRowState<typename Tile::Real> states[Tile::kRows];
  Range hull;  // of all rows of the block

  REGARD_DEVICE OwnQueries(const KernelParams& params, const SimtHead<kConfig>& head, int64 first,
                           int64 last) {
    const auto keys_of = [&](int64 i) { return visible_keys(head.p.mask_params, head.seq, i); };
    hull = range_of({keys_of(first).begin, keys_of(last).end});
#pragma unroll
    for (int r = 0; r < Tile::kRows; ++r) {
      const int64 i = first + simt_y() + r * kSimtSide;
      if (i <= last) keys[r] = range_of(keys_of(i));
      states[r] = row_state<kConfig>(params, head, i);
    }
  }
};

// --------------------------------------------------------------------------------------------- dq

template <KernelConfig kConfig>
REGARD_DEVICE void query_gradient_tile(const KernelParams& params, const OwnTile<kConfig>& tile) {
  using Tile = SimtTile<kConfig>;
  using Real = typename Tile::Real;
  constexpr int kCount = SimtColumns<Real, kConfig.dim>::kCount;
  const Problem& p = params.problem;
  const Sequence& seq = tile.seq;
  const int b = tile.b, h = tile.h;
  const int64 first = tile.first;
  const SimtHead<kConfig> head(p, seq, b, h);
  const OwnQueries<kConfig> own(params, head, first, tile.end - 1);
  Real dq[Tile::kRows][kCount], factor[Tile::kRows];
  set_all<kConfig>(factor, 1);
  uint32 written = 0;
#pragma unroll
  for (int r = 0; r < Tile::kRows; ++r) {
    if (tile.writes(simt_y() + r * kSimtSide)) written |= 1u << r;
#pragma unroll
    for (int n = 0; n < kCount; ++n) dq[r][n] = 0;
  }
  const int64 begin = own.hull.begin / Tile::kStreamed * Tile::kStreamed;
  for (int64 j = begin; j < own.hull.end; j += Tile::kStreamed) {
    typename Tile::Square ds;
    const uint32 seen =
        dscores<kConfig>(head, own.keys, own.states, first, j, &PairGradient<Real>::dproduct, ds);
    store_weights<kConfig>(ds, seen);
    const auto k = row_source<kConfig.type>(p.k, b, head.kv(), seq.first_k, j, seq.len_k);
    multiply_weights<kConfig, kConfig.dim, kConfig.dim>(dq, factor, k, 0);
  }
  set_all<kConfig>(factor, Real(p.score.scale));
  const int64 to = offset_of(p.dq.strides, b, h, seq.first_q, first);
  store_sums<kConfig, kConfig.dim, kConfig.dim>(p.dq, to, dq, factor, written, p.accumulate, 0);
}

template <KernelConfig kConfig>
REGARD_DEVICE void query_gradient_simt(const KernelParams& params) {
  each_own_tile<kConfig>(params,
                         [&](const OwnTile<kConfig>& tile) { query_gradient_tile(params, tile); });
}

// ------------------------------------------------------------------------------------------ dbias

// The range of a dimension that a block sums over: all of it if the bias is broadcast, else its own
// part.
REGARD_DEVICE Range broadcast_range(int64 bias_size, int64 size, int64 first, int64 count) {
  return range_of(bias_size == 1 ? Interval{0, size}
                                 : Interval{first, smaller(first + count, bias_size)});
}

// A block's tile of the elements of dbias, and what it sums over.
template <KernelConfig kConfig>
struct BiasTile {
  using Tile = SimtTile<kConfig>;
  using Real = typename Tile::Real;

  const Problem& p;
  const int64* const n = p.bias_sizes;
  int64 b, h, row, column;  // the first element

  REGARD_DEVICE BiasTile(const KernelParams& params) : p(params.problem) {
    const BlockCoords place = block_coords(params, block_index());
    const int64 across = divide_up(n[3], Tile::kStreamed);
    b = place.head / n[1];
    h = place.head % n[1];
    row = place.tile / across * Tile::kOwn;
    column = place.tile % across * Tile::kStreamed;
  }

  // Element by element of the tile.
  REGARD_DEVICE void sum_pairs(const KernelParams& params, typename Tile::Square& sums) const {
    const Range batches = broadcast_range(n[0], p.sizes.batch, b, 1);
    const Range heads = broadcast_range(n[1], p.sizes.heads_q, h, 1);
    for (int sequence = batches.begin; sequence < batches.end; ++sequence) {
      const Sequence seq = simt_sequence<kConfig>(p, sequence);
      for (int each = heads.begin; each < heads.end; ++each) {
        sum_head(params, SimtHead<kConfig>(p, seq, sequence, each), sums);
      }
    }
  }

  REGARD_DEVICE void sum_head(const KernelParams& params, const SimtHead<kConfig>& head,
                              typename Tile::Square& sums) const {
    const Range rows = broadcast_range(n[2], head.seq.len_q, row, Tile::kOwn);
    const Range columns = broadcast_range(n[3], p.sizes.len_k, column, Tile::kStreamed);
    const int64 row_end = smaller<int64>(rows.end, head.seq.len_q);
    for (int64 i = rows.begin; i < row_end; i += Tile::kOwn) {
      const OwnQueries<kConfig> own(params, head, i, smaller(i + Tile::kOwn, row_end) - 1);
      const int64 begin =
          larger<int64>(columns.begin, own.hull.begin / Tile::kStreamed * Tile::kStreamed);
      const int64 end = smaller<int64>(columns.end, own.hull.end);
      for (int64 j = begin; j < end; j += Tile::kStreamed) {
        typename Tile::Square ds;
        dscores<kConfig>(head, own.keys, own.states, i, j, &PairGradient<Real>::dscore, ds);
#pragma unroll
        for (int r = 0; r < Tile::kRows; ++r) {
#pragma unroll
          for (int c = 0; c < Tile::kOthers; ++c) sums[r].x[c] += ds[r].x[c];
        }
      }
    }
  }

  // Elements that share a bias: the first column or row gets their sum.
  REGARD_DEVICE void sum_shared(typename Tile::Square& sums) const {
    Real* const shared = Tile::memory();
    if (n[3] == 1) {
#pragma unroll
      for (int r = 0; r < Tile::kRows; ++r) {
        Real sum = 0;
#pragma unroll
        for (int c = 0; c < Tile::kOthers; ++c) sum += sums[r].x[c];
        sums[r].x[0] = sum_of_row(sum);
      }
    }
    if (n[2] != 1) return;
    sync_block();
#pragma unroll
    for (int c = 0; c < Tile::kOthers; ++c) {
      Real sum = 0;
#pragma unroll
      for (int r = 0; r < Tile::kRows; ++r) sum += sums[r].x[c];
      shared[simt_y() * Tile::kStreamed + simt_x() + c * kSimtSide] = sum;
    }
    sync_block();
#pragma unroll
    for (int c = 0; c < Tile::kOthers; ++c) {
      sums[0].x[c] = 0;
      for (int y = 0; y < kSimtSide; ++y) {
        sums[0].x[c] += shared[y * Tile::kStreamed + simt_x() + c * kSimtSide];
      }
    }
  }

  REGARD_DEVICE void store(const typename Tile::Square& sums) const {
    const int64 to = offset_of(p.dbias.strides, b, h, 0, 0);
#pragma unroll
    for (int r = 0; r < Tile::kRows; ++r) {
#pragma unroll
      for (int c = 0; c < Tile::kOthers; ++c) {
        const int64 i = row + simt_y() + r * kSimtSide, j = column + simt_x() + c * kSimtSide;
        if (i >= n[2] || j >= n[3]) continue;
        const int64 at = to + i * p.dbias.strides.row + j * p.dbias.strides.column;
        if (adds_in_f64<kConfig.bias.type>(p, at, sums[r].x[c])) continue;
        const Real old =
            p.accumulate ? load_element<Real>(p.dbias.data, p.dbias.type, at) : Real(0);
        store_element(p.dbias.data, p.dbias.type, at, old + sums[r].x[c]);
      }
    }
  }
};

template <KernelConfig kConfig>
REGARD_DEVICE void bias_gradient_simt(const KernelParams& params) {
  const BiasTile<kConfig> tile(params);
  typename SimtTile<kConfig>::Square sums = {};
  tile.sum_pairs(params, sums);
  tile.sum_shared(sums);
  tile.store(sums);
}

}  // namespace regard
