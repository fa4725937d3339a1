// dsink of one head: minus the sum over its rows of exp(sink - lse) delta, in a fixed order.
#pragma once

#include "cuda/kernels/element.cuh"
#include "cuda/kernels/params.h"
#include "plan/cuda/kernel/kernel_config.h"
#include "semantics/softmax.h"

namespace regard {

// Compensated summation (Kahan, 1965).
template <class Real>
struct CompensatedSum {
  Real sum = 0;
  Real lost = 0;

  REGARD_DEVICE void add(Real x) {
    const Real term = x - lost, total = sum + term;
    lost = total - total == 0 ? (total - sum) - term : 0;  // an infinite sum stays infinite
    sum = total;
  }
};

template <KernelConfig kConfig>
REGARD_DEVICE void sink_gradient(const KernelParams& params) {
  using Real = RealOf<kConfig.type>;
  constexpr int kThreads = kConfig.tiling.warps * 32;
  const Problem& p = params.problem;
  const int64 h = block_coords(params, block_index()).head;
  const float sink = static_cast<const float*>(p.sink.data)[h * p.sink.strides.head];
  CompensatedSum<Real> sum;
  for (int64 b = 0; b < p.sizes.batch && sink != -infinity<float>(); ++b) {
    const Sequence seq = safe_sequence(p, b);
    const auto* const states = static_cast<const RowState<Real>*>(params.buffers.row_states) +
                               h * p.sizes.rows_q + flat_row(p, seq, b, 0);
#pragma unroll 4
    for (int64 i = thread_index(); i < seq.len_q; i += kThreads) {
      const RowState<Real> row = states[i];
      sum.add(-exp2_of((Real(sink) - row.lse) * Real(kLog2E)) * row.delta);
    }
  }
  double* const sums = &shared_memory<double>();
  sums[thread_index()] = double(sum.sum) - double(sum.lost);
#pragma unroll 1
  for (int half = kThreads / 2; half > 0; half /= 2) {
    sync_block();
    if (thread_index() < half) sums[thread_index()] += sums[thread_index() + half];
  }
  if (thread_index() != 0) return;
  float* const to = static_cast<float*>(p.dsink.data) + h * p.dsink.strides.head;
  *to = float(sums[0] + (p.accumulate ? double(*to) : 0.0));
}

}  // namespace regard
