// What a key warpgroup of f32 does to the single scores of S^T: from products of planes to weights,
// from weights and their gradients to those of the scores, and to planes of both.
//
// Every row and key has a power of two of its own, so that none is felt by its neighbours: products
// are multiplied by those of both, and what goes into the next product is scaled by the largest of
// a key's values (dv, dk), or of the tile's (dq).
#pragma once

#include "cuda/kernels/tile/hi_lo.cuh"
#include "cuda/kernels/tile/wgmma/key_scores.cuh"

namespace regard {

template <KernelConfig kConfig>
struct PlaneScores {
  using Terms = KeyScores<kConfig>;
  using Memory = typename Terms::Memory;
  using Scores = typename Terms::Scores;
  using L = typename Terms::L;
  static constexpr Features kOn = kConfig.features;
  static constexpr int kRowBlocks = Terms::kRowBlocks, kRowSteps = Terms::kRowSteps;
  // Where the factors of a row and a key, with the scale, are above this, their score may be as
  // large as 2^17 in powers of two, which f32 itself has to 2^-7 alone.
  static constexpr float kMostFactor = 0x1p-13f;

  // Of a tile's S^T, as a product takes it from registers.
  struct Planes {
    uint32 word[kHiLoParts][kRowSteps][4];
  };

  const Terms terms;

  // What is known of the two rows of a lane's elements of block n.
  struct RowPair {
    float value[2];  // lse; delta / dout
    float query[2], dout[2];
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

  // Of a lane's two keys, over the tile's rows.
  static REGARD_DEVICE void share_largest(float (&largest)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      largest[half] = max_of(largest[half], shuffle_xor(largest[half], 1));
      largest[half] = max_of(largest[half], shuffle_xor(largest[half], 2));
    }
  }
  template <class Value>
  static REGARD_DEVICE void split(Planes& to, Value value) {
#pragma unroll
    for (int n = 0; n < kRowBlocks; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const HiLo both = split_hi_lo(value(n, half, 0), value(n, half, 1));
        to.word[0][n / 2][n % 2 * 2 + half] = both.hi;
        to.word[1][n / 2][n % 2 * 2 + half] = both.lo;
      }
    }
  }

  // --------------------------------------------------------------------------------------- weights

  // A block of S^T: from products of planes to logits and weights. Beside terms the scale is
  // theirs.
  struct ScoreBlock {
    const Accumulator& x;
    const RowPair rows;
    const float (&key_factors)[2];

    REGARD_DEVICE float factor(int i) const { return rows.query[i % 2] * key_factors[i / 2]; }
    REGARD_DEVICE float raw(int i) const { return is_plain(kOn) ? x[i] : x[i] * factor(i); }
    // f32 pays for the difference before the scale: it is nearly exact.
    REGARD_DEVICE float weight(float score, int i) const {
      if (kOn.mask && score == -infinity<float>()) return 0;  // a factor may be 0
      const float lse = rows.value[i % 2];
      const float logit = is_plain(kOn) ? fma_of(score, factor(i), -lse) : score - lse;
      return L::exp2(logit * float(kLog2E));
    }
  };
  static REGARD_DEVICE float unit(const KernelParams& params) {
    return is_plain(kOn) ? score_params<float>(params.problem).scale : 1.0f;
  }

  // From products to what dv's product multiplies, P in units of dout; `hand_over` takes each
  // block's four elements of P, or of its shares. `most`: the largest of those, over a lane's rows.
  template <class HandOver>
  REGARD_DEVICE void make_weights(Scores& x, float (&most)[2], const float (&key_factors)[2],
                                  const BackwardTask& task, const BackwardStep& step,
                                  const Memory& memory, int stage, int use, bool hides,
                                  HandOver hand_over) const {
    RowPair rows;
    float largest_query = 0;
    most[0] = most[1] = 0;
    terms.apply_terms(
        task, step, memory, use, hides,
        [&](int n) {
          rows = read_rows(memory.lse(stage), n);
          return ScoreBlock{x[n], rows, key_factors};
        },
        [&](int n, const float(&weights)[4], const float(&shares)[4]) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            x[n][i] = weights[i] * rows.dout[i % 2];
            most[i / 2] = max_of(most[i / 2], x[n][i]);
          }
          largest_query = max_of(largest_query, max_of(rows.query[0], rows.query[1]));
          hand_over(n, shares);
        });
    float largest_factor =
        largest_query * max_of(magnitude_of(key_factors[0]), magnitude_of(key_factors[1]));
    if constexpr (!is_plain(kOn)) {
      largest_factor *= magnitude_of(score_params<float>(terms.params.problem).scale);
    }
    if (any_in_warp(!(largest_factor <= kMostFactor))) spoil(x, hand_over);
    share_largest(most);
  }
  // Some scores of a warp's keys may have lost what counts: weights that are none make that all
  // rows and keys that they belong to are computed again with the marked ones.
  template <class HandOver>
  static REGARD_DEVICE void spoil(Scores& x, HandOver hand_over) {
    const float none = infinity<float>() - infinity<float>();
#pragma unroll
    for (int n = 0; n < kRowBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[n][i] = none;
      hand_over(n, x[n]);
    }
  }

  // ------------------------------------------------------------------------------------- gradients

  // From weights, which `take` gives block by block, and dP^T to dS^T in units of dout. `most_key`:
  // its largest in units of q's factors, as dk's product takes it, over a lane's rows; `most`: as
  // it is.
  template <bool kHides, class Take>
  REGARD_DEVICE void make_dscores(Scores& x, float (&most_key)[2], float (&most)[2],
                                  const float (&value_factors)[2], SharedAddress delta,
                                  Take take) const {
    const float scale = kOn.dropout ? float(keep_scale(terms.params.problem.dropout)) : 1.0f;
    most_key[0] = most_key[1] = most[0] = most[1] = 0;
#pragma unroll
    for (int n = 0; n < kRowBlocks; ++n) {
      const RowPair rows = read_rows(delta, n);
      const Bits128 weights = take(n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int half = i / 2, e = i % 2;
        const float weight = float_of(weights.word[i]);
        float d;
        if constexpr (kOn.dropout) {
          const float dp = x[n][i] * value_factors[half];
          d = relu(weight) * dp * scale - magnitude_of(weight) * rows.value[e];
        } else {
          d = weight * fma_of(x[n][i], value_factors[half], -rows.value[e]);
        }
        // A hidden pair has no share in what its row or key would spoil.
        if (kHides && weight == 0) d = 0;
        x[n][i] = d;
        most[half] = max_of(most[half], magnitude_of(d));
        most_key[half] = max_of(most_key[half], magnitude_of(d * (rows.query[e] * rows.dout[e])));
      }
    }
    share_largest(most_key);
  }
  // dk's operand.
  REGARD_DEVICE void split_for_keys(Planes& to, const Scores& x, const float (&scale)[2],
                                    SharedAddress delta) const {
#pragma unroll
    for (int n = 0; n < kRowBlocks; ++n) {
      const RowPair rows = read_rows(delta, n);
      const float unit[2] = {rows.query[0] * rows.dout[0], rows.query[1] * rows.dout[1]};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const HiLo both = split_hi_lo(x[n][half * 2] * unit[0] * scale[half],
                                               x[n][half * 2 + 1] * unit[1] * scale[half]);
        to.word[0][n / 2][n % 2 * 2 + half] = both.hi;
        to.word[1][n / 2][n % 2 * 2 + half] = both.lo;
      }
    }
  }
};

}  // namespace regard
