// The elementwise terms of a tile of scores, between the product q . k and the softmax.
#pragma once

#include "cuda/kernels/params.h"
#include "cuda/kernels/tile/copy.cuh"
#include "cuda/kernels/tile/dropout_of.cuh"
#include "cuda/kernels/tile/intervals.cuh"
#include "plan/cuda/kernel/kernel_config.h"
#include "semantics/score.h"
#include "semantics/softmax.h"

namespace regard {

// Elementwise maths of the mma and wgmma kernels: one instruction for an exponential, two for tanh
// if q's type rounds more than they do.
template <Type kType>
struct MmaLanes : GpuLanes<float> {
  static REGARD_DEVICE float exp2(float x) { return ex2_approx(x); }
  static REGARD_DEVICE float tanh(float x) {
    if constexpr (kType == Type::f32) return tanh_of(x);
    return 1 - 2 * rcp_approx(ex2_approx(x * float(2 * kLog2E)) + 1);
  }
};

// Whether a half of the word is a 16-bit bias that hides its pair (-inf), that score() raises
// (below kLowestBias), or a NaN with a sign. As unsigned numbers, these are the halves from one
// value on.
template <Type kType>
REGARD_DEVICE bool has_low_half(uint32 word) {
  static_assert(kTypeCount == 7, "a type was added: the pattern of its low values");
  constexpr uint32 kLow = kType == Type::bf16 ? 0xfe80 : 0xfc00;
  return (word & 0xffff) >= kLow || word >> 16 >= kLow;
}

// Whether a pair exists, and spans show it.
template <KernelConfig kConfig>
REGARD_DEVICE bool spans_show(const Problem& p, const ShortSequence& seq, int b, int h, int i,
                              int j) {
  return i < seq.len_q && j < seq.len_k &&
         shown_by_spans(kConfig.features, p, seq.whole(), b, h, i, j);
}

// One head's terms, with offsets from the head's first row and key.
template <KernelConfig kConfig>
struct ScoreTerms {
  using L = MmaLanes<kConfig.type>;
  static constexpr Features kOn = kConfig.features;

  ScoreParams<float> params;
  int len_q, len_k;
  Positions positions;  // where the kernel knows any
  const void* bias;
  int64 bias_row, bias_column;
  const uint8* mask;
  int64 mask_row, mask_column;
  HeadTerms<L> head;
  int32 b, h;

  REGARD_DEVICE ScoreTerms(const Problem& p, const ShortSequence& seq, int b, int h)
      : params(score_params<float>(p)),
        len_q(seq.len_q),
        len_k(seq.len_k),
        positions(kernel_positions<kConfig>(p, b)),
        head(head_terms<L>(kOn, p, b, h)),
        b(b),
        h(h) {
    if constexpr (kOn.bias) {
      constexpr int kBytes = kConfig.bias.type == Type::f64 ? 8 : element_bytes(kConfig.bias.type);
      bias = static_cast<const uint8*>(p.bias.data) +
             (b * p.bias.strides.batch + h * p.bias.strides.head) * kBytes;
      bias_row = p.bias.strides.row;
      bias_column = p.bias.strides.column;
    }
    if constexpr (kOn.mask && !stages_mask(kConfig)) {
      mask = static_cast<const uint8*>(p.mask.data) + b * p.mask.strides.batch +
             h * p.mask.strides.head;
      mask_row = p.mask.strides.row;
      mask_column = p.mask.strides.column;
    }
  }

  REGARD_DEVICE float unit() const { return logit_unit(kOn, params); }

  // The bias in global memory, if no tile of it is staged.
  REGARD_DEVICE float bias_at(int i, int j) const {
    const int64 at = i * bias_row + j * bias_column;
    if constexpr (kConfig.bias.type == Type::f64) {
      return narrowed(static_cast<const double*>(bias)[at]);
    }
    return load_element<float>(bias, kConfig.bias.type, at);
  }
  REGARD_DEVICE bool shows(int i, int j) const { return mask[i * mask_row + j * mask_column] != 0; }
  // One call for each tile is enough: the positions of its pairs differ by constants.
  REGARD_DEVICE float position(int i, int j) const {
    if constexpr (kOn.positions) {
      return relative_position<float>(
          Sequence{.len_q = len_q, .len_k = len_k, .positions = positions}, i, j);
    }
    return relative_position<float>(i, j, len_q, len_k);
  }

  // The logit's value; its unit is unit().
  REGARD_DEVICE float value(float raw, float bias_value, float position) const {
    return score<L>(kOn, params, raw, bias_value, head, position).value;
  }
  // The same for a bias that is known to be above kLowestBias.
  REGARD_DEVICE float value_of_bias(float raw, float bias_value, float position) const {
    Features others = kOn;
    others.bias = false;
    const Logit<L> rest = score<L>(others, params, raw, 0, head, position);
    return L::fma(rest.value, rest.unit, bias_value);
  }
  REGARD_DEVICE float slope_of(float raw) const { return score_slope<L>(kOn, params, raw); }
};

}  // namespace regard
