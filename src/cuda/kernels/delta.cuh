// Computes what the backward pass needs of every query row, and clears what it adds to: sums,
// semaphores, and flags of keys.
#pragma once

#include "cuda/kernels/tile/row_products.cuh"
#include "cuda/kernels/tile/row_terms.cuh"

namespace regard {

template <KernelConfig kConfig>
REGARD_DEVICE void clear_dq_sums(const KernelParams& params) {
  const int64 packs = params.problem.sizes.heads_q * dq_rows(params.problem) * (kConfig.dim / 4);
  const int64 part = divide_up(packs, params.grid.blocks());
  const int64 begin = block_index() * part, end = smaller(begin + part, packs);
  auto* const sums = reinterpret_cast<Pack<float, 4>*>(params.buffers.dq_sums);
  for (int64 n = begin + thread_index(); n < end; n += kConfig.tiling.warps * 32) {
    store_pack(sums + n, Pack<float, 4>{});
  }
}

// Clears a part of the workspace, which has room for whole packs of 16 bytes.
template <KernelConfig kConfig>
REGARD_DEVICE void clear_part(const KernelParams& params, void* to, int64 bytes) {
  constexpr int kThreads = kConfig.tiling.warps * 32;
  const int64 packs = divide_up(bytes, 16);
#pragma unroll 1
  for (int64 n = block_index() * kThreads + thread_index(); n < packs;
       n += params.grid.blocks() * kThreads) {
    store_pack(static_cast<Pack<float, 4>*>(to) + n, Pack<float, 4>{});
  }
}

template <KernelConfig kConfig>
REGARD_DEVICE void clear_scratch(const KernelParams& params) {
  const Problem& p = params.problem;
  const CudaBuffers& buffers = params.buffers;
  if constexpr (kConfig.ordered_dq) {
    clear_part<kConfig>(params, buffers.dq_semaphores, dq_semaphore_bytes(p));
  }
  if constexpr (kConfig.flags_nonfinite) {
    clear_part<kConfig>(params, buffers.flags_k, key_flag_bytes(p));
  }
  if constexpr (kConfig.dbias.how != BiasGradient::none) {
    clear_part<kConfig>(params, buffers.dbias_sums, dbias_sums_bytes(p));
  }
  if constexpr (kConfig.wanted.dq) clear_dq_sums<kConfig>(params);
}

template <KernelConfig kConfig>
REGARD_DEVICE void delta(const KernelParams& params) {
  constexpr Type kType = kConfig.type;
  using Real = RealOf<kType>;
  constexpr int kElements = 16 / int(sizeof(typename ElementOf<kType>::Stored));
  constexpr int kLanes = lanes_of_row(kConfig.dim_v, kElements);
  constexpr int kStep = kConfig.tiling.warps * 32 / kLanes;  // rows that a block has under way
  constexpr int kRows = 2;                                   // of a thread at once
  // Each of the lanes that share rows finishes every kLanes-th of them.
  constexpr int kFinished = (kRows + kLanes - 1) / kLanes;
  const int lane = lane_index() % kLanes;
  const Problem& p = params.problem;
  const BlockCoords place = block_coords(params, block_index());
  const Divided at = divide(place.head, params.by.entry);
  const int64 b = at.quotient, h = at.rest;
  const Sequence seq = safe_sequence(p, b);
  const int64 first = int64(place.tile) * kConfig.tiling.rows;
  // Rows past the end of a sequence have a state too, if the buffer has room for it.
  const int64 end =
      smaller<int64>(first + kConfig.tiling.rows, p.packed ? seq.len_q : p.sizes.len_q);
  // Written out: as a call it takes registers on sm_120.
  const bool has_vectors = p.out.type == kType && p.dout.type == kType && is_aligned(p.out) &&
                           is_aligned(p.dout) && p.sizes.dim_v % kElements == 0;
  auto* const states = static_cast<RowState<Real>*>(params.buffers.row_states);

  for (int64 base = first; base < end; base += kRows * kStep) {
    const int64 i = base + thread_index() / kLanes;
    RowInputs<Real, kConfig.given_delta> inputs[kFinished];
#pragma unroll
    for (int n = 0; n < kFinished; ++n) {
      const int r = n * kLanes + lane;
      if (r < kRows) inputs[n].load(p, seq, b, h, i + r * kStep);
    }
    Real sums[kRows] = {};
    if constexpr (!kConfig.given_delta) {
      if (has_vectors) {
        multiply_vectors<kType, kLanes, kElements>(sums, p, seq, b, h, i, kStep);
      } else {
        multiply_any<kType, kLanes, kElements>(sums, p, seq, b, h, i, kStep);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) sums[r] = sum_of_lanes<kLanes>(sums[r]);
    }
#pragma unroll
    for (int n = 0; n < kFinished; ++n) {
      Real product = 0;
#pragma unroll
      for (int r = 0; r < kRows; ++r) product = r == n * kLanes + lane ? sums[r] : product;
      const int r = n * kLanes + lane;
      const int64 row = i + r * kStep;
      if (r >= kRows || row >= end) continue;
      const RowState<Real> state = inputs[n].state(product);
      states[h * p.sizes.rows_q + flat_row(p, seq, b, row)] = state;
      if constexpr (kConfig.row_terms.used) {
        store_row_terms<kConfig>(params, h * dq_rows(p) + first_dq_row(p, seq, b) + row, state);
      }
    }
  }
  // Last, because nothing waits for it.
  clear_scratch<kConfig>(params);
}

}  // namespace regard
