// Out and lse from the partial results of a forward pass whose keys were split over blocks.
//
// Part s of a row holds a reference r_s and, relative to it, the sum of its weights and the sum of
// its weighted values: sum_s = sum over its keys of 2^(x - r_s), with x the logit times log2(e).
// A part that saw no key has the reference -inf; its values are not read.
#pragma once

#include "cuda/kernels/tile/simt_lines.cuh"
#include "semantics/softmax.h"

namespace regard {

// The reference and sum of one part of a row.
struct RowPart {
  float reference;
  float sum;
};

template <KernelConfig kConfig>
REGARD_DEVICE void combine(const KernelParams& params) {
  constexpr int kElements = 4;
  constexpr int kLanes = lanes_of_row(kConfig.dim_v, kElements);
  constexpr int kRows = kConfig.tiling.warps * 32 / kLanes;  // of a block
  static_assert(kConfig.tiling.rows == kRows);
  const Problem& p = params.problem;
  const BlockPlace place = place_of(params.grid, block_index());
  const int64 heads = p.sizes.heads_q, b = place.head / heads, h = place.head % heads;
  const Sequence seq = safe_sequence(p, b);
  const int64 first = int64(place.tile) * kRows;
  if (first >= seq.len_q) return;
  // Threads past the last row do its work too, and write nothing.
  const int64 i = smaller(first + thread_index() / kLanes, seq.len_q - 1);
  const bool exists = first + thread_index() / kLanes < seq.len_q;
  const int lane = lane_index() % kLanes;
  const int64 row = h * p.sizes.rows_q + flat_row(p, seq, b, i), rows = heads * p.sizes.rows_q;
  const auto* const parts = reinterpret_cast<const RowPart*>(params.buffers.partial_rows) + row;

  float sink = -infinity<float>();
  if constexpr (kConfig.features.sink) {
    sink = static_cast<const float*>(p.sink.data)[h * p.sink.strides.head];
  }
  const float sink_reference = sink * float(kLog2E);
  float largest = sink_reference;
  for (int s = lane; s < params.splits; s += kLanes) {
    largest = max_of(largest, parts[s * rows].reference);
  }
  largest = max_of_lanes<kLanes>(largest);
  const float base = largest == -infinity<float>() ? 0 : largest;
  float total = 0;
  for (int s = lane; s < params.splits; s += kLanes) {
    const RowPart part = parts[s * rows];
    if (part.reference == -infinity<float>()) continue;
    total = fma_of(part.sum, exp2_of(part.reference - base), total);
  }
  total = sum_of_lanes<kLanes>(total);
  // Not finite unless the sink is; nothing from one of -inf.
  if (sink != -infinity<float>()) total += exp2_of(sink_reference - base) + (sink - sink);
  const float factor = total == 0 ? 0.0f : float(keep_scale(p.dropout)) / total;

  const int64 out = offset_of(p.out.strides, b, h, seq.first_q, i), dim = p.sizes.dim_v;
  const View partial{
      .data = params.buffers.partial_out, .type = Type::f32, .strides = {.row = dim}};
  const bool dense = dim % kElements == 0, aligned = is_aligned(p.out);
  float spoiled = 0;
  for (int64 d = lane * kElements; d < dim; d += kLanes * kElements) {
    float sums[kElements] = {};
#pragma unroll 4
    for (int s = 0; s < params.splits; ++s) {
      const float reference = parts[s * rows].reference;
      if (reference == -infinity<float>()) continue;
      const float weight = exp2_of(reference - base);
      float x[kElements];
      load_line<Type::f32>(x, partial, (s * rows + row) * dim + d, dim - d, dense);
#pragma unroll
      for (int n = 0; n < kElements; ++n) sums[n] = fma_of(x[n], weight, sums[n]);
    }
#pragma unroll
    for (int n = 0; n < kElements; ++n) sums[n] *= factor;
    spoiled += zero_if_finite(sums);
    if (!exists) continue;
    with_type<kConfig.type>(p.out.type, [&](auto type) {
      store_line<decltype(type)::kElement>(p.out, out + d, dim - d, aligned, sums);
    });
  }
  if constexpr (kConfig.marks) {
    spoiled = sum_of_lanes<kLanes>(spoiled);
    if (lane == 0 && exists && spoiled != 0) mark_row(params.buffers, row);
  }
  if (lane != 0 || !exists || !p.lse.given()) return;
  // Where nothing joined the sink, the lse is the sink, to the last bit.
  const bool alone = kConfig.features.sink && total == 1 && largest == sink_reference;
  static_cast<float*>(p.lse.data)[offset_of(p.lse.strides, b, h, seq.first_q, i)] =
      alone ? sink : (largest + log2_of(total)) * float(kLn2);
}

}  // namespace regard
