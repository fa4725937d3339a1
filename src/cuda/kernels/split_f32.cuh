// q, k, v and dout of f32 as pairs of f16 planes: see plan/hi_lo_layout.h.
#pragma once

#include "cuda/kernels/tile/hi_lo.cuh"
#include "cuda/kernels/tile/simt/simt_lines.cuh"
#include "plan/cuda/kernel/hi_lo_layout.h"

namespace regard {

// A block's unit of rows of one tensor; half a warp has a row.
template <KernelConfig kConfig, int kColumns>
struct PlaneUnit {
  static constexpr int kRows = kConfig.tiling.keys, kLanes = 16;
  static constexpr int kStep = kConfig.tiling.warps * 32 / kLanes, kTurns = kRows / kStep;
  static constexpr int kQuads = (kColumns / 4 + kLanes - 1) / kLanes;  // of a lane, in a row
  static_assert(kRows % kStep == 0);

  float x[kTurns][kQuads][4];
  float largest[kTurns];  // finite magnitude of a row

  static REGARD_DEVICE int row_of(int turn) { return turn * kStep + thread_index() / kLanes; }
  static REGARD_DEVICE int column_of(int quad) {
    return (quad * kLanes + lane_index() % kLanes) * 4;
  }

  // Rows and columns that do not exist are 0.
  REGARD_DEVICE void load(const View& view, int64 at, int64 rows, int64 columns) {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int row = row_of(turn);
      const int64 first = at + row * view.strides.row;
      largest[turn] = 0;
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        const int column = column_of(quad);
        load_line<Type::f32>(x[turn][quad], view, first + column, row < rows ? columns - column : 0,
                             kConfig.aligned);
      }
    }
  }
  REGARD_DEVICE void find_largest() {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      float most = 0;
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float size = magnitude_of(x[turn][quad][e]);
          most = size < infinity<float>() ? max_of(most, size) : most;
        }
      }
      largest[turn] = max_of_lanes<kLanes>(most);
    }
  }
  // Over the block.
  REGARD_DEVICE float largest_of_unit() const {
    float most = 0;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) most = max_of(most, largest[turn]);
    most = max_of_lanes<32>(most);
    float* const of_warps = &shared_memory<float>();
    if (lane_index() == 0) of_warps[warp_index()] = most;
    sync_block();
#pragma unroll
    for (int warp = 0; warp < kConfig.tiling.warps; ++warp) most = max_of(most, of_warps[warp]);
    return most;
  }
  // A turn's rows, to both planes from element `to` on.
  REGARD_DEVICE void store(uint16* to, int64 plane, int turn, float scale) const {
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const int column = column_of(quad);
      if (column >= kColumns) continue;
      Pack<uint32, 2> high, low;
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const HiLo both =
            split_hi_lo(x[turn][quad][2 * pair] * scale, x[turn][quad][2 * pair + 1] * scale);
        high.x[pair] = both.hi;
        low.x[pair] = both.lo;
      }
      uint16* const at = to + int64(row_of(turn)) * kColumns + column;
      *reinterpret_cast<Pack<uint32, 2>*>(at) = high;
      *reinterpret_cast<Pack<uint32, 2>*>(at + plane) = low;
    }
  }
};

// Of a tensor: q, whose rows have factors of their own, k, or v.
enum class PlaneRole { query, key, value };

template <KernelConfig kConfig, PlaneRole kRole>
REGARD_DEVICE void make_planes(const KernelParams& params, const BlockCoords& place) {
  constexpr bool kQueries = kRole == PlaneRole::query;
  constexpr int kColumns = kRole == PlaneRole::value ? kConfig.dim_v : kConfig.dim;
  using Unit = PlaneUnit<kConfig, kColumns>;
  const Problem& p = params.problem;
  const HiLoLayout layout = hi_lo_layout(p, kConfig);
  const HiLoTensor& to = kQueries ? layout.q : kRole == PlaneRole::key ? layout.k : layout.v;
  const View& view = kQueries ? p.q : kRole == PlaneRole::key ? p.k : p.v;
  if (place.head >= p.sizes.batch * to.heads) return;
  const int64 b = place.head / to.heads, h = place.head % to.heads;
  const Sequence seq = safe_sequence(p, b);
  const int64 len = kQueries ? seq.len_q : seq.len_k, begin = kQueries ? seq.first_q : seq.first_k;
  const int64 first = int64(place.tile) * Unit::kRows;
  // A sequence without keys has one unit all the same: rows walk over a block of hidden ones.
  if (first >= larger<int64>(len, 1)) return;
  const int64 row =
      first_hi_lo_row<int64>(p, b, begin, kQueries ? p.sizes.len_q : p.sizes.len_k, Unit::kRows) +
      first;
  auto* const planes =
      reinterpret_cast<uint16*>(params.buffers.hi_lo + to.begin) + (h * to.rows + row) * kColumns;

  Unit unit;
  unit.load(view, offset_of(view.strides, b, h, begin, first), len - first,
            kRole == PlaneRole::value ? p.sizes.dim_v : p.sizes.dim);
  unit.find_largest();
  if constexpr (kQueries) {
    auto* const factors =
        reinterpret_cast<float*>(params.buffers.hi_lo + layout.query_factors) + h * to.rows + row;
#pragma unroll
    for (int turn = 0; turn < Unit::kTurns; ++turn) {
      const HiLoScale own = hi_lo_scale(unit.largest[turn]);
      unit.store(planes, to.elements(), turn, own.scale);
      if (lane_index() % Unit::kLanes == 0) factors[Unit::row_of(turn)] = own.factor;
    }
  } else {
    const HiLoScale common = hi_lo_scale(unit.largest_of_unit());
#pragma unroll
    for (int turn = 0; turn < Unit::kTurns; ++turn) {
      unit.store(planes, to.elements(), turn, common.scale);
    }
    if (thread_index() == 0) {
      auto* const factors = reinterpret_cast<KeyFactors*>(params.buffers.hi_lo);
      KeyFactors& of_unit = factors[(h * to.rows + row) / Unit::kRows];
      (kRole == PlaneRole::key ? of_unit.key : of_unit.value) = common.factor;
    }
  }
}

// ------------------------------------------------------------------------------ the backward pass

// The place of a block's rows in the planes of a tensor.
struct PlanePlace {
  int64 b, h, first;  // of its sequence's rows
  int64 row;          // of the planes
  Sequence seq;
};

// A key's own factors, so that no key is felt by its neighbours.
template <KernelConfig kConfig, PlaneRole kRole>
REGARD_DEVICE void make_key_planes(const KernelParams& params, const PlanePlace& at) {
  constexpr bool kKeys = kRole == PlaneRole::key;
  constexpr int kColumns = kKeys ? kConfig.dim : kConfig.dim_v;
  using Unit = PlaneUnit<kConfig, kColumns>;
  const Problem& p = params.problem;
  const HiLoLayout layout = hi_lo_layout(p, kConfig);
  const HiLoTensor& to = kKeys ? layout.k : layout.v;
  const View& view = kKeys ? p.k : p.v;
  const int64 line = at.h * to.rows + at.row;
  Unit unit;
  unit.load(view, offset_of(view.strides, at.b, at.h, at.seq.first_k, at.first),
            at.seq.len_k - at.first, kKeys ? p.sizes.dim : p.sizes.dim_v);
  unit.find_largest();
  auto* const planes = reinterpret_cast<uint16*>(params.buffers.hi_lo + to.begin) + line * kColumns;
  auto* const factors = reinterpret_cast<KeyFactors*>(params.buffers.hi_lo) + line;
#pragma unroll
  for (int turn = 0; turn < Unit::kTurns; ++turn) {
    const HiLoScale own = hi_lo_scale(unit.largest[turn]);
    unit.store(planes, to.elements(), turn, own.scale);
    if (lane_index() % Unit::kLanes != 0) continue;
    KeyFactors& of_key = factors[Unit::row_of(turn)];
    (kKeys ? of_key.key : of_key.value) = own.factor;
  }
}

// q, dout and the row terms; what dq may lose is cleared.
template <KernelConfig kConfig>
REGARD_DEVICE void make_row_planes(const KernelParams& params, const PlanePlace& at) {
  using Queries = PlaneUnit<kConfig, kConfig.dim>;
  using Douts = PlaneUnit<kConfig, kConfig.dim_v>;
  constexpr int kTurns = Queries::kTurns;
  const Problem& p = params.problem;
  const HiLoLayout layout = hi_lo_layout(p, kConfig);
  const int64 line = at.h * layout.q.rows + at.row, left = at.seq.len_q - at.first;
  const auto planes_of_row = [&](const HiLoTensor& to) {
    return reinterpret_cast<uint16*>(params.buffers.hi_lo + to.begin) + line * to.columns;
  };
  float query_factors[kTurns];
  {
    Queries unit;
    unit.load(p.q, offset_of(p.q.strides, at.b, at.h, at.seq.first_q, at.first), left, p.sizes.dim);
    unit.find_largest();
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const HiLoScale own = hi_lo_scale(unit.largest[turn]);
      unit.store(planes_of_row(layout.q), layout.q.elements(), turn, own.scale);
      query_factors[turn] = own.factor;
    }
  }
  Douts unit;
  unit.load(p.dout, offset_of(p.dout.strides, at.b, at.h, at.seq.first_q, at.first), left,
            p.sizes.dim_v);
  unit.find_largest();
  auto* const terms = static_cast<HiLoRowTerm*>(params.buffers.row_terms) + line;
  const int64 of_delta = p.sizes.heads_q * layout.q.rows;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int row = Queries::row_of(turn);
    RowState<float> state{infinity<float>(), 0};
    if (row < left) {
      state = static_cast<const RowState<float>*>(
          params.buffers
              .row_states)[at.h * p.sizes.rows_q + flat_row(p, at.seq, at.b, at.first + row)];
    }
    // Gradients of scores are made in units of the row's factor, delta among them: what there is
    // without dout is dlse.
    const HiLoScale own = hi_lo_scale(unit.largest[turn]);
    unit.store(planes_of_row(layout.dout), layout.dout.elements(), turn, own.scale);
    const HiLoScale by = own.factor > 0 ? own : hi_lo_scale(magnitude_of(state.delta));
    if (lane_index() % Queries::kLanes != 0) continue;
    const uint32 factors = bits_of(query_factors[turn]) | bits_of(by.factor) >> 16;
    terms[row] = {state.lse, factors};
    terms[row + of_delta] = {state.delta * by.scale, factors};
    dq_losses(params)[line + row] = 0;
  }
}

template <KernelConfig kConfig>
REGARD_DEVICE void gradient_planes(const KernelParams& params, const BlockCoords& place) {
  constexpr int kRows = kConfig.tiling.keys, kUnit = kHiLoBackwardUnit;
  const Problem& p = params.problem;
  const bool of_rows = place.split == 0;
  const int64 heads = of_rows ? p.sizes.heads_q : p.sizes.heads_kv;
  if (place.head >= p.sizes.batch * heads) return;
  PlanePlace at{place.head / heads, place.head % heads, int64(place.tile) * kRows, 0, {}};
  at.seq = safe_sequence(p, at.b);
  if (at.first >= round_up(of_rows ? at.seq.len_q : at.seq.len_k, kUnit)) return;
  at.row = at.first + first_hi_lo_row<int64>(p, at.b, of_rows ? at.seq.first_q : at.seq.first_k,
                                             of_rows ? p.sizes.len_q : p.sizes.len_k, kUnit);
  if (place.split == 0) {
    make_row_planes<kConfig>(params, at);
  } else if (place.split == 1) {
    make_key_planes<kConfig, PlaneRole::key>(params, at);
  } else {
    make_key_planes<kConfig, PlaneRole::value>(params, at);
  }
}

// ------------------------------------------------------------------------------------- the kernel

template <KernelConfig kConfig>
REGARD_DEVICE void split_f32(const KernelParams& params) {
  const BlockCoords place = block_coords(params.grid, block_index());
  if constexpr (kConfig.row_terms.used) {
    gradient_planes<kConfig>(params, place);
    return;
  }
  if (place.split == 0) {
    make_planes<kConfig, PlaneRole::query>(params, place);
  } else if (place.split == 1) {
    make_planes<kConfig, PlaneRole::key>(params, place);
  } else {
    make_planes<kConfig, PlaneRole::value>(params, place);
  }
}

}  // namespace regard
