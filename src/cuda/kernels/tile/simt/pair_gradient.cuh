// The gradients of one visible pair of a query and a key.
#pragma once

#include "cuda/kernels/tile/simt/simt_pairs.cuh"

namespace regard {

// What the backward pass needs of a row. It reads the lse itself: lse * log2(e), which the row
// states hold, is rounded once more.
template <class Real>
struct SimtRowState {
  Real lse = infinity<Real>();
  Real delta = 0;
};

// The gradients of one pair.
template <class Real>
struct PairGradient {
  Real kept_weight;  // Z P
  Real dscore;       // ds before the softcap: what the bias receives
  Real dproduct;     // ds
};

// From q . k and dout . v of a visible pair.
template <KernelConfig kConfig>
REGARD_DEVICE PairGradient<RealOf<kConfig.type>> pair_gradient(
    const SimtHead<kConfig>& head, const SimtRowState<RealOf<kConfig.type>>& row,
    RealOf<kConfig.type> raw, RealOf<kConfig.type> dweight, RealOf<kConfig.type> bias, int i, int j,
    DropoutCall<kConfig>& dropout) {
  using Real = RealOf<kConfig.type>;
  using Lanes = GpuLanes<Real>;
  const Real logit = head.logit(raw, bias, i, j);
  const Real weight =
      exp2_of(fma_of(logit, logit_unit(head.kOn, head.params), -row.lse) * Real(kLog2E));
  Real kept_weight = weight;
  if constexpr (kConfig.features.dropout) {
    const bool kept = dropout.keep(head, i, j);
    const Real scale = Real(keep_scale(head.p.dropout));
    kept_weight = weight * (kept ? scale : Real(0));
    dweight = kept ? dweight * scale : Real(0);
  }
  const Real dscore = weight * (dweight - row.delta);
  return {kept_weight, dscore, dscore * score_slope<Lanes>(head.kOn, head.params, raw)};
}

}  // namespace regard
