// What a key warpgroup does to the single scores of S^T: from products to weights, and from weights
// and their gradients to those of the scores.
#pragma once

#include "cuda/kernels/tile/wgmma/backward_memory.cuh"
#include "cuda/kernels/tile/wgmma/drops.cuh"

namespace regard {

template <KernelConfig kConfig>
struct KeyScores {
  using Memory = BackwardMemory<kConfig>;
  using L = MmaLanes<kConfig.type>;
  using Format = typename ElementOf<kConfig.type>::Format;
  static constexpr Features kOn = kConfig.features;
  static constexpr int kRows = Memory::kRows;
  static constexpr int kRowBlocks = kRows / 8, kRowSteps = kRows / 16;
  // Which weights are dropped has been drawn by another warpgroup.
  static constexpr bool kReadsDrops = has_backward_dropout_warpgroup(kConfig);
  static constexpr bool kDraws = kOn.dropout && !kReadsDrops;
  // Nothing lies between S^T, which lse is part of, and the weights but a factor.
  static constexpr bool kPlain = is_plain(kOn) && !kOn.mask && !kDraws;
  // dS^T is made of shares: the weights times the slope of the scores, negative where dropout drops
  // the weight. Else of the weights, which are dv's.
  static constexpr bool kHasShares = has_slope(kOn) || kOn.dropout;
  static constexpr bool kHidesAlways = kOn.mask || kDraws;
  static constexpr bool kReadsBias = kOn.bias && !kConfig.bias.one_row;
  static constexpr bool kPacksBias = kReadsBias && element_bytes(kConfig.bias.type) == 2;
  static constexpr bool kHoldsBias = kPacksBias && !kHidesAlways;
  // Whether tiles are told apart whose bias hides no pair and is not too low to be added as it is.
  static constexpr bool kLooksAtBias =
      kOn.bias && !kHidesAlways && (kHoldsBias || kConfig.bias.one_row);
  static constexpr bool kAddsLse = adds_lse_by_product(kOn);
  static constexpr bool kAddsDelta = adds_delta_by_product(kOn);

  using Scores = Accumulator[kRowBlocks];  // of S^T: 16 keys of a warp by the tile's rows
  using Operand = uint32[kRowSteps][4];    // the same in 16 bits, as a product takes it
  using BiasFragments = Fragments<kPacksBias ? kConfig.bias.type : Type::bf16, Products::direct>;
  using BiasTile = typename BiasFragments::A[kHoldsBias ? kRowSteps : 1];  // as it is staged

  const KernelParams& params;
  const int warp_key;  // the warp's first key in the tile
  const float exponent = logit_unit(kOn, score_params<float>(params.problem)) * float(kLog2E);

  // The key and the row, within their tiles, of accumulator element 2 half + e of block n.
  REGARD_DEVICE int key_of(int half) const { return warp_key + half * 8 + lane_index() / 4; }
  static REGARD_DEVICE int row_of(int n, int e) { return n * 8 + lane_index() % 4 * 2 + e; }

  // From S^T to P^T, and to its shares. Q is in this stage. Whether some pairs may be hidden: by
  // intervals, of which `hides` speaks, or by the bias.
  REGARD_DEVICE bool make_weights(Operand& weights, Operand& shares, Scores& x,
                                  const BackwardTask& task, const BackwardStep& step,
                                  const Memory& memory, int stage, int use, bool hides) const {
    if constexpr (!kPlain) {
      const auto products_of = [&](int n) {
        ScoreBlock products{x[n], exponent};
        if constexpr (!kAddsLse) read_rows(products.lse, memory.lse(stage), n);
        return products;
      };
      return apply_terms(
          task, step, memory, use, hides, products_of,
          [&](int n, const float(&weight)[4], const float(&share)[4]) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int at = n % 2 * 2 + half;
              weights[n / 2][at] = pack<Format>(weight[half * 2], weight[half * 2 + 1]);
              if constexpr (kHasShares) {
                shares[n / 2][at] = pack<Format>(share[half * 2], share[half * 2 + 1]);
              }
            }
          });
    }
    if (hides) hide(x, task, step);
#pragma unroll
    for (int n = 0; n < kRowBlocks; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float low = L::exp2(x[n][half * 2] * exponent);
        const float high = L::exp2(x[n][half * 2 + 1] * exponent);
        (kHasShares ? shares : weights)[n / 2][n % 2 * 2 + half] = pack<Format>(low, high);
      }
    }
    return hides;
  }

  // From weights, or their shares, to what is left of them.
  REGARD_DEVICE void drop(Operand& weights, Operand& shares, uint32 drops) const {
    each_dropped<kRowBlocks * 2>(drops, [&](int at, uint32 dropped) {
      uint32& share = shares[at / 4][at % 4];
      weights[at / 4][at % 4] = (has_slope(kOn) ? weights[at / 4][at % 4] : share) & ~dropped;
      share |= dropped & 0x80008000;
    });
  }

  // The rows of the tile that intervals let a lane's key see, counted from the first; empty where
  // the key does not exist.
  REGARD_DEVICE ShortInterval rows_of(const BackwardTask& task, const BackwardStep& step,
                                      int half) const {
    const int j = task.first_key + key_of(half), first_row = step.tile * kRows;
    const Interval rows =
        visible_queries(params.problem.mask_params, j, task.seq.len_q, task.seq.len_k);
    const int begin = int(rows.begin) - first_row;
    return {begin, j < task.seq.len_k ? int(rows.end) - first_row : begin};
  }
  // -inf for the pairs that do not exist or that intervals hide.
  REGARD_DEVICE void hide(Scores& x, const BackwardTask& task, const BackwardStep& step) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const ShortInterval rows = rows_of(task, step, half);
#pragma unroll
      for (int n = 0; n < kRowBlocks; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int row = row_of(n, e);
          if (row < rows.begin || row >= rows.end) x[n][half * 2 + e] = -infinity<float>();
        }
      }
    }
  }

  // ----------------------------------------------------------------------------------------- terms

  // A block of S^T: its products, and from logits to weights.
  struct ScoreBlock {
    const Accumulator& x;
    float exponent;
    float lse[2] = {};  // of its rows, where a product has not added them

    REGARD_DEVICE float raw(int i) const { return x[i]; }
    REGARD_DEVICE float weight(float score, int i) const {
      return weight_at<L>(score, exponent, lse[i % 2] * float(kLog2E));
    }
  };

  // All that lies between the product and the weight, block by block: logits and slopes of a whole
  // tile would take too many registers. `products_of` gives a block, `emit` takes its weights and
  // their shares. Whether some pairs may be hidden.
  template <class ProductsOf, class Emit>
  REGARD_DEVICE bool apply_terms(const BackwardTask& task, const BackwardStep& step,
                                 const Memory& memory, int use, bool hides, ProductsOf products_of,
                                 Emit emit) const {
    BiasTile bias;
    if constexpr (kHoldsBias) read_bias_tile(bias, memory, use);
    bool by_bias = kOn.bias && !kLooksAtBias;
    if constexpr (kLooksAtBias) by_bias = any_in_warp(has_low_bias(bias, memory, use));
    if (hides || (kLooksAtBias && by_bias)) {
      apply_terms<true>(bias, task, step, memory, use, products_of, emit);
    } else {
      apply_terms<false>(bias, task, step, memory, use, products_of, emit);
    }
    return hides || by_bias;
  }
  template <bool kHides, class ProductsOf, class Emit>
  REGARD_DEVICE void apply_terms(const BiasTile& bias_tile, const BackwardTask& task,
                                 const BackwardStep& step, const Memory& memory, int use,
                                 ProductsOf products_of, Emit emit) const {
    const ScoreTerms<kConfig> terms(params.problem, task.seq, task.b, step.head);
    const float distance =
        terms.distance(step.tile * kRows + row_of(0, 0), task.first_key + key_of(0));
    ShortInterval rows[2] = {};
    if constexpr (kHides) {
#pragma unroll
      for (int half = 0; half < 2; ++half) rows[half] = rows_of(task, step, half);
    }
    PairTerms pairs[2];
    read_key_terms(pairs, memory, use);
#pragma unroll
    for (int n = 0; n < kRowBlocks; ++n) {
      if (n % 2 == 0) read_bias(pairs, bias_tile, memory, use, n);
      read_mask(pairs[n % 2], memory, use, n);
      const auto products = products_of(n);
      uint32 bits[4] = {};
      if constexpr (kDraws) draw(bits, task, step, n);
      float weights[4], shares[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int half = i / 2, e = i % 2, row = row_of(n, e);
        const float raw = products.raw(i), bias = pairs[n % 2].bias[i];
        const float apart = distance + float(n * 8 + e - half * 8);
        float score;
        if constexpr (kLooksAtBias && !kHides) {
          score = terms.value_of_bias(raw, bias, apart);
        } else {
          score = terms.value(raw, bias, apart);
          if (kOn.bias && bias == -infinity<float>()) score = -infinity<float>();
        }
        if (kOn.mask && !pairs[n % 2].seen[i]) score = -infinity<float>();
        float weight = products.weight(score, i);
        // A row that does not exist has no lse.
        if (kHides && (row < rows[half].begin || row >= rows[half].end)) weight = 0;
        float share = weight;
        if constexpr (has_slope(kOn)) {
          share *= terms.slope_of(raw);
          if ((kHides || kHidesAlways) && weight == 0) share = 0;
        }
        if constexpr (kDraws) {
          const bool drops = bits[i] < params.problem.dropout.threshold << 16;
          share = drops ? -share : share;
          weight = drops ? 0.0f : weight;
        }
        weights[i] = weight;
        shares[i] = share;
      }
      emit(n, weights, shares);
    }
  }

  // f32 values of a lane's rows of a block.
  static REGARD_DEVICE void read_rows(float (&values)[2], SharedAddress of_tile, int n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      values[e] = float_of(load_shared_32(of_tile + row_of(n, e) * kRowTermBytes));
    }
  }

  // The staged bias and mask of a lane's elements of a block. What does not exist is hidden.
  struct PairTerms {
    float bias[4];
    bool seen[4];
  };
  // Where all rows share them.
  REGARD_DEVICE void read_key_terms(PairTerms (&pairs)[2], const Memory& memory, int use) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float bias = 0;
      bool seen = true;
      if constexpr (kConfig.bias.one_row) {
        bias = load_staged<kConfig.bias.type>(memory.bias_tile(use & 1).begin, key_of(i / 2));
      }
      if constexpr (kConfig.mask.one_row) {
        seen = load_shared_8(memory.mask_tile(use & 1).begin + key_of(i / 2)) != 0;
      }
      pairs[0].bias[i] = pairs[1].bias[i] = bias;
      pairs[0].seen[i] = pairs[1].seen[i] = seen;
    }
  }
  // All of a lane's bias, by the loads of fragments.
  REGARD_DEVICE void read_bias_tile(BiasTile& bias, const Memory& memory, int use) const {
#pragma unroll
    for (int k = 0; k < kRowSteps; ++k) {
      BiasFragments::load_a_transposed(bias[k], memory.bias_tile(use & 1), warp_key, k * 16);
    }
  }
  // Whether some of a lane's bias is -inf, or so low that score() raises it.
  REGARD_DEVICE bool has_low_bias(const BiasTile& bias, const Memory& memory, int use) const {
    if constexpr (kHoldsBias) {
      uint32 most = bias[0].word[0];
#pragma unroll
      for (int i = 1; i < kRowSteps * 4; ++i) {
        most = max_u16x2(most, bias[i / 4].word[i % 4]);
      }
      return has_low_half<kConfig.bias.type>(most);
    } else {
      PairTerms pairs[2];
      read_key_terms(pairs, memory, use);
      return !(pairs[0].bias[0] > kLowestBias<float> && pairs[0].bias[2] > kLowestBias<float>);
    }
  }
  // Of blocks n and n + 1.
  REGARD_DEVICE void read_bias(PairTerms (&pairs)[2], const BiasTile& bias_tile,
                               const Memory& memory, int use, int n) const {
    if constexpr (kReadsBias) {
      if constexpr (!kPacksBias) {
        const TileView tile = memory.bias_tile(use & 1);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int row = row_of(n + i / 4, i % 2), key = key_of(i % 4 / 2);
          pairs[i / 4].bias[i % 4] =
              float_of(load_shared_32(tile.begin + row * tile.row_bytes + key * 4));
        }
      } else {
        typename BiasFragments::A words;
        if constexpr (kHoldsBias) {
          words = bias_tile[n / 2];
        } else {
          BiasFragments::load_a_transposed(words, memory.bias_tile(use & 1), warp_key, n * 8);
        }
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          float(&bias)[4] = pairs[w / 2].bias;
          BiasFragments::unpack(words, w, bias[w % 2 * 2], bias[w % 2 * 2 + 1]);
        }
      }
    }
  }
  REGARD_DEVICE void read_mask(PairTerms& pairs, const Memory& memory, int use, int n) const {
    if constexpr (kOn.mask && !kConfig.mask.one_row) {
      const TileView tile = memory.mask_tile(use & 1);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        pairs.seen[i] =
            load_shared_8(tile.begin + row_of(n, i % 2) * tile.row_bytes + key_of(i / 2)) != 0;
      }
    }
  }

  // Dropout's 16 bits of a lane's elements of a block, in the upper halves. The lanes of
  // neighbouring keys need the same call of Philox, of two rows: each makes that of one, for both.
  REGARD_DEVICE void draw(uint32 (&bits)[4], const BackwardTask& task, const BackwardStep& step,
                          int n) const {
    const bool odd = lane_index() / 4 % 2;
    const bool late = warp_key % 32 >= 16;  // the second half of the call's 32 keys
    const Philox mine =
        dropout_bits(params.problem.dropout, task.b, step.head, step.tile * kRows + row_of(n, odd),
                     dropout_call(task.first_key + key_of(0)));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32 own = late ? mine.word[2 + half] : mine.word[half];
      const uint32 other = shuffle_xor(own, 4);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const uint32 both = (e == 1) == odd ? own : other;
        bits[half * 2 + e] = odd ? both : both << 16;
      }
    }
  }

  // ------------------------------------------------------------------------------------- gradients

  // From P^T or its shares, and dP^T (less delta already, but under dropout), to dS^T. Hidden pairs
  // have no share in what their row or key would spoil.
  REGARD_DEVICE void make_dscores(Operand& ds, const Operand& shares, const Scores& x,
                                  const Memory& memory, int use, bool hides) const {
    if (kHidesAlways || hides) {
      make_dscores<true>(ds, shares, x, memory, use);
    } else {
      make_dscores<false>(ds, shares, x, memory, use);
    }
  }
  template <bool kHides>
  REGARD_DEVICE void make_dscores(Operand& ds, const Operand& shares, const Scores& x,
                                  const Memory& memory, int use) const {
    const float scale = kOn.dropout ? float(keep_scale(params.problem.dropout)) : 1.0f;
#pragma unroll
    for (int n = 0; n < kRowBlocks; ++n) {
      float delta[2] = {};
      if constexpr (!kAddsDelta) read_rows(delta, memory.delta(Memory::dout_stage(use)), n);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32 pair = shares[n / 2][n % 2 * 2 + half];
        float d[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float share = widen<Format>(uint16(pair >> e * 16)), dp = x[n][half * 2 + e];
          d[e] =
              kOn.dropout ? relu(share) * dp * scale - magnitude_of(share) * delta[e] : share * dp;
          if (kHides && share == 0) d[e] = 0;
        }
        ds[n / 2][n % 2 * 2 + half] = pack<Format>(d[0], d[1]);
      }
    }
  }
};

}  // namespace regard
