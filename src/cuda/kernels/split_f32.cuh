// q, k, v and dout of f32 as hi and lo parts of f16: see hi_lo_layout.h.
#pragma once

#include "cuda/kernels/tile/hi_lo.cuh"
#include "cuda/kernels/tile/simt/row_vectors.cuh"
#include "plan/cuda/kernel/hi_lo_layout.h"

namespace regard {

// The rows of one tensor that a block splits, in registers; half a warp has a row.
template <KernelConfig kConfig, int kColumns>
struct RowBlock {
  static constexpr int kRows = kConfig.tiling.keys, kLanes = 16;
  static constexpr int kStep = kConfig.tiling.warps * 32 / kLanes, kPasses = kRows / kStep;
  static constexpr int kQuads = (kColumns / 4 + kLanes - 1) / kLanes;  // 4 columns each, of a lane
  static_assert(kRows % kStep == 0);

  float x[kPasses][kQuads][4];
  float largest[kPasses];  // the largest finite magnitude of a row

  static REGARD_DEVICE int row_of(int pass) { return pass * kStep + thread_index() / kLanes; }
  static REGARD_DEVICE int column_of(int quad) {
    return (quad * kLanes + lane_index() % kLanes) * 4;
  }

  // Rows and columns that do not exist are 0.
  REGARD_DEVICE void load(const View& view, int64 at, int64 rows, int64 columns) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = row_of(pass);
      const int64 first = at + row * view.strides.row;
      largest[pass] = 0;
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        const int column = column_of(quad);
        load_vector<Type::f32>(x[pass][quad], view, first + column,
                               row < rows ? columns - column : 0, kConfig.aligned);
      }
    }
  }
  REGARD_DEVICE void find_largest() {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      float most = 0;
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float size = magnitude_of(x[pass][quad][e]);
          most = size < infinity<float>() ? max_of(most, size) : most;
        }
      }
      largest[pass] = max_of_lanes<kLanes>(most);
    }
  }
  // The largest magnitude in all rows of the block.
  REGARD_DEVICE float largest_of_block() const {
    float most = 0;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) most = max_of(most, largest[pass]);
    most = max_of_lanes<32>(most);
    float* const of_warps = &shared_memory<float>();
    if (lane_index() == 0) of_warps[warp_index()] = most;
    sync_block();
#pragma unroll
    for (int warp = 0; warp < kConfig.tiling.warps; ++warp) most = max_of(most, of_warps[warp]);
    return most;
  }
  // The rows of a pass, to element `to` on of the hi part; the lo part begins `lo` elements later.
  REGARD_DEVICE void store(uint16* to, int64 lo, int pass, float scale) const {
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const int column = column_of(quad);
      if (column >= kColumns) continue;
      Pack<uint32, 2> his, los;
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const HiLo both =
            split_hi_lo(x[pass][quad][2 * pair] * scale, x[pass][quad][2 * pair + 1] * scale);
        his.x[pair] = both.hi;
        los.x[pair] = both.lo;
      }
      uint16* const at = to + int64(row_of(pass)) * kColumns + column;
      *reinterpret_cast<Pack<uint32, 2>*>(at) = his;
      *reinterpret_cast<Pack<uint32, 2>*>(at + lo) = los;
    }
  }
};

enum class F32Input { query, key, value };

template <KernelConfig kConfig, F32Input kInput>
REGARD_DEVICE void split_forward_input(const KernelParams& params, const BlockCoords& coords) {
  constexpr bool kQueries = kInput == F32Input::query;
  constexpr int kColumns = kInput == F32Input::value ? kConfig.dim_v : kConfig.dim;
  using Rows = RowBlock<kConfig, kColumns>;
  const Problem& p = params.problem;
  const HiLoLayout layout = hi_lo_layout(p, kConfig);
  const HiLoTensor& to = kQueries ? layout.q : kInput == F32Input::key ? layout.k : layout.v;
  const View& view = kQueries ? p.q : kInput == F32Input::key ? p.k : p.v;
  if (coords.head >= p.sizes.batch * to.heads) return;
  const auto [b, h] = batch_head(coords.head, to.heads);
  const Sequence seq = safe_sequence(p, b);
  const int64 len = kQueries ? seq.len_q : seq.len_k, begin = kQueries ? seq.first_q : seq.first_k;
  const int64 first = int64(coords.tile) * Rows::kRows;
  // A sequence without keys has a block all the same, because the forward kernel's rows iterate
  // over one block of hidden keys.
  if (first >= larger<int64>(len, 1)) return;
  const int64 row =
      first_hi_lo_row<int64>(p, b, begin, kQueries ? p.sizes.len_q : p.sizes.len_k, Rows::kRows) +
      first;
  auto* const parts =
      reinterpret_cast<uint16*>(params.buffers.hi_lo + to.begin) + (h * to.rows + row) * kColumns;

  Rows rows;
  rows.load(view, offset_of(view.strides, b, h, begin, first), len - first,
            kInput == F32Input::value ? p.sizes.dim_v : p.sizes.dim);
  rows.find_largest();
  if constexpr (kQueries) {
    auto* const factors =
        reinterpret_cast<float*>(params.buffers.hi_lo + layout.query_factors) + h * to.rows + row;
#pragma unroll
    for (int pass = 0; pass < Rows::kPasses; ++pass) {
      const HiLoScale own = hi_lo_scale(rows.largest[pass]);
      rows.store(parts, to.elements(), pass, own.scale);
      if (lane_index() % Rows::kLanes == 0) factors[Rows::row_of(pass)] = own.factor;
    }
  } else {
    const HiLoScale common = hi_lo_scale(rows.largest_of_block());
#pragma unroll
    for (int pass = 0; pass < Rows::kPasses; ++pass) {
      rows.store(parts, to.elements(), pass, common.scale);
    }
    if (thread_index() == 0) {
      auto* const factors = reinterpret_cast<KeyFactors*>(params.buffers.hi_lo);
      KeyFactors& of_block = factors[(h * to.rows + row) / Rows::kRows];
      (kInput == F32Input::key ? of_block.key : of_block.value) = common.factor;
    }
  }
}

// ------------------------------------------------------------------------------ the backward pass

// Where a block's rows are in the input and in its parts.
struct InputRows {
  int64 b, h, first;  // of its sequence's rows
  int64 row;          // of the parts
  Sequence seq;
};

// k or v. Each key has its own scale, so that it does not affect its neighbours.
template <KernelConfig kConfig, F32Input kInput>
REGARD_DEVICE void split_keys(const KernelParams& params, const InputRows& at) {
  constexpr bool kKeys = kInput == F32Input::key;
  constexpr int kColumns = kKeys ? kConfig.dim : kConfig.dim_v;
  using Rows = RowBlock<kConfig, kColumns>;
  const Problem& p = params.problem;
  const HiLoLayout layout = hi_lo_layout(p, kConfig);
  const HiLoTensor& to = kKeys ? layout.k : layout.v;
  const View& view = kKeys ? p.k : p.v;
  const int64 first_row = at.h * to.rows + at.row;
  Rows rows;
  rows.load(view, offset_of(view.strides, at.b, at.h, at.seq.first_k, at.first),
            at.seq.len_k - at.first, kKeys ? p.sizes.dim : p.sizes.dim_v);
  rows.find_largest();
  auto* const parts =
      reinterpret_cast<uint16*>(params.buffers.hi_lo + to.begin) + first_row * kColumns;
  auto* const factors = reinterpret_cast<KeyFactors*>(params.buffers.hi_lo) + first_row;
#pragma unroll
  for (int pass = 0; pass < Rows::kPasses; ++pass) {
    const HiLoScale own = hi_lo_scale(rows.largest[pass]);
    rows.store(parts, to.elements(), pass, own.scale);
    if (lane_index() % Rows::kLanes != 0) continue;
    KeyFactors& of_key = factors[Rows::row_of(pass)];
    (kKeys ? of_key.key : of_key.value) = own.factor;
  }
}

// q, dout and the row terms. Clears the losses of dq.
template <KernelConfig kConfig>
REGARD_DEVICE void split_rows(const KernelParams& params, const InputRows& at) {
  using Queries = RowBlock<kConfig, kConfig.dim>;
  using Douts = RowBlock<kConfig, kConfig.dim_v>;
  constexpr int kPasses = Queries::kPasses;
  const Problem& p = params.problem;
  const HiLoLayout layout = hi_lo_layout(p, kConfig);
  const int64 first_row = at.h * layout.q.rows + at.row, left = at.seq.len_q - at.first;
  const auto parts_of_row = [&](const HiLoTensor& to) {
    return reinterpret_cast<uint16*>(params.buffers.hi_lo + to.begin) + first_row * to.columns;
  };
  float query_factors[kPasses];
  {
    Queries rows;
    rows.load(p.q, offset_of(p.q.strides, at.b, at.h, at.seq.first_q, at.first), left, p.sizes.dim);
    rows.find_largest();
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const HiLoScale own = hi_lo_scale(rows.largest[pass]);
      rows.store(parts_of_row(layout.q), layout.q.elements(), pass, own.scale);
      query_factors[pass] = own.factor;
    }
  }
  Douts rows;
  rows.load(p.dout, offset_of(p.dout.strides, at.b, at.h, at.seq.first_q, at.first), left,
            p.sizes.dim_v);
  rows.find_largest();
  auto* const terms = static_cast<HiLoRowTerm*>(params.buffers.row_terms) + first_row;
  const int64 of_delta = p.sizes.heads_q * layout.q.rows;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row = Queries::row_of(pass);
    RowState<float> state{infinity<float>(), 0};
    if (row < left) {
      state = static_cast<const RowState<float>*>(
          params.buffers
              .row_states)[at.h * p.sizes.rows_q + flat_row(p, at.seq, at.b, at.first + row)];
    }
    // dS is made in units of the row's factor of dO, and so is delta. A row whose dO is 0 may still
    // have a delta, which comes from dlse.
    const HiLoScale own = hi_lo_scale(rows.largest[pass]);
    rows.store(parts_of_row(layout.dout), layout.dout.elements(), pass, own.scale);
    const HiLoScale by = own.factor > 0 ? own : hi_lo_scale(magnitude_of(state.delta));
    if (lane_index() % Queries::kLanes != 0) continue;
    const uint32 factors = bits_of(query_factors[pass]) | bits_of(by.factor) >> 16;
    terms[row] = {state.lse, factors};
    terms[row + of_delta] = {state.delta * by.scale, factors};
    dq_losses(params)[first_row + row] = 0;
  }
}

template <KernelConfig kConfig>
REGARD_DEVICE void split_backward_inputs(const KernelParams& params, const BlockCoords& coords) {
  constexpr int kRows = kConfig.tiling.keys, kUnit = kHiLoBackwardUnit;
  const Problem& p = params.problem;
  const bool of_rows = coords.split == 0;
  const int64 heads = of_rows ? p.sizes.heads_q : p.sizes.heads_kv;
  if (coords.head >= p.sizes.batch * heads) return;
  const auto [b, h] = batch_head(coords.head, heads);
  InputRows at{b, h, int64(coords.tile) * kRows, 0, {}};
  at.seq = safe_sequence(p, at.b);
  if (at.first >= round_up(of_rows ? at.seq.len_q : at.seq.len_k, kUnit)) return;
  at.row = at.first + first_hi_lo_row<int64>(p, at.b, of_rows ? at.seq.first_q : at.seq.first_k,
                                             of_rows ? p.sizes.len_q : p.sizes.len_k, kUnit);
  if (coords.split == 0) {
    split_rows<kConfig>(params, at);
  } else if (coords.split == 1) {
    split_keys<kConfig, F32Input::key>(params, at);
  } else {
    split_keys<kConfig, F32Input::value>(params, at);
  }
}

// ------------------------------------------------------------------------------------- the kernel

template <KernelConfig kConfig>
REGARD_DEVICE void split_f32(const KernelParams& params) {
  const BlockCoords coords = block_coords(params, block_index());
  if constexpr (kConfig.row_terms.used) {
    split_backward_inputs<kConfig>(params, coords);
    return;
  }
  if (coords.split == 0) {
    split_forward_input<kConfig, F32Input::query>(params, coords);
  } else if (coords.split == 1) {
    split_forward_input<kConfig, F32Input::key>(params, coords);
  } else {
    split_forward_input<kConfig, F32Input::value>(params, coords);
  }
}

}  // namespace regard
