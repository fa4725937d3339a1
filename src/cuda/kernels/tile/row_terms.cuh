// lse and delta of a row as the wgmma backward kernel reads them: as terms that a product adds, or
// in f32.
#pragma once

#include "cuda/kernels/element.cuh"
#include "cuda/kernels/params.h"
#include "plan/cuda/kernel/wgmma_backward_layout.h"

namespace regard {

inline constexpr int kRowTerms = 3;

// lse or delta is the sum of its terms times these factors, to f32's last place. (The largest f16
// is 65504.)
template <Type kType>
REGARD_DEVICE float row_term_factor(int term) {
  static_assert(kTypeCount == 7, "a type was added: the range of its parts");
  if constexpr (kType == Type::bf16) return 1.0f;
  return term == 0 ? 0x1p15f : term == 1 ? 0x1p3f : 0x1p-9f;
}

// 16 bytes: the terms of x, then zeros. If x is not finite, the first term alone is x. If it is too
// large for the type, the first term is NaN, so that no result that needs x is finite.
template <Type kType>
REGARD_DEVICE Bits128 split_in_terms(float x) {
  using Format = typename ElementOf<kType>::Format;
  float terms[kRowTerms] = {};
  const bool is_finite = x - x == 0;
#pragma unroll
  for (int n = 0; n < kRowTerms; ++n) {
    const float factor = row_term_factor<kType>(n);
    const float term = widen<Format>(narrow<Format>(x / factor));
    terms[n] = term;
    x -= term * factor;
    if (!(term - term == 0)) x = 0;
  }
  if (is_finite && !(terms[0] - terms[0] == 0)) terms[0] = float_of(0x7fc00000u);
  return {{pack<Format>(terms[0], terms[1]), pack<Format>(terms[2], 0.0f), 0, 0}};
}

// The terms of a, then the terms of b.
REGARD_DEVICE Bits128 join_terms(const Bits128& a, const Bits128& b) {
  return {
      {a.word[0], (a.word[1] & 0xffff) | b.word[0] << 16, b.word[0] >> 16 | b.word[1] << 16, 0}};
}

// 16 bytes that begin with x in f32.
REGARD_DEVICE Bits128 unsplit_term(float x) { return {{bits_of(x), 0, 0, 0}}; }

template <KernelConfig kConfig>
REGARD_DEVICE void store_row_terms(const KernelParams& params, int64 row,
                                   const RowState<float>& state) {
  const Problem& p = params.problem;
  auto* const to = static_cast<Bits128*>(params.buffers.row_terms) + row;
  const float scale = score_params<float>(p).scale;
  if constexpr (kConfig.row_terms.joined) {
    store_global_128(to, join_terms(split_in_terms<kConfig.type>(-state.lse / scale),
                                    split_in_terms<kConfig.type>(-state.delta)));
    return;
  }
  store_global_128(to, kConfig.row_terms.lse_in_product
                           ? split_in_terms<kConfig.type>(-state.lse / scale)
                           : unsplit_term(state.lse));
  store_global_128(to + term_rows(p), kConfig.row_terms.delta_in_product
                                          ? split_in_terms<kConfig.type>(-state.delta)
                                          : unsplit_term(state.delta));
}

}  // namespace regard
