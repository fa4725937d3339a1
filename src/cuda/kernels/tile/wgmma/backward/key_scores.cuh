// The elementwise steps of the warpgroups that have keys: from S^T to P^T, and from P^T and dP^T to
// dS^T.
#pragma once

#include "cuda/kernels/tile/mask_bits.cuh"
#include "cuda/kernels/tile/span_bits.cuh"
#include "cuda/kernels/tile/wgmma/backward/memory.cuh"
#include "cuda/kernels/tile/wgmma/dropout_bits.cuh"

namespace regard {

template <KernelConfig kConfig>
struct KeyScores {
  using Memory = BackwardMemory<kConfig>;
  using L = MmaLanes<kConfig.type>;
  using Format = typename ElementOf<kConfig.type>::Format;
  static constexpr Features kOn = full_tile_features(kConfig);
  static constexpr int kRows = Memory::kRows;
  static constexpr int kRowBlocks = kRows / 8, kRowSteps = kRows / 16;
  // The dropout warpgroup generates the bits. Else each lane does, where it needs them.
  static constexpr bool kReadsDropoutBits = has_backward_dropout_warpgroup(kConfig);
  static constexpr bool kGeneratesBits = kOn.dropout && !kReadsDropoutBits;
  // P^T is exp2 of a multiple of S^T, because the product has added -lse / scale.
  static constexpr bool kPlain = is_plain(kOn) && !tests_pairs(kOn) && !kGeneratesBits;
  // Signed P^T is P^T times the slope of the scores, negative where dropout drops the pair. dS^T is
  // made of it; without a slope and dropout, of P^T itself.
  static constexpr bool kHasSignedProbs = has_slope(kOn) || kOn.dropout;
  static constexpr bool kHidesAlways = tests_pairs(kOn) || kGeneratesBits;
  static constexpr bool kReadsBias = kOn.bias && !kConfig.bias.one_row;
  static constexpr bool kPacksBias = kReadsBias && element_bytes(kConfig.bias.type) == 2;
  static constexpr bool kHoldsBias = kPacksBias && !kHidesAlways;
  // Tiles whose bias hides no pair, and is not too low to be added as it is, take a shorter path.
  static constexpr bool kLooksAtBias =
      kOn.bias && !kHidesAlways && (kHoldsBias || kConfig.bias.one_row);
  static constexpr bool kAddsLse = adds_lse_by_product(kOn);
  static constexpr bool kAddsDelta = adds_delta_by_product(kOn);

  using Scores = Accumulator[kRowBlocks];  // [16 keys of a warp][rows of the tile]
  // The same in 16 bits, as operand A of a product; f32: as hi and lo parts.
  using Operand = uint32[Memory::kParts][kRowSteps][4];
  using BiasFragments = Fragments<kPacksBias ? kConfig.bias.type : Type::bf16, Products::direct>;
  using BiasTile = typename BiasFragments::A[kHoldsBias ? kRowSteps : 1];

  const KernelParams& params;
  const int warp_key;  // the warp's first key in the tile
  const float exponent = logit_unit(kOn, score_params<float>(params.problem)) * float(kLog2E);
  DropoutOf<kConfig> dropout = dropout_of<kConfig>(params.problem);

  // The key and the row of accumulator element 2 half + e of block n, within their tiles.
  REGARD_DEVICE int key_of(int half) const { return warp_key + half * 8 + lane_index() / 4; }
  static REGARD_DEVICE int row_of(int n, int e) { return n * 8 + lane_index() % 4 * 2 + e; }

  // Makes P^T and signed P^T. `stage` is Q's stage. `hides` says that intervals, or with a tile map
  // mask and spans, may hide pairs of the tile; the result says the same of these and the bias.
  REGARD_DEVICE bool make_probs(Operand& probs, Operand& signed_probs, Scores& scores,
                                const BackwardTask& task, const RowTile& tile, const Memory& memory,
                                int stage, int iteration, bool hides) const {
    if constexpr (!kPlain) {
      const auto products_of = [&](int n) {
        ScoreBlock products{scores[n], exponent};
        if constexpr (!kAddsLse) read_rows(products.lse, memory.lse(stage), n);
        return products;
      };
      return apply_terms(task, tile, memory, iteration, hides, products_of,
                         [&](int n, const float(&prob)[4], const float(&signed_prob)[4]) {
#pragma unroll
                           for (int half = 0; half < 2; ++half) {
                             const int at = n % 2 * 2 + half;
                             probs[0][n / 2][at] = pack<Format>(prob[half * 2], prob[half * 2 + 1]);
                             if constexpr (kHasSignedProbs) {
                               signed_probs[0][n / 2][at] =
                                   pack<Format>(signed_prob[half * 2], signed_prob[half * 2 + 1]);
                             }
                           }
                         });
    }
    if (hides) hide(scores, task, tile, memory, iteration);
#pragma unroll
    for (int n = 0; n < kRowBlocks; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float low = L::exp2(scores[n][half * 2] * exponent);
        const float high = L::exp2(scores[n][half * 2 + 1] * exponent);
        (kHasSignedProbs ? signed_probs : probs)[0][n / 2][n % 2 * 2 + half] =
            pack<Format>(low, high);
      }
    }
    return hides;
  }

  // Applies the bits of the dropout warpgroup: P^T becomes 0, and signed P^T negative.
  REGARD_DEVICE void apply_dropout(Operand& probs, Operand& signed_probs, uint32 bits) const {
    each_dropout_pair<kRowBlocks * 2>(bits, [&](int at, uint32 dropped) {
      uint32& own = signed_probs[0][at / 4][at % 4];
      uint32& prob = probs[0][at / 4][at % 4];
      prob = (has_slope(kOn) ? prob : own) & ~dropped;
      own |= dropped & 0x80008000;
    });
  }

  // The rows that see a lane's key under intervals, counted from the tile's first row. A key that
  // does not exist is seen by none.
  REGARD_DEVICE ShortInterval rows_of(const BackwardTask& task, const RowTile& tile,
                                      int half) const {
    const int j = task.first_key + key_of(half), first_row = tile.index * kRows;
    const Interval rows = rows_of_key<kConfig>(params.problem, task.seq, task.b, j);
    const int begin = int(rows.begin) - first_row;
    return {begin, j < task.seq.len_k ? int(rows.end) - first_row : begin};
  }
  REGARD_DEVICE void hide(Scores& scores, const BackwardTask& task, const RowTile& tile,
                          const Memory& memory, int iteration) const {
    SeenRows seen;
    find_seen(seen, task, tile, memory, iteration);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < kRowBlocks; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (!seen.has(half, n, e)) scores[n][half * 2 + e] = -infinity<float>();
        }
      }
    }
  }

  // Which of a lane's rows see each of its two keys: an interval, or with a tile map a bit for
  // each.
  struct SeenRows {
    ShortInterval rows[2];
    LaneBits<kRowBlocks> bits[2];

    REGARD_DEVICE bool has(int half, int n, int e) const {
      if constexpr (kConfig.tile_map) return (bits[half] >> (2 * n + e) & 1) != 0;
      return rows[half].begin <= row_of(n, e) && row_of(n, e) < rows[half].end;
    }
  };
  REGARD_DEVICE void find_seen(SeenRows& seen, const BackwardTask& task, const RowTile& tile,
                               const Memory& memory, int iteration) const {
    seen.bits[0] = seen.bits[1] = ~LaneBits<kRowBlocks>(0);
    if (kConfig.tile_map && !tile.is_full) find_shown(seen, task, tile, memory, iteration);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const ShortInterval rows = rows_of(task, tile, half);
      seen.rows[half] = rows;
      seen.bits[half] &=
          columns_between<LaneBits<kRowBlocks>>(rows.begin - row_of(0, 0), rows.end - row_of(0, 0));
    }
  }
  // What mask and spans show.
  REGARD_DEVICE void find_shown(SeenRows& seen, const BackwardTask& task, const RowTile& tile,
                                const Memory& memory, int iteration) const {
    if constexpr (has_spans(kConfig.features)) find_seen_by_spans(seen, task, tile);
    if constexpr (kConfig.mask.as_bits) {
      const SharedAddress of_tile = memory.mask_bits(Memory::query_stage(iteration));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        seen.bits[half] &= read_mask_bits<kConfig>(of_tile, key_of(half));
      }
    } else if constexpr (kConfig.features.mask) {
#pragma unroll
      for (int n = 0; n < kRowBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (!is_shown(memory, iteration, row_of(n, i % 2), key_of(i / 2))) {
            seen.bits[i / 2] &= ~(LaneBits<kRowBlocks>(1) << (2 * n + i % 2));
          }
        }
      }
    }
  }
  REGARD_DEVICE void find_seen_by_spans(SeenRows& seen, const BackwardTask& task,
                                        const RowTile& tile) const {
    const Problem& p = params.problem;
    const ShortSequence& seq = task.seq;
    const int first = tile.index * kRows + row_of(0, 0), last_key = seq.len_k - 1;
    int keys[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // A key that does not exist is hidden by its intervals.
      keys[half] = smaller(task.first_key + key_of(half), last_key);
      if constexpr (kConfig.features.key_spans) {
        seen.bits[half] &= columns_in<LaneBits<kRowBlocks>>(
            spans_of(p.key_spans, task.b, tile.head, seq.first_k, keys[half]), first, seq.len_q);
      }
    }
    if constexpr (kConfig.features.row_spans) {
      keep_columns_around<kRowBlocks>(seen.bits, keys, first, seq.len_q, [&](int row) {
        return spans_of(p.row_spans, task.b, tile.head, seq.first_q, row);
      });
    }
  }
  // Whether the staged mask shows a pair.
  REGARD_DEVICE static bool is_shown(const Memory& memory, int iteration, int row, int key) {
    const TileView tile = memory.mask_tile(iteration & 1);
    const int staged_row = kConfig.mask.one_row ? 0 : row;
    return load_shared_8(tile.begin + staged_row * tile.row_bytes + key) != 0;
  }

  // ----------------------------------------------------------------------------------------- terms

  // Eight rows of S^T.
  struct ScoreBlock {
    const Accumulator& x;
    float exponent;
    float lse[2] = {};  // of a lane's rows, unless the product has added it

    REGARD_DEVICE float raw(int i) const { return x[i]; }
    REGARD_DEVICE float prob(float score, int i) const {
      return weight_at<L>(score, exponent, lse[i % 2] * float(kLog2E));
    }
  };

  // Applies every score term, block by block, because logits and slopes of a whole tile would take
  // too many registers. `products_of(n)` returns a block, `emit(n, probs, signed_probs)` takes
  // its results. Returns whether some pairs may be hidden.
  template <class ProductsOf, class Emit>
  REGARD_DEVICE bool apply_terms(const BackwardTask& task, const RowTile& tile,
                                 const Memory& memory, int iteration, bool hides,
                                 ProductsOf products_of, Emit emit) const {
    BiasTile bias;
    if constexpr (kHoldsBias) read_bias_tile(bias, memory, iteration);
    bool by_bias = kOn.bias && !kLooksAtBias;
    if constexpr (kLooksAtBias) by_bias = any_in_warp(has_low_bias(bias, memory, iteration));
    if (hides || (kLooksAtBias && by_bias)) {
      apply_terms<true>(bias, task, tile, memory, iteration, products_of, emit);
    } else {
      apply_terms<false>(bias, task, tile, memory, iteration, products_of, emit);
    }
    return hides || by_bias;
  }
  template <bool kHides, class ProductsOf, class Emit>
  REGARD_DEVICE void apply_terms(const BiasTile& bias_tile, const BackwardTask& task,
                                 const RowTile& tile, const Memory& memory, int iteration,
                                 ProductsOf products_of, Emit emit) const {
    const ScoreTerms<kConfig> terms(params.problem, task.seq, task.b, tile.head);
    const float distance =
        terms.position(tile.index * kRows + row_of(0, 0), task.first_key + key_of(0));
    SeenRows seen;
    if constexpr (kHides) find_seen(seen, task, tile, memory, iteration);
    PairTerms pairs[2];
    read_key_terms(pairs, memory, iteration);
#pragma unroll
    for (int n = 0; n < kRowBlocks; ++n) {
      if (n % 2 == 0) read_bias(pairs, bias_tile, memory, iteration, n);
      read_mask(pairs[n % 2], memory, iteration, n);
      const auto products = products_of(n);
      uint32 bits[4] = {};
      if constexpr (kGeneratesBits) generate_bits(bits, task, tile, n);
      float probs[4], signed_probs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int half = i / 2, e = i % 2, row = row_of(n, e);
        const float raw = products.raw(i), bias = pairs[n % 2].bias[i];
        const float apart = distance + float(n * 8 + e - half * 8);
        bool hidden = kOn.mask && !pairs[n % 2].seen[i];
        float score;
        if constexpr (kLooksAtBias && !kHides) {
          score = terms.value_of_bias(raw, bias, apart);
        } else {
          score = terms.value(raw, bias, apart);
          if (kOn.bias && bias == -infinity<float>()) hidden = true;
        }
        if constexpr (has_spans(kOn)) {
          const int query = tile.index * kRows + row, key = task.first_key + key_of(half);
          if (!spans_show<kConfig>(params.problem, task.seq, task.b, tile.head, query, key)) {
            hidden = true;
          }
        }
        // The exponential of a hidden pair may be anything: its row may have no lse, or NaN.
        float prob = products.prob(score, i);
        if (kHides && !seen.has(half, n, e)) hidden = true;
        if (hidden) prob = 0;
        float signed_prob = prob;
        if constexpr (has_slope(kOn)) {
          signed_prob *= terms.slope_of(raw);
          if ((kHides || kHidesAlways) && prob == 0) signed_prob = 0;
        }
        if constexpr (kGeneratesBits) {
          const bool dropped = bits[i] < params.problem.dropout.threshold << 16;
          signed_prob = dropped ? -signed_prob : signed_prob;
          prob = dropped ? 0.0f : prob;
        }
        probs[i] = prob;
        signed_probs[i] = signed_prob;
      }
      emit(n, probs, signed_probs);
    }
  }

  // Reads lse or delta of a lane's two rows of block n.
  static REGARD_DEVICE void read_rows(float (&values)[2], SharedAddress of_tile, int n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      values[e] = float_of(load_shared_32(of_tile + row_of(n, e) * kRowTermBytes));
    }
  }

  // Bias and mask of a lane's elements of a block. In shared memory, pairs that do not exist are
  // masked.
  struct PairTerms {
    float bias[4];
    bool seen[4];
  };
  // Reads a bias or a mask that has one row for all rows.
  REGARD_DEVICE void read_key_terms(PairTerms (&pairs)[2], const Memory& memory,
                                    int iteration) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float bias = 0;
      bool seen = true;
      if constexpr (kConfig.bias.one_row) {
        bias = load_staged<kConfig.bias.type>(memory.bias_tile(iteration & 1).begin, key_of(i / 2));
      }
      if constexpr (kOn.mask && kConfig.mask.one_row) {
        seen = is_shown(memory, iteration, 0, key_of(i / 2));
      }
      pairs[0].bias[i] = pairs[1].bias[i] = bias;
      pairs[0].seen[i] = pairs[1].seen[i] = seen;
    }
  }
  // Reads a lane's bias of the whole tile.
  REGARD_DEVICE void read_bias_tile(BiasTile& bias, const Memory& memory, int iteration) const {
#pragma unroll
    for (int k = 0; k < kRowSteps; ++k) {
      BiasFragments::load_a_transposed(bias[k], memory.bias_tile(iteration & 1), warp_key, k * 16);
    }
  }
  // Whether some of a lane's bias is -inf, or so low that score() clamps it.
  REGARD_DEVICE bool has_low_bias(const BiasTile& bias, const Memory& memory, int iteration) const {
    if constexpr (kHoldsBias) {
      uint32 most = bias[0].word[0];
#pragma unroll
      for (int i = 1; i < kRowSteps * 4; ++i) {
        most = max_u16x2(most, bias[i / 4].word[i % 4]);
      }
      return has_low_half<kConfig.bias.type>(most);
    } else {
      PairTerms pairs[2];
      read_key_terms(pairs, memory, iteration);
      return !(pairs[0].bias[0] > kLowestBias<float> && pairs[0].bias[2] > kLowestBias<float>);
    }
  }
  // Reads the bias of blocks n and n + 1.
  REGARD_DEVICE void read_bias(PairTerms (&pairs)[2], const BiasTile& bias_tile,
                               const Memory& memory, int iteration, int n) const {
    if constexpr (kReadsBias) {
      if constexpr (!kPacksBias) {
        const TileView tile = memory.bias_tile(iteration & 1);
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
          BiasFragments::load_a_transposed(words, memory.bias_tile(iteration & 1), warp_key, n * 8);
        }
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          float(&bias)[4] = pairs[w / 2].bias;
          BiasFragments::unpack(words, w, bias[w % 2 * 2], bias[w % 2 * 2 + 1]);
        }
      }
    }
  }
  REGARD_DEVICE void read_mask(PairTerms& pairs, const Memory& memory, int iteration, int n) const {
    if constexpr (kOn.mask && !kConfig.mask.one_row) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        pairs.seen[i] = is_shown(memory, iteration, row_of(n, i % 2), key_of(i / 2));
      }
    }
  }

  // 16 random bits for each of a lane's elements, in the upper halves. One call of Philox covers
  // two neighbouring keys and one row, so two lanes need the same two calls: each makes one of
  // them.
  REGARD_DEVICE void generate_bits(uint32 (&bits)[4], const BackwardTask& task, const RowTile& tile,
                                   int n) const {
    const bool odd = lane_index() / 4 % 2;
    const bool late = warp_key % 32 >= 16;  // the second half of the call's 32 keys
    const Philox mine = dropout_bits_of<kConfig>(
        params.problem, dropout_of_tile<kConfig>(dropout), task.b, tile.head,
        tile.index * kRows + row_of(n, odd), dropout_call(task.first_key + key_of(0)));
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

  // Makes dS^T from signed P^T and dP^T. (Without dropout the product has subtracted delta from
  // dP^T.) A hidden pair gets 0, whatever its row and key hold.
  REGARD_DEVICE void make_dscores(Operand& ds, const Operand& signed_probs, const Scores& dprobs,
                                  const Memory& memory, int iteration, bool hides) const {
    if (kHidesAlways || hides) {
      make_dscores<true>(ds, signed_probs, dprobs, memory, iteration);
    } else {
      make_dscores<false>(ds, signed_probs, dprobs, memory, iteration);
    }
  }
  template <bool kHides>
  REGARD_DEVICE void make_dscores(Operand& ds, const Operand& signed_probs, const Scores& dprobs,
                                  const Memory& memory, int iteration) const {
    const float scale = kOn.dropout ? float(keep_scale(params.problem.dropout)) : 1.0f;
#pragma unroll
    for (int n = 0; n < kRowBlocks; ++n) {
      float delta[2] = {};
      if constexpr (!kAddsDelta) read_rows(delta, memory.delta(Memory::dout_stage(iteration)), n);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32 pair = signed_probs[0][n / 2][n % 2 * 2 + half];
        float d[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float p = widen<Format>(uint16(pair >> e * 16)), dp = dprobs[n][half * 2 + e];
          d[e] = kOn.dropout ? relu(p) * dp * scale - magnitude_of(p) * delta[e] : p * dp;
          if (kHides && p == 0) d[e] = 0;
        }
        ds[0][n / 2][n % 2 * 2 + half] = pack<Format>(d[0], d[1]);
      }
    }
  }
};

}  // namespace regard
