// The elementwise steps of the warpgroups that have keys, for f32: from S^T to P^T, and from P^T
// and dP^T to dS^T.
//
// Every row and every key has its own power of two, so that none is affected by its neighbours.
// Products are multiplied by the factors of both. What goes into the next product is scaled by the
// largest element of a key (dv, dk), or of the tile (dq).
#pragma once

#include "cuda/kernels/tile/hi_lo.cuh"
#include "cuda/kernels/tile/wgmma/backward/key_scores.cuh"

namespace regard {

template <KernelConfig kConfig>
struct F32Scores {
  using Terms = KeyScores<kConfig>;
  using Memory = typename Terms::Memory;
  using Scores = typename Terms::Scores;
  using Operand = typename Terms::Operand;
  using L = typename Terms::L;
  static constexpr Features kOn = kConfig.features;
  static constexpr int kRowBlocks = Terms::kRowBlocks;
  // If the product of a row's factor, a key's factor and the scale is larger than this, their score
  // may be as large as 2^17 in powers of two, where f32 itself is accurate to 2^-7 only.
  static constexpr float kMostFactor = 0x1p-13f;

  const Terms terms;

  // The terms of a lane's two rows of block n.
  struct RowPair {
    float value[2];           // lse, or delta in units of dO's factor
    float query[2], dout[2];  // factors
  };
  static REGARD_DEVICE RowPair read_rows(SharedAddress of_tile, int n) {
    const Bits128 two = load_shared_128(of_tile + Terms::row_of(n, 0) * row_term_bytes(kConfig));
    RowPair rows;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      rows.value[e] = float_of(two.word[2 * e]);
      rows.query[e] = float_of(two.word[2 * e + 1] & 0xffff0000);
      rows.dout[e] = float_of(two.word[2 * e + 1] << 16);
    }
    return rows;
  }

  // The largest value of each of a lane's two keys, over the tile's rows.
  static REGARD_DEVICE void share_largest(float (&largest)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      largest[half] = max_of(largest[half], shuffle_xor(largest[half], 1));
      largest[half] = max_of(largest[half], shuffle_xor(largest[half], 2));
    }
  }
  template <class Value>
  static REGARD_DEVICE void split(Operand& to, Value value) {
#pragma unroll
    for (int n = 0; n < kRowBlocks; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const HiLo both = split_hi_lo(value(n, half, 0), value(n, half, 1));
        to[0][n / 2][n % 2 * 2 + half] = both.hi;
        to[1][n / 2][n % 2 * 2 + half] = both.lo;
      }
    }
  }

  // ----------------------------------------------------------------------------------------- probs

  // Eight rows of S^T. With score terms, the scale is one of them.
  struct ScoreBlock {
    const Accumulator& x;
    const RowPair rows;
    const float (&key_factors)[2];

    REGARD_DEVICE float factor(int i) const { return rows.query[i % 2] * key_factors[i / 2]; }
    REGARD_DEVICE float raw(int i) const { return is_plain(kOn) ? x[i] : x[i] * factor(i); }
    // The difference is taken before log2(e) is multiplied in, because it is nearly exact.
    REGARD_DEVICE float prob(float score, int i) const {
      const float lse = rows.value[i % 2];
      const float logit = is_plain(kOn) ? fma_of(score, factor(i), -lse) : score - lse;
      return L::exp2(logit * float(kLog2E));
    }
  };
  static REGARD_DEVICE float unit(const KernelParams& params) {
    return is_plain(kOn) ? score_params<float>(params.problem).scale : 1.0f;
  }

  // Makes P^T in units of dO's factors, as dv's product takes it. `largest` receives the largest
  // element of each key, `hand_over(n, signed_probs)` a lane's elements of block n.
  template <class HandOver>
  REGARD_DEVICE void make_probs(Scores& scores, float (&largest)[2], const float (&key_factors)[2],
                                const BackwardTask& task, const RowTile& tile, const Memory& memory,
                                int stage, int iteration, bool hides, HandOver hand_over) const {
    RowPair rows;
    float largest_query = 0;
    largest[0] = largest[1] = 0;
    terms.apply_terms(
        task, tile, memory, iteration, hides,
        [&](int n) {
          rows = read_rows(memory.lse(stage), n);
          return ScoreBlock{scores[n], rows, key_factors};
        },
        [&](int n, const float(&probs)[4], const float(&signed_probs)[4]) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            scores[n][i] = probs[i] * rows.dout[i % 2];
            largest[i / 2] = max_of(largest[i / 2], scores[n][i]);
          }
          largest_query = max_of(largest_query, max_of(rows.query[0], rows.query[1]));
          hand_over(n, signed_probs);
        });
    float largest_factor =
        largest_query * max_of(magnitude_of(key_factors[0]), magnitude_of(key_factors[1]));
    if constexpr (!is_plain(kOn)) {
      largest_factor *= magnitude_of(score_params<float>(terms.params.problem).scale);
    }
    if (any_in_warp(!(largest_factor <= kMostFactor))) fill_with_nan(scores, hand_over);
    share_largest(largest);
  }
  // Some scores may be too inaccurate. NaN in P^T makes the fix-up pass compute all rows and keys
  // of the warp's tile again.
  template <class HandOver>
  static REGARD_DEVICE void fill_with_nan(Scores& scores, HandOver hand_over) {
    const float nan = infinity<float>() - infinity<float>();
#pragma unroll
    for (int n = 0; n < kRowBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] = nan;
      hand_over(n, scores[n]);
    }
  }

  // ------------------------------------------------------------------------------------- gradients

  // Makes dS^T in units of dO's factors from dP^T. `probs_of(n)` returns a lane's signed P^T of
  // block n. `largest` receives the largest dS^T of each key, and `largest_operand` the largest in
  // units of Q's factors too, as dk's product takes it.
  template <bool kHides, class ProbsOf>
  REGARD_DEVICE void make_dscores(Scores& scores, float (&largest_operand)[2], float (&largest)[2],
                                  const float (&value_factors)[2], SharedAddress delta,
                                  ProbsOf probs_of) const {
    const float scale = kOn.dropout ? float(keep_scale(terms.params.problem.dropout)) : 1.0f;
    largest_operand[0] = largest_operand[1] = largest[0] = largest[1] = 0;
#pragma unroll
    for (int n = 0; n < kRowBlocks; ++n) {
      const RowPair rows = read_rows(delta, n);
      const Bits128 probs = probs_of(n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int half = i / 2, e = i % 2;
        const float p = float_of(probs.word[i]);
        float d;
        if constexpr (kOn.dropout) {
          const float dp = scores[n][i] * value_factors[half];
          d = relu(p) * dp * scale - magnitude_of(p) * rows.value[e];
        } else {
          d = p * fma_of(scores[n][i], value_factors[half], -rows.value[e]);
        }
        // A hidden pair gets 0, whatever its row and key hold.
        if (kHides && p == 0) d = 0;
        scores[n][i] = d;
        largest[half] = max_of(largest[half], magnitude_of(d));
        largest_operand[half] =
            max_of(largest_operand[half], magnitude_of(d * (rows.query[e] * rows.dout[e])));
      }
    }
    share_largest(largest_operand);
  }
  // Makes dk's operand.
  REGARD_DEVICE void split_for_keys(Operand& to, const Scores& scores, const float (&scale)[2],
                                    SharedAddress delta) const {
#pragma unroll
    for (int n = 0; n < kRowBlocks; ++n) {
      const RowPair rows = read_rows(delta, n);
      const float unit[2] = {rows.query[0] * rows.dout[0], rows.query[1] * rows.dout[1]};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const HiLo both = split_hi_lo(scores[n][half * 2] * unit[0] * scale[half],
                                      scores[n][half * 2 + 1] * unit[1] * scale[half]);
        to[0][n / 2][n % 2 * 2 + half] = both.hi;
        to[1][n / 2][n % 2 * 2 + half] = both.lo;
      }
    }
  }
};

}  // namespace regard
