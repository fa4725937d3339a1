// What the forward kernel does to single scores: terms, hidden pairs, dropout.
#pragma once

#include "cuda/kernels/tile/mask_bits.cuh"
#include "cuda/kernels/tile/score_tile.cuh"
#include "cuda/kernels/tile/span_bits.cuh"
#include "cuda/kernels/tile/tile_map.cuh"

namespace regard {

// Coords says which rows and keys a lane's accumulators are: ForwardTileMma, WarpgroupCoords.
template <KernelConfig kConfig, class CoordsOfRows>
struct ForwardScores {
  using Coords = CoordsOfRows;
  using Scores = typename Coords::Scores;
  static constexpr Features kOn = full_tile_features(kConfig);
  static constexpr int kM = Coords::kM, kKeys = Coords::kKeys, kKeyBlocks = Coords::kKeyBlocks;
  static constexpr int kLines = 2 * kM;  // rows of a lane, in the order of its accumulators
  using Bits = LaneBits<kKeyBlocks>;
  // What a mask that is read as bits shows of a block.
  struct SeenKeys {
    Bits of[kLines];
  };

  const Coords at;
  ScoreTerms<kConfig> terms;
  ShortInterval common_keys;

  REGARD_DEVICE explicit ForwardScores(const Coords& place)
      : at(place), terms(at.p, at.seq, at.b, at.head) {}

  // The tile must have rows.
  REGARD_DEVICE void find_common_keys() { common_keys = at.common_keys(); }

  // Begins to read what hide will need of a partial block, spans to the L1 cache.
  REGARD_DEVICE void read_seen(SeenKeys& seen, const KeyBlock& block) const {
    if (!kConfig.tile_map || block.is_full) return;
    if constexpr (kConfig.mask.as_bits) {
      const uint8* const tile =
          mask_bits_of_tile<kConfig>(at.params, at.map_row(), block.first_key / kKeys);
#pragma unroll
      for (int line = 0; line < kLines; ++line) {
        seen.of[line] = read_mask_bits<kConfig>(tile, at.row_of(line / 2, line % 2));
      }
    }
    if constexpr (kConfig.features.row_spans) {
#pragma unroll
      for (int line = 0; line < kLines; ++line) prefetch_l1(spans_of_row(query_of(line)).ends);
    }
    if constexpr (kConfig.features.key_spans) {
#pragma unroll
      for (int first = 0; first < kKeys; first += 32) {
        const int key = block.first_key + first + lane_index();
        if (key < at.seq.len_k) prefetch_l1(spans_of_key(key).ends);
      }
    }
  }
  // The query of a line; of a row that does not exist, which is hidden anyway, the last one.
  REGARD_DEVICE int query_of(int line) const {
    return smaller(at.row_at(at.row_of(line / 2, line % 2)).i, at.seq.len_q - 1);
  }
  REGARD_DEVICE Spans spans_of_row(int i) const {
    return spans_of(at.p.row_spans, at.b, at.head, at.seq.first_q, i);
  }
  REGARD_DEVICE Spans spans_of_key(int j) const {
    return spans_of(at.p.key_spans, at.b, at.head, at.seq.first_k, j);
  }

  // From products to logits; hidden pairs become -inf.
  REGARD_DEVICE void make_logits(Scores& scores, int stage, const KeyBlock& block,
                                 const SeenKeys& seen) const {
    const int first_key = block.first_key;
    if constexpr (!is_plain(kOn) || tests_pairs(kOn)) apply_terms(scores, stage, first_key);
    const bool is_cut = first_key < common_keys.begin || first_key + kKeys > common_keys.end;
    if (is_cut || !block.is_full) hide(scores, stage, block, is_cut, seen);
  }

  REGARD_DEVICE void apply_terms(Scores& scores, int stage, int first_key) const {
#pragma unroll
    for (int n = 0; n < kKeyBlocks; ++n) {
      float bias[2] = {};
      bool seen[2] = {true, true};
      if constexpr (kConfig.bias.one_row) read_bias(bias, stage, 0, n);
      if constexpr (kOn.mask && kConfig.mask.one_row) read_mask(seen, stage, 0, n);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = at.row_of(m, half);
          const int i = at.row_at(row).i;
          const ScoreTerms<kConfig> of_row = terms_of(row);
          const float position = of_row.position(i, first_key + at.column_of(0, 0));
          if constexpr (stages_bias(kConfig) && !kConfig.bias.one_row) {
            read_bias(bias, stage, row, n);
          }
          if constexpr (kOn.mask && stages_mask(kConfig) && !kConfig.mask.one_row) {
            read_mask(seen, stage, row, n);
          }
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int j = first_key + at.column_of(n, e);
            const bool exists = row < at.row_count && j < at.seq.len_k;
            if constexpr (kOn.bias && !stages_bias(kConfig)) {
              bias[e] = exists ? of_row.bias_at(i, j) : 0.0f;
            }
            if constexpr (kOn.mask && !stages_mask(kConfig)) seen[e] = exists && of_row.shows(i, j);
            float& score = scores[m][n][half * 2 + e];
            score = of_row.value(score, bias[e], position - float(n * 8 + e));
            if (kOn.bias && bias[e] == -infinity<float>()) score = -infinity<float>();
            if (kOn.mask && !seen[e]) score = -infinity<float>();
            if constexpr (has_spans(kOn)) {
              if (!spans_show<kConfig>(at.p, at.seq, at.b, at.row_at(row).head, i, j)) {
                score = -infinity<float>();
              }
            }
          }
        }
      }
    }
  }
  // The staged bias of a row's two keys of a block.
  REGARD_DEVICE void read_bias(float (&bias)[2], int stage, int row, int n) const {
    load_staged_pair<kConfig.bias.type>(bias, at.bias_pair(stage, row, at.column_of(n, 0)));
  }
  // Whether the staged mask shows them; pairs that do not exist are hidden.
  REGARD_DEVICE void read_mask(bool (&seen)[2], int stage, int row, int n) const {
    const TileView tile = at.mask_tile(stage);
    const uint32 bytes = load_shared_16(tile.begin + row * tile.row_bytes + at.column_of(n, 0));
    seen[0] = (bytes & 0xff) != 0;
    seen[1] = bytes >> 8 != 0;
  }
  // The terms of the row's own head.
  REGARD_DEVICE ScoreTerms<kConfig> terms_of(int row) const {
    if constexpr (!kConfig.pack_gqa) {
      return terms;
    } else {
      return ScoreTerms<kConfig>(at.p, at.seq, at.b, at.row_at(row).head);
    }
  }

  // Pairs that do not exist, that intervals hide, or that mask and spans hide with a tile map.
  // `is_cut`: intervals or the last key may hide some.
  REGARD_DEVICE void hide(Scores& scores, int stage, const KeyBlock& block, bool is_cut,
                          const SeenKeys& seen) const {
    if (!kConfig.tile_map || is_cut || any_in_warp(at.row_of(kM - 1, 1) >= at.row_count)) {
      hide_by_intervals(scores, block.first_key);
    }
    if constexpr (kConfig.tile_map) {
      if (block.is_full) return;
      constexpr bool kMask = kConfig.features.mask && !kConfig.mask.as_bits;
      if constexpr (kMask) hide_by_mask(scores, stage, block.first_key);
      if constexpr (kConfig.mask.as_bits || has_spans(kConfig.features)) {
        hide_unseen(scores, block.first_key, seen);
      }
    }
  }
  REGARD_DEVICE void hide_by_intervals(Scores& scores, int first_key) const {
    const auto band = band_of<kConfig>(at.p, at.seq, at.b);
    const int first_column = first_key + at.column_of(0, 0);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = at.row_of(m, half);
        int i = at.row_at(row).i;
        if constexpr (kConfig.features.positions) i = smaller(i, at.seq.len_q - 1);  // in the table
        const ShortInterval keys = band.keys_of(i);
        const int begin = keys.begin - first_column;
        const int end = row < at.row_count ? keys.end - first_column : 0;
        hide_columns(scores[m], half, [&](int column) { return column >= end; });
        // Mostly none: a vote over the warp's rows is cheaper than testing their keys.
        if (any_in_warp(begin > 0)) {
          hide_columns(scores[m], half, [&](int column) { return column < begin; });
        }
      }
    }
  }
  REGARD_DEVICE void hide_by_mask(Scores& scores, int stage, int first_key) const {
#pragma unroll
    for (int n = 0; n < kKeyBlocks; ++n) {
#pragma unroll
      for (int line = 0; line < 2 * kM; ++line) {
        const int row = at.row_of(line / 2, line % 2), i = at.row_at(row).i;
        bool seen[2];
        if constexpr (stages_mask(kConfig))
          read_mask(seen, stage, kConfig.mask.one_row ? 0 : row, n);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int j = first_key + at.column_of(n, e);
          if constexpr (!stages_mask(kConfig)) {
            seen[e] = row < at.row_count && j < at.seq.len_k && terms.shows(i, j);
          }
          if (!seen[e]) scores[line / 2][n][line % 2 * 2 + e] = -infinity<float>();
        }
      }
    }
  }
  // What a mask's bits and spans hide.
  REGARD_DEVICE void hide_unseen(Scores& scores, int first_key, const SeenKeys& of_mask) const {
    constexpr Features kSpans = kConfig.features;
    const int first = first_key + at.column_of(0, 0), length = at.seq.len_k;
    Bits seen[kLines];
    int rows[kLines];
#pragma unroll
    for (int line = 0; line < kLines; ++line) {
      rows[line] = query_of(line);
      seen[line] = kConfig.mask.as_bits ? of_mask.of[line] : ~Bits(0);
      if constexpr (kSpans.row_spans) {
        seen[line] &= columns_in<Bits>(spans_of_row(rows[line]), first, length);
      }
    }
    if constexpr (kSpans.key_spans) {
      keep_columns_around<kKeyBlocks>(seen, rows, first, length,
                                      [&](int key) { return spans_of_key(key); });
    }
#pragma unroll
    for (int line = 0; line < kLines; ++line) {
#pragma unroll
      for (int bit = 0; bit < 2 * kKeyBlocks; ++bit) {
        float& score = scores[line / 2][bit / 2][line % 2 * 2 + bit % 2];
        if ((seen[line] >> bit & 1) == 0) score = -infinity<float>();
      }
    }
  }
  // Columns count from the lane's first.
  template <class IsHidden>
  static REGARD_DEVICE void hide_columns(Accumulator (&scores)[kKeyBlocks], int half,
                                         IsHidden is_hidden) {
#pragma unroll
    for (int n = 0; n < kKeyBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (is_hidden(n * 8 + e)) scores[n][half * 2 + e] = -infinity<float>();
      }
    }
  }

  // Clears dropped weights. One Philox call serves a lane's eight elements of a row in 32 keys.
  REGARD_DEVICE void drop(Scores& weights, int first_key, const DropoutParams& of_call) const {
    static_assert(!kOn.dropout || kKeys % 32 == 0 || kKeys == 16);
    const DropoutParams& dropout = dropout_of_tile<kConfig>(of_call);
    const uint32 threshold = dropout.threshold << 16;
    // Whether a tile of 16 keys is the second half of 32.
    const bool late = kKeys == 16 && first_key % 32 != 0;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto row = at.row_at(at.row_of(m, half));
#pragma unroll
        for (int first = 0; first < kKeyBlocks; first += 4) {
          const uint32 call = dropout_call(first_key + at.column_of(first, 0));
          const Philox bits = dropout_bits_of<kConfig>(at.p, dropout, at.b, row.head, row.i, call);
#pragma unroll
          for (int n = first; n < first + 4 && n < kKeyBlocks; ++n) {
            const uint32 word = late ? bits.word[2 + n % 2] : bits.word[n % 4];
            if ((word << 16) < threshold) weights[m][n][half * 2] = 0;
            if (word < threshold) weights[m][n][half * 2 + 1] = 0;
          }
        }
      }
    }
  }
};

}  // namespace regard
