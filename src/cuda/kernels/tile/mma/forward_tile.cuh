// The tile of a block of the forward kernel: which rows and keys it has, where their tiles lie in
// shared memory and how they get there, and which of their elements a lane holds.
#pragma once

#include "cuda/kernels/params.h"
#include "cuda/kernels/tile/mask_copy.cuh"
#include "cuda/kernels/tile/score_tile.cuh"
#include "cuda/kernels/tile/tile_map.cuh"

namespace regard {

template <KernelConfig kConfig>
struct ForwardTileMma {
  using F = FragmentsOf<kConfig>;
  static constexpr Features kOn = kConfig.features;
  static constexpr Tiling kTiling = kConfig.tiling;
  static constexpr ForwardMmaLayout kLayout = forward_mma_layout(kConfig);
  static constexpr int kBlockThreads = kTiling.warps * 32, kKeyWarps = kTiling.key_warps;
  static constexpr int kThreads = kBlockThreads / kKeyWarps;  // that loop over keys together
  static constexpr int kRows = kTiling.rows, kKeys = kTiling.keys;
  static constexpr int kM = kRows * kTiling.slices * kKeyWarps / kTiling.warps / 16;
  static constexpr int kColumns = kConfig.dim_v / kTiling.slices;  // of out, a warp's
  static constexpr int kKeyBlocks = kKeys / 8, kOutBlocks = kColumns / 8;
  static_assert(kM * kTiling.warps * 16 == kRows * kTiling.slices * kKeyWarps);
  static_assert(kKeyBlocks % 2 == 0);
  static_assert(kOutBlocks % 2 == 0 && kKeys % F::kStep == 0);

  // A warp's part of the tile of S, and of out.
  using Scores = Accumulator[kM][kKeyBlocks];
  using Out = Accumulator[kM][kOutBlocks];

  struct Row {
    int head;
    int i;
  };

  const KernelParams& params;
  const Problem& p;
  const ShortSequence seq;
  const int group;  // query heads that share keys
  const int b, kv;
  const int head;       // the first query head of the tile
  const int first_row;  // of the tile, among the rows of the head (pack_gqa: of the group)
  const int row_count;
  const int split;
  const SharedAddress shared;

  REGARD_DEVICE ForwardTileMma(const KernelParams& kernel_params, const BlockCoords& place)
      : ForwardTileMma(kernel_params, place, divide(place.head, kernel_params.by.entry)) {}
  // at: of the batch entry, and of the tile's head in it.
  REGARD_DEVICE ForwardTileMma(const KernelParams& kernel_params, const BlockCoords& place,
                               const Divided& at)
      : params(kernel_params),
        p(kernel_params.problem),
        seq(short_sequence<kConfig>(p, at.quotient)),
        group(group_of(params)),
        b(at.quotient),
        kv(kConfig.pack_gqa ? at.rest : divide(at.rest, params.by.query_heads).quotient),
        head(kConfig.pack_gqa ? at.rest * group : at.rest),
        first_row(place.tile * kRows),
        row_count(clamp_to(seq.len_q * (kConfig.pack_gqa ? group : 1) - first_row, 0, kRows)),
        split(place.split),
        shared(shared_address(&shared_memory<uint8>())) {}

  static REGARD_DEVICE BlockCoords of_block(const KernelParams& params) {
    BlockCoords place = block_coords(params, block_index());
    // The last rows see the most keys under a causal mask, so they start first.
    if (kOn.interval) place.tile = params.grid.tiles - 1 - place.tile;
    return place;
  }
  REGARD_DEVICE int64 map_row() const {
    return regard::map_row(p, kConfig, b, head, seq.first_q, first_row / kRows);
  }
  REGARD_DEVICE TileMap<kConfig> map() const {
    if constexpr (!kConfig.tile_map) return {};
    return TileMap<kConfig>::at(params, map_row());
  }

  REGARD_DEVICE Row row_at(int row) const {
    int index = first_row + row;
    if constexpr (kConfig.pack_gqa) {
      index = smaller(index, seq.len_q * group - 1);  // rows that do not exist
      if constexpr (kConfig.varlen) return {head + index / seq.len_q, index % seq.len_q};
      const Divided at = divide(index, params.by.rows);
      return {head + at.quotient, at.rest};
    }
    return {head, index};
  }

  // The key tiles of this split that some row sees.
  REGARD_DEVICE ShortInterval key_tiles() const {
    Interval seen{0, seq.len_k};
    if (kOn.interval) seen = {keys_of(first_query()).begin, keys_of(last_query()).end};
    ShortInterval tiles{int(seen.begin) / kKeys, int(divide_up(seen.end, kKeys))};
    return kConfig.split_kv ? tiles_of_split(tiles, params.splits, split) : tiles;
  }
  // The keys that every row of the tile sees, as far as intervals say.
  REGARD_DEVICE ShortInterval common_keys() const {
    if (!kOn.interval) return {0, seq.len_k};
    return {int(keys_of(last_query()).begin), int(keys_of(first_query()).end)};
  }
  // The tile's rows are among these queries; with pack_gqa, queries start over with each head.
  REGARD_DEVICE int first_query() const { return kConfig.pack_gqa ? 0 : first_row; }
  REGARD_DEVICE int last_query() const {
    return kConfig.pack_gqa ? seq.len_q - 1 : first_row + row_count - 1;
  }
  REGARD_DEVICE Interval keys_of(int i) const { return keys_of_row<kConfig>(p, seq, b, i); }

  // -------------------------------------------------------------------------------------- a lane's

  // Which warp (or group of warps) of those that split the keys this is, and the thread within it.
  static REGARD_DEVICE int key_warp() { return thread_index() / kThreads; }
  static REGARD_DEVICE int key_warp_thread() { return thread_index() % kThreads; }
  REGARD_DEVICE int warp_row() const {
    return warp_index() % (kThreads / 32) / kTiling.slices * kM * 16;
  }
  REGARD_DEVICE int warp_column() const { return warp_index() % kTiling.slices * kColumns; }

  // The row and column of accumulator element 2 half + e of block [m][n].
  REGARD_DEVICE int row_of(int m, int half) const {
    return warp_row() + m * 16 + half * 8 + lane_index() / 4;
  }
  static REGARD_DEVICE int column_of(int n, int e) { return n * 8 + lane_index() % 4 * 2 + e; }

  // ----------------------------------------------------------------------------------------- tiles

  REGARD_DEVICE SharedAddress stage_at(int stage) const {
    return shared + kLayout.stage + key_warp() * kLayout.key_warp_bytes +
           stage * kLayout.stage_bytes;
  }
  REGARD_DEVICE TileView query_tile() const {
    return {shared + kLayout.queries, tile_row_bytes(kConfig, kConfig.dim)};
  }
  REGARD_DEVICE TileView out_tile() const {
    return {shared + kLayout.queries, tile_row_bytes(kConfig, kConfig.dim_v)};
  }
  REGARD_DEVICE TileView key_tile(int stage) const {
    return {stage_at(stage) + kLayout.keys, staged_row_bytes(kConfig, kConfig.dim),
            is_swizzled(kConfig, kConfig.dim)};
  }
  REGARD_DEVICE TileView value_tile(int stage) const {
    return {stage_at(stage) + kLayout.values, staged_row_bytes(kConfig, kConfig.dim_v),
            is_swizzled(kConfig, kConfig.dim_v)};
  }
  REGARD_DEVICE TileView bias_tile(int stage) const {
    return {stage_at(stage) + kLayout.bias, bias_row_bytes(kConfig)};
  }
  // The staged bias of a row and two keys of the block.
  REGARD_DEVICE SharedAddress bias_pair(int stage, int row, int column) const {
    const TileView tile = bias_tile(stage);
    return tile.begin + row * tile.row_bytes + column * element_bytes(kConfig.bias.type);
  }
  REGARD_DEVICE TileView mask_tile(int stage) const {
    return {stage_at(stage) + kLayout.mask, mask_row_bytes(kConfig)};
  }

  // ----------------------------------------------------------------------------------------- loads

  // The rows of the tile of Q, of several heads.
  struct PackedQueryRows {
    const ForwardTileMma& at;
    REGARD_DEVICE const uint8* row(int r) const {
      const View& q = at.p.q;
      const Row row = at.row_at(r);
      const int64 first = offset_of(q.strides, at.b, row.head, at.seq.first_q, row.i);
      return static_cast<const uint8*>(q.data) + first * F::kBytes;
    }
  };
  REGARD_DEVICE RowsInMemory rows_of(const View& view, int first_key) const {
    const int64 first = offset_of(view.strides, b, kv, seq.first_k, first_key) * F::kBytes;
    return {static_cast<const uint8*>(view.data) + first, view.strides.row * F::kBytes};
  }

  REGARD_DEVICE void load_queries() const {
    constexpr int kDim = kConfig.dim, kBytes = F::kBytes;
    constexpr bool kAligned = kConfig.aligned, kExact = kConfig.exact_dims;
    const int dim = int(p.sizes.dim);
    if constexpr (kConfig.pack_gqa) {
      load_tile<kBlockThreads, kRows, kDim, kBytes, kAligned, kExact>(query_tile(), row_count, dim,
                                                                      PackedQueryRows{*this});
    } else {
      const View& q = p.q;
      const int64 first = offset_of(q.strides, b, head, seq.first_q, first_row) * kBytes;
      load_tile_in_steps<kBlockThreads, kRows, kDim, kBytes, kAligned, kExact>(
          query_tile(), row_count, dim,
          RowsInMemory{static_cast<const uint8*>(q.data) + first, q.strides.row * kBytes},
          thread_index());
    }
  }
  REGARD_DEVICE void load_keys(int stage, const KeyBlock& block) const {
    const int first_key = block.first_key;
    load_rows<kConfig.dim>(key_tile(stage), first_key, p.sizes.dim, p.k);
    if constexpr (stages_bias(kConfig)) load_bias(stage, first_key);
    if constexpr (stages_mask(kConfig)) {
      // A tile that the mask shows as a whole needs none of it.
      if (!kConfig.tile_map || !block.is_full) load_mask(stage, first_key);
    }
  }
  REGARD_DEVICE void load_values(int stage, int first_key) const {
    load_rows<kConfig.dim_v>(value_tile(stage), first_key, p.sizes.dim_v, p.v);
  }
  template <int kWidth>
  REGARD_DEVICE void load_rows(const TileView& tile, int first_key, int64 dim,
                               const View& view) const {
    const int rows = seq.len_k - first_key;
    if constexpr (kKeyWarps > 1) {
      load_tile_in_steps<kThreads, kKeys, kWidth, F::kBytes, kConfig.aligned, kConfig.exact_dims>(
          tile, rows, int(dim), rows_of(view, first_key), key_warp_thread());
    } else {
      load_tile<kThreads, kKeys, kWidth, F::kBytes, kConfig.aligned, kConfig.exact_dims>(
          tile, rows, int(dim), rows_of(view, first_key));
    }
  }
  // Rows of a bias or mask from a key on, one for each query or one for all.
  struct TermRows {
    const ForwardTileMma& at;
    const View& view;
    int bytes;
    int first_key;
    REGARD_DEVICE const uint8* row(int r) const {
      const Row row = at.row_at(r);
      const int64 first = offset_of(view.strides, at.b, row.head, 0, row.i);
      return static_cast<const uint8*>(view.data) +
             (first + first_key * view.strides.column) * bytes;
    }
  };
  REGARD_DEVICE void load_bias(int stage, int first_key) const {
    constexpr int kBytes = element_bytes(kConfig.bias.type), kStaged = bias_rows(kConfig);
    load_tile<kThreads, kStaged, kKeys, kBytes, kConfig.bias.aligned, false>(
        bias_tile(stage), smaller(row_count, kStaged), seq.len_k - first_key,
        TermRows{*this, p.bias, kBytes, first_key}, key_warp_thread());
  }
  REGARD_DEVICE void load_mask(int stage, int first_key) const {
    constexpr int kStaged = mask_rows(kConfig);
    load_mask_tile<kThreads, kStaged, kKeys, kConfig.mask.copy_bytes>(
        mask_tile(stage), smaller(row_count, kStaged), seq.len_k - first_key, first_key,
        p.mask.strides.column, TermRows{*this, p.mask, 1, first_key}, key_warp_thread());
  }
};

}  // namespace regard
