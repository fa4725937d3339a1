// dk and dv from the partial sums of a backward pass that split its query rows over blocks.
#pragma once

#include "cuda/kernels/tile/simt/row_vectors.cuh"
#include "plan/cuda/kernel/simt_layout.h"

namespace regard {

// The gradient of one key, by the lanes that share it. Parts are added in the order of the splits.
template <KernelConfig kConfig>
struct CombineDkv {
  static constexpr int kElements = 4;
  static constexpr int kLanes = lanes_of_row(larger(kConfig.dim, kConfig.dim_v), kElements);
  static constexpr int kAtOnce = 8;  // parts on their way

  const KernelParams& params;
  const View& gradient;
  const View parts;
  const int64 dim, from, to;  // the first element of its first part, and of the gradient
  const int64 flag;           // of the key
  const KeyGradient which;
  const bool exists;  // else its work is another key's, and nothing is written

  REGARD_DEVICE void sum(float (&sums)[kElements], int64 d) const {
#pragma unroll
    for (int e = 0; e < kElements; ++e) sums[e] = 0;
#pragma unroll 1
    for (int first = 0; first < params.splits; first += kAtOnce) {
      float x[kAtOnce][kElements];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int64 at = from + smaller(first + n, params.splits - 1) * parts.strides.head + d;
        load_vector<Type::f32>(x[n], parts, at, dim - d, true);
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
#pragma unroll
        for (int e = 0; e < kElements; ++e) sums[e] += first + n < params.splits ? x[n][e] : 0.0f;
      }
    }
  }

  // Calls work(column, sums) for the lane's columns.
  template <class Work>
  REGARD_DEVICE void each_column(Work work) const {
#pragma unroll 1
    for (int64 d = lane_index() % kLanes * kElements; d < dim; d += kLanes * kElements) {
      float sums[kElements];
      sum(sums, d);
      work(d, sums);
    }
  }

  REGARD_DEVICE bool flag_if(float nonfinite) const {
    const bool flagged = sum_of_lanes<kLanes>(nonfinite) != 0;
    if (flagged && exists && lane_index() % kLanes == 0) flag_key(params, flag, which);
    return flagged;
  }

  REGARD_DEVICE void run() const {
    const bool accumulates = params.problem.accumulate;
    float nonfinite = 0;
    bool is_written = exists;
    // With `accumulate`, flagged keys must stay as they are for the fix-up pass.
    if (kConfig.flags_nonfinite && accumulates) {
      each_column([&](int64, const float(&x)[kElements]) { nonfinite += zero_if_finite(x); });
      if (flag_if(nonfinite)) is_written = false;
    }
    const bool aligned = is_aligned(gradient);
    with_type<kConfig.type>(gradient.type, [&](auto type) {
      constexpr Type kTo = decltype(type)::kElement;
      each_column([&](int64 d, float(&x)[kElements]) {
        if (kConfig.flags_nonfinite && !accumulates) nonfinite += zero_if_finite(x);
        if (!is_written) return;
        if (accumulates) {
          float old[kElements];
          load_vector<kTo>(old, gradient, to + d, dim - d, aligned);
#pragma unroll
          for (int e = 0; e < kElements; ++e) x[e] += old[e];
        }
        store_vector<kTo>(gradient, to + d, dim - d, aligned, x);
      });
    });
    if (kConfig.flags_nonfinite && !accumulates) flag_if(nonfinite);
  }
};

// The grid's splits are the gradients.
template <KernelConfig kConfig>
REGARD_DEVICE void combine_dkv(const KernelParams& params) {
  using Gradient = CombineDkv<kConfig>;
  constexpr int kKeysOfWarp = 32 / Gradient::kLanes;
  static_assert(kConfig.tiling.keys == kConfig.tiling.warps * kKeysOfWarp);
  const Problem& p = params.problem;
  const BlockCoords place = block_coords(params, block_index());
  const bool is_dk = place.split == 0;
  if (is_dk ? !kConfig.wanted.dk : !kConfig.wanted.dv) return;
  const auto [b, h] = batch_head(place.head, p.sizes.heads_kv);
  const Sequence seq = safe_sequence(p, b);
  const int64 first = int64(place.tile) * kConfig.tiling.keys;
  if (first >= seq.len_k) return;
  // Lanes past the last key repeat its work, and write nothing.
  const int64 index = first + warp_index() * kKeysOfWarp + lane_index() / Gradient::kLanes;
  const int64 key = smaller(index, seq.len_k - 1);
  const KeyGradient which = is_dk ? KeyGradient::dk : KeyGradient::dv;
  const View& gradient = is_dk ? p.dk : p.dv;
  const View parts = partial_dkv(params, which);
  Gradient{.params = params,
           .gradient = gradient,
           .parts = parts,
           .dim = is_dk ? p.sizes.dim : p.sizes.dim_v,
           .from = offset_of(parts.strides, b, h * params.splits, seq.first_k, key),
           .to = offset_of(gradient.strides, b, h, seq.first_k, key),
           .flag = h * p.sizes.rows_k + flat_key(p, seq, b, key),
           .which = which,
           .exists = index < seq.len_k}
      .run();
}

}  // namespace regard
