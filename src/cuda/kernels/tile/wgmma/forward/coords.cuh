// The coordinates of a consumer warp in a tile: which rows and keys the accumulators of a lane are,
// and where their bias and mask lie in memory and in shared memory.
#pragma once

#include "cuda/kernels/tile/mask_copy.cuh"
#include "cuda/kernels/tile/score_tile.cuh"
#include "cuda/kernels/tile/wgmma/forward/memory.cuh"

namespace regard {

template <KernelConfig kConfig>
struct WarpgroupCoords {
  using Memory = ForwardMemory<kConfig>;
  static constexpr int kM = 1;
  static constexpr int kRows = kConfig.tiling.rows, kKeys = kConfig.tiling.keys;
  static constexpr int kKeyBlocks = kKeys / 8, kOutBlocks = out_columns(kConfig) / 8;
  static_assert(kKeys % 16 == 0 && kConfig.dim % 16 == 0 && out_columns(kConfig) % 16 == 0);
  static_assert(kRows == kWarpgroupRows * consumers_of(kConfig.tiling));

  using Scores = Accumulator[kM][kKeyBlocks];
  using Out = Accumulator[kOutBlocks];

  struct Row {
    int head;
    int i;
  };

  const KernelParams& params;
  const Problem& p;
  const ShortSequence seq;
  const int b, head;
  const int first_row, row_count;  // of the tile
  const int warp_row;              // the warp's first row in the tile
  const int tile_map_row;          // set only with a tile map

  REGARD_DEVICE WarpgroupCoords(const KernelParams& kernel_params, const ForwardTile<kConfig>& tile,
                                int first_row_of_warp)
      : params(kernel_params),
        p(kernel_params.problem),
        seq(sequence_of(p, tile)),
        b(tile.b),
        head(tile.head),
        first_row(tile.first_row),
        row_count(tile.row_count),
        warp_row(first_row_of_warp),
        tile_map_row(map_row_of(tile)) {}

  static REGARD_DEVICE int map_row_of(const ForwardTile<kConfig>& tile) {
    if constexpr (kConfig.tile_map) return tile.map_row;
    return 0;
  }
  REGARD_DEVICE int map_row() const { return tile_map_row; }

  static REGARD_DEVICE ShortSequence sequence_of(const Problem& p,
                                                 const ForwardTile<kConfig>& tile) {
    if constexpr (!kConfig.varlen) return {int(p.sizes.len_q), int(p.sizes.len_k), 0, 0};
    return {tile.len_q, tile.len_k, tile.first_q, tile.first_k};
  }

  REGARD_DEVICE Row row_at(int row) const { return {head, first_row + row}; }
  // The row of accumulator elements 2 half and 2 half + 1, and the column of element e of block n.
  REGARD_DEVICE int row_of(int, int half) const { return warp_row + half * 8 + lane_index() / 4; }
  static REGARD_DEVICE int column_of(int n, int e) { return n * 8 + lane_index() % 4 * 2 + e; }

  // The keys that intervals show to every row of the warpgroup.
  REGARD_DEVICE ShortInterval common_keys(int warpgroup_row) const {
    if (!kConfig.features.interval) return {0, seq.len_k};
    const int last = seq.len_q - 1;
    const int first = smaller(first_row + warpgroup_row, last);
    const auto band = band_of<kConfig>(p, seq, b);
    return {band.begin_of(smaller(first + kWarpgroupRows - 1, last)), band.end_of(first)};
  }
  // The end of the keys that intervals show to some row of the warpgroup.
  REGARD_DEVICE int last_key_end(int warpgroup_row) const {
    const int last = smaller(first_row + warpgroup_row + kWarpgroupRows, seq.len_q) - 1;
    return band_of<kConfig>(p, seq, b).end_of(last);
  }

  // ------------------------------------------------------------------------- staged bias and mask

  // Tiles of all rows. Each warp copies (except by TMA) and reads its own rows.
  REGARD_DEVICE TileView bias_tile(int) const {
    return {Memory().begin + Memory::kLayout.bias, bias_row_bytes(kConfig)};
  }
  REGARD_DEVICE TileView mask_tile(int) const {
    return {Memory().begin + Memory::kLayout.mask, mask_row_bytes(kConfig)};
  }

  // The bias of a row and eight keys, 16 bits each.
  REGARD_DEVICE SharedAddress bias_piece(int row, int piece) const {
    if constexpr (kConfig.bias.by_tma) {
      uint32 now = uint32(row);
      make_opaque(now);  // or the addresses of all pieces are kept in registers
      return Memory().bias(piece / 8) + swizzled_offset(int(now), piece % 8);
    }
    const TileView tile = bias_tile(0);
    return tile.begin + row * tile.row_bytes + piece * 16;
  }
  // The bias of the warp's rows and 16 keys, as a fragment of an A operand.
  REGARD_DEVICE void load_bias_fragment(uint32 (&words)[4], int k) const {
    const int lane = lane_index();
    ldmatrix(words, bias_piece(warp_row + lane % 16, k * 2 + lane / 16));
  }
  // The bias of a row and two keys.
  REGARD_DEVICE SharedAddress bias_pair(int, int row, int column) const {
    if constexpr (kConfig.bias.by_tma) return bias_piece(row, column / 8) + column % 8 * 2;
    const TileView tile = bias_tile(0);
    return tile.begin + row * tile.row_bytes + column * element_bytes(kConfig.bias.type);
  }

  // The warp's rows of a bias or mask in memory, from a key on.
  struct TermRows {
    const WarpgroupCoords& at;
    const View& view;
    int bytes;
    int first_key;
    REGARD_DEVICE const uint8* row(int r) const {
      const int64 first = offset_of(view.strides, at.b, at.head, 0, at.row_at(at.warp_row + r).i);
      return static_cast<const uint8*>(view.data) + (first + first_key) * bytes;
    }
  };
  REGARD_DEVICE TileView of_warp(const TileView& tile) const {
    return {tile.begin + warp_row * tile.row_bytes, tile.row_bytes};
  }

  // Whether bulk copies can load the bias of a key block: rows of a multiple of 16 bytes.
  REGARD_DEVICE bool bulk_loads_bias(int first_key) const {
    if constexpr (!stages_bias(kConfig) || kConfig.bias.by_tma || kConfig.bias.one_row ||
                  stages_mask(kConfig)) {
      return false;
    }
    return smaller(seq.len_k - first_key, kKeys) * element_bytes(kConfig.bias.type) % 16 == 0;
  }
  // Keys past the end are left as they are, because their pairs are hidden. Rows past the end are
  // cleared, because the row sums of a whole warp decide whether a block is computed again.
  REGARD_DEVICE void bulk_load_bias(int first_key, SharedAddress barrier) const {
    if constexpr (stages_bias(kConfig)) {
      constexpr int kBytes = element_bytes(kConfig.bias.type);
      const int rows = clamp_to(row_count - warp_row, 0, 16), row = lane_index();
      const int bytes = clamp_to(seq.len_k - first_key, 0, kKeys) * kBytes;
      if (row == 0) mbarrier_arrive_expect_tx(barrier, rows * bytes);
      sync_warp();
      const TermRows from{*this, p.bias, kBytes, first_key};
      const TileView tile = of_warp(bias_tile(0));
      const SharedAddress to = tile.begin + row * tile.row_bytes;
      if (row < rows && bytes > 0) {
        bulk_load(to, from.row(row), bytes, barrier);
      } else if (row < 16) {
#pragma unroll 1
        for (int n = 0; n < kKeys * kBytes; n += 16) store_shared_128(to + n, {});
      }
      sync_warp();
    }
  }

  // The bias and mask of a key block by cp.async, after sync_warp.
  REGARD_DEVICE void load_terms(const KeyBlock& block) const {
    constexpr int kWarpRows = 16;
    const int first_key = block.first_key;
    const int rows = row_count - warp_row, columns = seq.len_k - first_key;
    if constexpr (stages_bias(kConfig)) {
      constexpr int kBytes = element_bytes(kConfig.bias.type);
      load_tile<32, kWarpRows, kKeys, kBytes, true, false>(
          of_warp(bias_tile(0)), rows, columns, TermRows{*this, p.bias, kBytes, first_key},
          lane_index());
    }
    if constexpr (stages_mask(kConfig)) {
      // A tile that the mask shows as a whole needs none of it.
      if (!kConfig.tile_map || !block.is_full) {
        load_mask_tile<32, kWarpRows, kKeys, kConfig.mask.copy_bytes>(
            of_warp(mask_tile(0)), rows, columns, first_key, 1,
            TermRows{*this, p.mask, 1, first_key}, lane_index());
      }
    }
    cp_async_commit();
  }
};

}  // namespace regard
