// What a key warpgroup does to the single scores of S^T: from products to weights, and from weights
// and their gradients to those of the scores.
#pragma once

#include "cuda/kernels/tile/backward_memory.cuh"

namespace regard {

template <KernelConfig kConfig>
struct KeyScores {
  using Memory = BackwardMemory<kConfig>;
  using L = MmaLanes<kConfig.type>;
  using Format = typename ElementOf<kConfig.type>::Format;
  static constexpr Features kOn = kConfig.features;
  static constexpr int kRows = Memory::kRows;
  static constexpr int kRowBlocks = kRows / 8, kRowSteps = kRows / 16;
  static constexpr bool kPlain = is_plain(kOn);

  using Scores = Accumulator[kRowBlocks];  // of S^T: 16 keys of a warp by the tile's rows
  using Operand = uint32[kRowSteps][4];    // the same in 16 bits, as a product takes it

  const KernelParams& params;
  const int warp_key;  // the warp's first key in the tile
  const float exponent = logit_unit(kOn, score_params<float>(params.problem)) * float(kLog2E);

  // The key and the row, within their tiles, of accumulator element 2 half + e of block n.
  REGARD_DEVICE int key_of(int half) const { return warp_key + half * 8 + lane_index() / 4; }
  static REGARD_DEVICE int row_of(int n, int e) { return n * 8 + lane_index() % 4 * 2 + e; }

  // From S^T, less lse already, to P^T.
  REGARD_DEVICE void make_weights(Operand& weights, Scores& x, const BackwardTask& task,
                                  const BackwardStep& step, bool hides) const {
    if (hides) hide(x, task, step);
#pragma unroll
    for (int n = 0; n < kRowBlocks; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float low = L::exp2(x[n][half * 2] * exponent);
        const float high = L::exp2(x[n][half * 2 + 1] * exponent);
        weights[n / 2][n % 2 * 2 + half] = pack<Format>(low, high);
      }
    }
  }

  // -inf for the pairs that do not exist or that intervals hide.
  REGARD_DEVICE void hide(Scores& x, const BackwardTask& task, const BackwardStep& step) const {
    const MaskParams& mask = params.problem.mask_params;
    const int first_row = step.tile * kRows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int j = task.first_key + key_of(half);
      const Interval rows = visible_queries(mask, j, task.seq.len_q, task.seq.len_k);
      const int begin = int(rows.begin) - first_row;
      const int end = j < task.seq.len_k ? int(rows.end) - first_row : begin;
#pragma unroll
      for (int n = 0; n < kRowBlocks; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int row = row_of(n, e);
          if (row < begin || row >= end) x[n][half * 2 + e] = -infinity<float>();
        }
      }
    }
  }

  // From P^T and dP^T, less delta already, to dS^T. Hidden pairs have no share in what their row or
  // key would spoil.
  REGARD_DEVICE void make_dscores(Operand& ds, const Operand& weights, const Scores& x,
                                  bool hides) const {
    if (hides) {
      make_dscores<true>(ds, weights, x);
    } else {
      make_dscores<false>(ds, weights, x);
    }
  }
  template <bool kHides>
  REGARD_DEVICE void make_dscores(Operand& ds, const Operand& weights, const Scores& x) const {
#pragma unroll
    for (int n = 0; n < kRowBlocks; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32 pair = weights[n / 2][n % 2 * 2 + half];
        const float low = widen<Format>(uint16(pair)), high = widen<Format>(uint16(pair >> 16));
        float first = low * x[n][half * 2], second = high * x[n][half * 2 + 1];
        if (kHides && low == 0) first = 0;
        if (kHides && high == 0) second = 0;
        ds[n / 2][n % 2 * 2 + half] = pack<Format>(first, second);
      }
    }
  }
};

}  // namespace regard
