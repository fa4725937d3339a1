// Forward: what rows have before their first key, and out and lse after their last one.
#pragma once

#include "cpu/kernels/running.hpp"
#include "cpu/kernels/transposed.hpp"
#include "semantics/score.h"
#include "semantics/softmax.h"

namespace regard {
namespace {

template <class L>
struct RunningRows {
  using Real = typename L::Real;
  using Vec = typename L::Vec;
  static constexpr int kWidth = L::kLanes * L::kVectors;

  const Problem& p;
  const HeadContext& context;
  const HeadSizes dims;
  const Real unit;  // of every logit

  // The running state before the first key, except out. A sink counts once, in the first chunk of
  // keys.
  void begin(const Running<L>& run, const Panel& panel, bool with_sink) const {
    for (int v = 0; v < vectors_of<L>(panel); ++v) run.set_row(v, empty_softmax<L>());
    if (!p.features.sink || !with_sink) return;
    for (int lane = 0; lane < panel.rows; ++lane) {
      const float sink = sink_of(panel, lane);
      if (sink == -__builtin_huge_valf()) continue;
      run.max[lane] = value_of_sink(sink, unit);
      run.sum[lane] = sink - sink == 0 ? Real(1) : Real(__builtin_nan(""));
    }
  }

  // Out of rows that no product was added to.
  void clear_out(const Running<L>& run, const Panel& panel) const {
    for (int v = 0; v < vectors_of<L>(panel); ++v) {
      Real* const out = run.out + v * L::kLanes;
      for (int64 d = 0; d < dims.dim_v; ++d) L::store(out + d * kWidth, L::set(0));
    }
  }

  float sink_of(const Panel& panel, int lane) const {
    return static_cast<const float*>(p.sink.data)[panel.head[lane] * p.sink.strides.head];
  }

  bool are_finite(const Running<L>& run, const Panel& panel) const {
    if (nonfinite_lanes<L>(run.out, panel, dims.dim_v) != 0) return false;
    for (int lane = 0; lane < panel.rows; ++lane) {
      if (run.sum[lane] - run.sum[lane] != 0) return false;
    }
    return true;
  }

  // Merges rows into what out and lse hold: makes `held` the factors of out, and `factor` and `lse`
  // those of the merged rows. Returns the lanes that saw no key and leave theirs as they are.
  uint64 continue_rows(const Panel& panel, Real* held, Real* factor, Real* lse) const {
    Real given[kWidth] = {};
    uint64 unchanged = 0;
    for (int lane = 0; lane < panel.rows; ++lane) {
      given[lane] = static_cast<const Real*>(p.lse.data)[context.offset_q(p.lse, panel, lane)];
      unchanged |= uint64(leaves_as_given(given[lane], lse[lane])) << lane;
    }
    for (int v = 0; v < vectors_of<L>(panel); ++v) {
      const int lane = v * L::kLanes;
      const auto merged = continuation<L>(L::load(given + lane), L::load(lse + lane));
      L::store(held + lane, merged.given);
      L::store(factor + lane, L::mul(L::load(factor + lane), merged.own));
      L::store(lse + lane, merged.lse);
    }
    return unchanged;
  }

  void finish(const Running<L>& run, const Panel& panel, uint8* nonfinite) const {
    Real factor[kWidth], lse[kWidth + L::kLanes] = {};
    const Real keep = Real(keep_scale(p.dropout));
    for (int v = 0; v < vectors_of<L>(panel); ++v) {
      SoftmaxRow<L> row = run.row(v);
      L::store(factor + v * L::kLanes, L::mul(normaliser<L>(row), L::set(keep)));
      // Lanes that are not in use have no sum, whose logarithm would be slow.
      const uint64 used = ((uint64(1) << panel.rows) - 1) >> (v * L::kLanes);
      row.sum = L::select(L::mask_of(used), row.sum, L::set(1));
      L::store(lse + v * L::kLanes, lse_of<L>(row, L::set(unit)));
    }
    for (int lane = 0; p.features.sink && lane < panel.rows; ++lane) {
      // If no key joined the sink, the lse is the sink, to the last bit.
      const float sink = sink_of(panel, lane);
      if (run.sum[lane] == 1 && run.max[lane] == value_of_sink(sink, unit)) lse[lane] = sink;
    }
    const uint64 bad = nonfinite ? nonfinite_lanes<L>(run.out, panel, dims.dim_v) : 0;
    uint64 flagged = 0;
    for (int lane = 0; nonfinite && lane < panel.rows; ++lane) {
      // A NaN lse comes from the row's own pairs; NaN from hidden places does not reach it.
      const bool flag = (bad >> lane & 1) && lse[lane] == lse[lane];
      nonfinite[panel.first + lane] = flag;
      flagged |= uint64(flag) << lane;
    }
    Real held[kWidth];
    // The fix-up pass merges flagged rows into what out and lse hold.
    const uint64 skip = p.continues ? continue_rows(panel, held, factor, lse) | flagged : 0;
    store_lanes<L>(run.out, factor, context, panel, p.out, dims.dim_v, p.continues ? held : nullptr,
                   skip);
    if (p.lse.given()) store_lse(lse, panel, skip);
  }

  // lse[panel], and as much memory as a vector behind it. Lanes in `skip` are left as they are.
  void store_lse(const Real* lse, const Panel& panel, uint64 skip) const {
    const int64 width = p.lse.strides.row == 1 && skip == 0 ? L::kLanes : 1;
    each_head(panel, [&](int64, int first, int end) {
      for (int lane = first; lane < end; lane += int(width)) {
        if (skip >> lane & 1) continue;
        L::store_as(p.lse.type, p.lse.data, context.offset_q(p.lse, panel, lane),
                    smaller<int64>(width, end - lane), L::load(lse + lane));
      }
    });
  }
};

}  // namespace
}  // namespace regard
