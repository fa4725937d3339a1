// What the backward kernel does to single scores: from products to P (terms, softmax, hidden pairs,
// dropout), and from P and dP to dS.
#pragma once

#include "cuda/kernels/tile/mask_bits.cuh"
#include "cuda/kernels/tile/mma/backward_tile.cuh"
#include "cuda/kernels/tile/span_bits.cuh"

namespace regard {

template <KernelConfig kConfig>
struct BackwardScores {
  using Tile = BackwardTileMma<kConfig>;
  using Scores = typename Tile::Scores;
  using Step = typename Tile::Step;
  using L = MmaLanes<kConfig.type>;
  static constexpr Features kOn = full_tile_features(kConfig);
  static constexpr bool kHides =
      kOn.interval || tests_pairs(kConfig.features) || kOn.bias || kOn.dropout;
  // Else tiles that are not whole have a test of their own, with which wide heads spill registers.
  static constexpr bool kTestsEveryTile =
      tests_pairs(kOn) || kOn.bias || kOn.dropout || larger(kConfig.dim, kConfig.dim_v) > 192;
  static constexpr int kN = Tile::kN, kScoreBlocks = Tile::kScoreBlocks;
  static constexpr int kLines = 2 * kN;  // keys of a lane, in the order of its accumulators
  using Bits = LaneBits<kScoreBlocks>;
  // What a mask that is read as bits shows of a tile of rows.
  struct SeenRows {
    LaneBits<Tile::kRows / 8> of[kLines];
  };

  const Tile at;
  const float unit = logit_unit(kOn, score_params<float>(at.p));
  DropoutOf<kConfig> dropout_of_call = dropout_of<kConfig>(at.p);

  // Begins to read what the mask shows, if make_weights will need it.
  REGARD_DEVICE void read_seen(SeenRows& seen, const Step& step) const {
    if constexpr (kConfig.mask.as_bits) {
      if (step.is_full) return;
      const uint8* const tile =
          mask_bits_of_tile<kConfig>(at.params, at.map_row_of(step.head), step.tile);
#pragma unroll
      for (int line = 0; line < kLines; ++line) {
        seen.of[line] = read_mask_bits<kConfig>(tile, at.key_of(line / 2, line % 2));
      }
    }
  }

  // From products to P (negative where dropout drops the weight), and the slopes of the scores.
  REGARD_DEVICE void make_weights(Scores& x, Scores& slopes, const SeenRows& seen, int stage,
                                  const Step& step) const {
    if constexpr (!is_plain(kOn) || tests_pairs(kOn)) {
      weigh_with_terms(x, slopes, stage, step);
    } else {
      weigh(x, stage);
    }
    if (!at.is_whole(step)) clear_hidden(x, seen, stage, step);
    if constexpr (kOn.dropout) drop(x, step);
  }
  REGARD_DEVICE void weigh(Scores& x, int stage) const {
#pragma unroll
    for (int n = 0; n < kScoreBlocks; ++n) {
      const RowLse lse = read_lse(stage, n);
#pragma unroll
      for (int m = 0; m < kN; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) x[m][n][e] = weight(x[m][n][e], lse.of[e % 2]);
      }
    }
  }
  // e^(value unit - lse). f32 subtracts before it scales, because the difference is nearly exact.
  REGARD_DEVICE float weight(float value, float lse) const {
    if constexpr (kConfig.type == Type::f32) {
      return L::exp2(fma_of(value, unit, -lse) * float(kLog2E));
    }
    return weight_at<L>(value, unit * float(kLog2E), lse * float(kLog2E));
  }
  // The states of a block's two rows of a lane.
  REGARD_DEVICE Bits128 load_states(int stage, int n) const {
    return load_shared_128(at.states_at(stage, at.row_of(n, 0)));
  }
  struct RowLse {
    float of[2];
  };
  REGARD_DEVICE RowLse read_lse(int stage, int n) const {
    const Bits128 states = load_states(stage, n);
    return {{float_of(states.word[0]), float_of(states.word[2])}};
  }

  // From products to P with every score term. Pairs that a bias, a mask or spans hide become 0,
  // also where the row's lse is NaN.
  REGARD_DEVICE void weigh_with_terms(Scores& x, Scores& slopes, int stage,
                                      const Step& step) const {
    const ScoreTerms<kConfig> terms(at.p, at.seq, at.b, step.head);
    const float position =
        terms.position(step.first_row() + at.row_of(0, 0), at.first_key + at.key_of(0, 0));
    KeyTerms keys[kN];
    if constexpr (kConfig.bias.one_row || kConfig.mask.one_row) read_key_terms(keys, stage);
#pragma unroll
    for (int n = 0; n < kScoreBlocks; n += 2) {
      const RowLse lse[2] = {read_lse(stage, n), read_lse(stage, n + 1)};
#pragma unroll
      for (int m = 0; m < kN; ++m) {
        float biases[2][4] = {};
        if constexpr (stages_bias(kConfig) && !kConfig.bias.one_row) {
          read_bias(biases, stage, m, n);
        }
#pragma unroll
        for (int x8 = 0; x8 < 8; ++x8) {
          const int block = n + x8 / 4, half = x8 % 4 / 2, e = x8 % 2;
          float bias = biases[x8 / 4][x8 % 4];
          if constexpr (kConfig.bias.one_row) bias = keys[m].bias[half];
          if constexpr (kOn.bias && !stages_bias(kConfig)) {
            const int i = step.first_row() + at.row_of(block, e);
            const int j = at.first_key + at.key_of(m, half);
            bias = i < at.seq.len_q && j < at.seq.len_k ? terms.bias_at(i, j) : 0.0f;
          }
          bool seen = true;
          if constexpr (kOn.mask && kConfig.mask.one_row) seen = keys[m].seen[half];
          if constexpr (kOn.mask && !kConfig.mask.one_row) {
            seen = read_mask(stage, at.row_of(block, e), at.key_of(m, half));
          }
          if constexpr (has_spans(kOn)) {
            const int i = step.first_row() + at.row_of(block, e);
            const int j = at.first_key + at.key_of(m, half);
            if (!spans_show<kConfig>(at.p, at.seq, at.b, step.head, i, j)) seen = false;
          }
          if (kOn.bias && bias == -infinity<float>()) seen = false;
          float& element = x[m][block][half * 2 + e];
          if constexpr (has_slope(kOn)) slopes[m][block][half * 2 + e] = terms.slope_of(element);
          const float apart = position + float(block * 8 + e - m * 16 - half * 8);
          element = weight(terms.value(element, bias, apart), lse[x8 / 4].of[e]);
          if (!seen) element = 0;
        }
      }
    }
  }
  // The terms that all rows share, of a lane's two keys of a block.
  struct KeyTerms {
    float bias[2];
    bool seen[2];
  };
  REGARD_DEVICE void read_key_terms(KeyTerms (&keys)[kN], int stage) const {
#pragma unroll
    for (int m = 0; m < kN; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = at.key_of(m, half);
        if constexpr (kConfig.bias.one_row) {
          keys[m].bias[half] = load_staged<kConfig.bias.type>(at.bias_tile(stage).begin, key);
        }
        if constexpr (kOn.mask && kConfig.mask.one_row) {
          keys[m].seen[half] = read_mask(stage, 0, key);
        }
      }
    }
  }
  // Whether the staged mask shows a pair; pairs that do not exist are hidden.
  REGARD_DEVICE bool read_mask(int stage, int row, int key) const {
    const TileView tile = at.mask_tile(stage);
    return load_shared_8(tile.begin + row * tile.row_bytes + key) != 0;
  }
  // The staged bias of a pair of blocks of S^T; a 16-bit bias is loaded by ldmatrix.
  REGARD_DEVICE void read_bias(float (&bias)[2][4], int stage, int m, int n) const {
    const TileView tile = at.bias_tile(stage);
    if constexpr (element_bytes(kConfig.bias.type) == 4) {
#pragma unroll
      for (int x = 0; x < 8; ++x) {
        const int row = at.row_of(n + x / 4, x % 2), key = at.key_of(m, x % 4 / 2);
        bias[x / 4][x % 4] = float_of(load_shared_32(tile.begin + row * tile.row_bytes + key * 4));
      }
    } else {
      using B = Fragments<kConfig.bias.type, Products::direct>;
      typename B::A a;
      B::load_a_transposed(a, tile, at.warp_key() + m * 16, at.warp_score_row() + n * 8);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        B::unpack(a, w, bias[w / 2][w % 2 * 2], bias[w / 2][w % 2 * 2 + 1]);
      }
    }
  }

  // The weights of pairs that do not exist, that intervals hide, or that mask and spans hide with a
  // tile map.
  REGARD_DEVICE void clear_hidden(Scores& x, const SeenRows& seen, int stage,
                                  const Step& step) const {
    if constexpr (kConfig.tile_map) {
      if (!step.is_full) clear_unseen(x, seen, stage, step);
    }
#pragma unroll
    for (int m = 0; m < kN; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int j = at.first_key + at.key_of(m, half);
        const Interval rows = rows_of_key<kConfig>(at.p, at.seq, at.b, j);
        const int begin = int(rows.begin) - step.first_row();
        const int end = j < at.seq.len_k ? int(rows.end) - step.first_row() : begin;
#pragma unroll
        for (int n = 0; n < kScoreBlocks; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int row = at.row_of(n, e);
            if (row < begin || row >= end) x[m][n][half * 2 + e] = 0;
          }
        }
      }
    }
  }

  REGARD_DEVICE void clear_unseen(Scores& x, const SeenRows& seen, int stage,
                                  const Step& step) const {
    if constexpr (kConfig.features.mask && !kConfig.mask.as_bits) {
#pragma unroll
      for (int n = 0; n < kScoreBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 4 * kN; ++i) {
          const int m = i / 4, half = i % 4 / 2, e = i % 2;
          const int row = kConfig.mask.one_row ? 0 : at.row_of(n, e);
          if (!read_mask(stage, row, at.key_of(m, half))) x[m][n][half * 2 + e] = 0;
        }
      }
    }
    if constexpr (kConfig.mask.as_bits || has_spans(kConfig.features)) clear_by_bits(x, seen, step);
  }
  // What a mask's bits and spans hide.
  REGARD_DEVICE void clear_by_bits(Scores& x, const SeenRows& of_mask, const Step& step) const {
    const ShortSequence& seq = at.seq;
    const int first = step.first_row() + at.row_of(0, 0), last_key = seq.len_k - 1;
    Bits seen[kLines];
    int keys[kLines];
#pragma unroll
    for (int line = 0; line < kLines; ++line) {
      // A key that does not exist is hidden by its intervals.
      keys[line] = smaller(at.first_key + at.key_of(line / 2, line % 2), last_key);
      // A warp has some of the tile's rows.
      seen[line] =
          kConfig.mask.as_bits ? Bits(of_mask.of[line] >> at.warp_score_row() / 4) : ~Bits(0);
      if constexpr (kConfig.features.key_spans) {
        seen[line] &= columns_in<Bits>(
            spans_of(at.p.key_spans, at.b, step.head, seq.first_k, keys[line]), first, seq.len_q);
      }
    }
    if constexpr (kConfig.features.row_spans) {
      keep_columns_around<kScoreBlocks>(seen, keys, first, seq.len_q, [&](int row) {
        return spans_of(at.p.row_spans, at.b, step.head, seq.first_q, row);
      });
    }
#pragma unroll
    for (int line = 0; line < kLines; ++line) {
#pragma unroll
      for (int bit = 0; bit < 2 * kScoreBlocks; ++bit) {
        float& weight = x[line / 2][bit / 2][line % 2 * 2 + bit % 2];
        if ((seen[line] >> bit & 1) == 0) weight = 0;
      }
    }
  }

  // One Philox call serves a lane's keys of a row in 32 keys, and lanes of neighbouring keys need
  // the same call. Each of them makes the call of one of their two rows, for both.
  REGARD_DEVICE void drop(Scores& x, const Step& step) const {
    static_assert(kN <= 2);
    const bool odd = lane_index() / 4 % 2;
    const DropoutParams& dropout = dropout_of_tile<kConfig>(dropout_of_call);
    const uint32 threshold = dropout.threshold << 16;
    const int first = at.first_key + at.key_of(0, 0);
    const bool late = kN == 1 && first % 32 >= 16;  // the second half of the 32
#pragma unroll
    for (int n = 0; n < kScoreBlocks; ++n) {
      const int i = step.first_row() + at.row_of(n, odd);
      const Philox mine =
          dropout_bits_of<kConfig>(at.p, dropout, at.b, step.head, i, dropout_call(first));
#pragma unroll
      for (int m = 0; m < kN; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32 own = late ? mine.word[2 + half] : mine.word[2 * m + half];
          const uint32 other = shuffle_xor(own, 4);
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const uint32 bits = (e == 1) == odd ? own : other;
            float& weight = x[m][n][half * 2 + e];
            if ((odd ? bits : bits << 16) < threshold) weight = -weight;
          }
        }
      }
    }
  }
  static REGARD_DEVICE void keep_weights(Scores& kept, const Scores& weights) {
#pragma unroll
    for (int m = 0; m < kN; ++m) {
#pragma unroll
      for (int n = 0; n < kScoreBlocks; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) kept[m][n][e] = relu(weights[m][n][e]);
      }
    }
  }

  // From P and dP to the gradients of the logits, in place of dP. dP of a kept weight counts
  // keep_scale times. Arithmetic tells what is dropped: a condition for every weight, needed twice,
  // would take more registers than there are.
  REGARD_DEVICE void make_dlogits(Scores& ds, const Scores& weights, int stage,
                                  const Step& step) const {
    const float scale = kOn.dropout ? float(keep_scale(at.p.dropout)) : 1.0f;
#pragma unroll
    for (int n = 0; n < kScoreBlocks; ++n) {
      const Bits128 states = load_states(stage, n);
      const float delta[2] = {float_of(states.word[1]), float_of(states.word[3])};
#pragma unroll
      for (int m = 0; m < kN; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float weight = weights[m][n][e];
          float& x = ds[m][n][e];
          if constexpr (kOn.dropout) {
            x = relu(weight) * x * scale - magnitude_of(weight) * delta[e % 2];
          } else {
            x = weight * (x - delta[e % 2]);
          }
          if (kHides && kTestsEveryTile && weight == 0) x = 0;
        }
      }
    }
    if (kHides && !kTestsEveryTile && !at.is_whole(step)) clear_unweighed(ds, weights);
  }
  // A hidden pair must not receive NaN from its row or key.
  static REGARD_DEVICE void clear_unweighed(Scores& ds, const Scores& weights) {
#pragma unroll
    for (int m = 0; m < kN; ++m) {
#pragma unroll
      for (int n = 0; n < kScoreBlocks; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) ds[m][n][e] = weights[m][n][e] == 0 ? 0 : ds[m][n][e];
      }
    }
  }
  // From these to the gradients of the scaled products.
  static REGARD_DEVICE void apply_slopes(Scores& ds, const Scores& slopes) {
#pragma unroll
    for (int m = 0; m < kN; ++m) {
#pragma unroll
      for (int n = 0; n < kScoreBlocks; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          ds[m][n][e] = ds[m][n][e] == 0 ? 0.0f : ds[m][n][e] * slopes[m][n][e];
        }
      }
    }
  }
};

}  // namespace regard
