// The result of a row from parts, each over some of its keys.
#pragma once

#include "cuda/kernels/tile/row_part.cuh"
#include "cuda/kernels/tile/simt/row_vectors.cuh"
#include "plan/cuda/kernel/simt_layout.h"
#include "semantics/softmax.h"

namespace regard {

// kLanes neighbouring threads of a warp share a row; all take part. All parts are seen before any
// is added.
template <KernelConfig kConfig>
struct MergedRow {
  static constexpr int kElements = 4;  // of a thread, at once
  static constexpr int kLanes = lanes_of_row(kConfig.dim_v, kElements);

  const KernelParams& params;
  const Problem& p;
  const Sequence seq;
  const int64 b, h, i;
  const bool exists;  // whether the results are wanted
  const int lane = lane_index() % kLanes;
  const int64 row_index = h * p.sizes.rows_q + flat_row(p, seq, b, i);
  float largest = -infinity<float>();
  float total = 0;
  float nonfinite = 0;

  REGARD_DEVICE MergedRow(const KernelParams& kernel_params, const Sequence& sequence, int64 batch,
                          int64 head, int64 row, bool row_exists)
      : params(kernel_params),
        p(kernel_params.problem),
        seq(sequence),
        b(batch),
        h(head),
        i(row),
        exists(row_exists) {}

  REGARD_DEVICE float base() const { return largest == -infinity<float>() ? 0 : largest; }
  REGARD_DEVICE float weight_of(float reference) const { return exp2_of(reference - base()); }

  REGARD_DEVICE void see(float reference) { largest = max_of(largest, reference); }
  // A part of -inf adds nothing, unless its scores were NaN.
  REGARD_DEVICE void add(const RowPart& part) {
    total = fma_of(part.sum, weight_of(part.reference), total);
  }

  // -------------------------------------------------------------------------------- the whole row

  REGARD_DEVICE float sink() const {
    if constexpr (!kConfig.features.sink) return -infinity<float>();
    return static_cast<const float*>(p.sink.data)[h * p.sink.strides.head];
  }
  REGARD_DEVICE void see_sink() { see(sink() * float(kLog2E)); }
  // Not finite unless the sink is; a sink of -inf adds nothing.
  REGARD_DEVICE void add_sink() {
    const float value = sink();
    if (value == -infinity<float>()) return;
    total += weight_of(value * float(kLog2E)) + (value - value);
  }
  REGARD_DEVICE float factor() const {
    float kept = 1;
    if constexpr (kConfig.features.dropout) kept = float(keep_scale(p.dropout));
    return total == 0 ? 0.0f : kept / total;
  }

  // The weighted sums of columns [d, d + kElements), as out.
  REGARD_DEVICE void write_columns(int64 d, float (&sums)[kElements]) {
    const float by = factor();
    const bool aligned = is_aligned(p.out);
#pragma unroll
    for (int n = 0; n < kElements; ++n) sums[n] *= by;
    nonfinite += zero_if_finite(sums);
    if (!exists) return;
    const int64 to = offset_of(p.out.strides, b, h, seq.first_q, i) + d;
    with_type<kConfig.type>(p.out.type, [&](auto type) {
      store_vector<decltype(type)::kElement>(p.out, to, p.sizes.dim_v - d, aligned, sums);
    });
  }
  // A continued call: all columns of a row, the lanes' kElements after one another, merged with
  // what out and lse hold; and the flag. The fix-up pass merges a flagged row.
  template <int kParts>
  REGARD_DEVICE void write_continued(float (&sums)[kParts][kElements]) {
    const float by = factor(), own = lse();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int n = 0; n < kElements; ++n) sums[part][n] *= by;
      nonfinite += zero_if_finite(sums[part]);
    }
    const bool flagged = kConfig.flags_nonfinite && sum_of_lanes<kLanes>(nonfinite) != 0;
    float& at = static_cast<float*>(p.lse.data)[offset_of(p.lse.strides, b, h, seq.first_q, i)];
    const float given = at;
    sync_warp();  // the lanes of a row have read its lse
    if (!exists) return;
    if constexpr (kConfig.flags_nonfinite) {
      if (lane == 0) write_row_flag(params, row_index, flagged);
    }
    if (flagged || leaves_as_given(given, own)) return;
    const auto merged = continuation<GpuLanes<float>>(given, own);
    const int64 row = offset_of(p.out.strides, b, h, seq.first_q, i);
    const bool aligned = is_aligned(p.out);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int64 d = (part * kLanes + lane) * kElements;
      if (d >= p.sizes.dim_v) continue;
      float x[kElements] = {};
      if (merged.given != 0) {
        load_vector<Type::f32>(x, p.out, row + d, p.sizes.dim_v - d, aligned);
      }
#pragma unroll
      for (int n = 0; n < kElements; ++n) {
        x[n] = fma_of(x[n], merged.given, sums[part][n] * merged.own);
      }
      store_vector<Type::f32>(p.out, row + d, p.sizes.dim_v - d, aligned, x);
    }
    if (lane == 0) at = merged.lse;
  }
  REGARD_DEVICE float lse() const {
    // Where nothing joined the sink, the lse is the sink, to the last bit.
    const bool alone = kConfig.features.sink && total == 1 && largest == sink() * float(kLog2E);
    return alone ? sink() : (largest + log2_of(total)) * float(kLn2);
  }

  // Writes lse and flag, after the columns.
  REGARD_DEVICE void write_end() {
    if constexpr (kConfig.flags_nonfinite) {
      nonfinite = sum_of_lanes<kLanes>(nonfinite);
      if (lane == 0 && exists) write_row_flag(params, row_index, nonfinite != 0);
    }
    if (lane != 0 || !exists || !p.lse.given()) return;
    static_cast<float*>(p.lse.data)[offset_of(p.lse.strides, b, h, seq.first_q, i)] = lse();
  }
};

}  // namespace regard
