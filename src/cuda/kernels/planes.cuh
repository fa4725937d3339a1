// q, k and v of f32 as pairs of f16 planes: see plan/plane_layout.h.
#pragma once

#include "cuda/kernels/tile/simt/simt_lines.cuh"
#include "plan/plane_layout.h"

namespace regard {

REGARD_DEVICE float power_of_two(int exponent) { return float_of(uint32(exponent + 127) << 23); }

// 2^s such that 2^s largest is in [2^14, 2^15), or as near as 2^s and 2^-s are normal numbers; and
// its factor, 2^-s, or 0 where there is nothing to multiply.
struct PlaneScale {
  float scale, factor;
};
REGARD_DEVICE PlaneScale plane_scale(float largest) {
  constexpr int kMost = 126;
  if (largest == 0) return {1, 0};
  const int exponent = smaller(127 + 14 - int(bits_of(largest) >> 23), kMost);
  return {power_of_two(exponent), power_of_two(-exponent)};
}

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
        const float a = x[turn][quad][2 * pair] * scale, b = x[turn][quad][2 * pair + 1] * scale;
        high.x[pair] = pack<F16>(a, b);
        low.x[pair] = pack<F16>(a - widen<F16>(uint16(high.x[pair])),
                                b - widen<F16>(uint16(high.x[pair] >> 16)));
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
REGARD_DEVICE void make_planes(const KernelParams& params, const BlockPlace& place) {
  constexpr bool kQueries = kRole == PlaneRole::query;
  constexpr int kColumns = kRole == PlaneRole::value ? kConfig.dim_v : kConfig.dim;
  using Unit = PlaneUnit<kConfig, kColumns>;
  const Problem& p = params.problem;
  const PlaneLayout layout = plane_layout(p, kConfig);
  const PlaneTensor& to = kQueries ? layout.q : kRole == PlaneRole::key ? layout.k : layout.v;
  const View& view = kQueries ? p.q : kRole == PlaneRole::key ? p.k : p.v;
  if (place.head >= p.sizes.batch * to.heads) return;
  const int64 b = place.head / to.heads, h = place.head % to.heads;
  const Sequence seq = safe_sequence(p, b);
  const int64 len = kQueries ? seq.len_q : seq.len_k, begin = kQueries ? seq.first_q : seq.first_k;
  const int64 first = int64(place.tile) * Unit::kRows;
  // A sequence without keys has one unit all the same: rows walk over a block of hidden ones.
  if (first >= larger<int64>(len, 1)) return;
  const int64 row =
      first_plane_row<int64>(p, b, begin, kQueries ? p.sizes.len_q : p.sizes.len_k, Unit::kRows) +
      first;
  auto* const planes =
      reinterpret_cast<uint16*>(params.buffers.planes + to.planes) + (h * to.rows + row) * kColumns;

  Unit unit;
  unit.load(view, offset_of(view.strides, b, h, begin, first), len - first,
            kRole == PlaneRole::value ? p.sizes.dim_v : p.sizes.dim);
  unit.find_largest();
  if constexpr (kQueries) {
    auto* const factors =
        reinterpret_cast<float*>(params.buffers.planes + layout.query_factors) + h * to.rows + row;
#pragma unroll
    for (int turn = 0; turn < Unit::kTurns; ++turn) {
      const PlaneScale own = plane_scale(unit.largest[turn]);
      unit.store(planes, to.elements(), turn, own.scale);
      if (lane_index() % Unit::kLanes == 0) factors[Unit::row_of(turn)] = own.factor;
    }
  } else {
    const PlaneScale common = plane_scale(unit.largest_of_unit());
#pragma unroll
    for (int turn = 0; turn < Unit::kTurns; ++turn) {
      unit.store(planes, to.elements(), turn, common.scale);
    }
    if (thread_index() == 0) {
      auto* const factors = reinterpret_cast<KeyFactors*>(params.buffers.planes);
      KeyFactors& of_unit = factors[(h * to.rows + row) / Unit::kRows];
      (kRole == PlaneRole::key ? of_unit.key : of_unit.value) = common.factor;
    }
  }
}

template <KernelConfig kConfig>
REGARD_DEVICE void planes(const KernelParams& params) {
  const BlockPlace place = place_of(params.grid, block_index());
  if (place.split == 0) {
    make_planes<kConfig, PlaneRole::query>(params, place);
  } else if (place.split == 1) {
    make_planes<kConfig, PlaneRole::key>(params, place);
  } else {
    make_planes<kConfig, PlaneRole::value>(params, place);
  }
}

}  // namespace regard
