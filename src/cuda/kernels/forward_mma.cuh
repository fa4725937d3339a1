// Forward attention of a tile of query rows: out and lse, or a part of them over a range of keys.
//
// A warp owns 16 kM of the block's rows. K and V tiles come through shared memory, one tile ahead
// of the products. S[rows, keys] and out[rows, dim_v] are accumulators. P is computed in place of S
// and is the next product's operand without leaving the registers. With slices > 1, that many warps
// share rows, and each has a slice of out's columns.
#pragma once

#include "cuda/kernels/tile/mma/forward_step.cuh"
#include "cuda/kernels/tile/row_again.cuh"
#include "cuda/kernels/tile/row_part.cuh"

namespace regard {

template <KernelConfig kConfig>
struct ForwardMma : ForwardStep<kConfig> {
  using Step = ForwardStep<kConfig>;
  using Tile = ForwardTileMma<kConfig>;
  using Row = typename Tile::Row;
  using F = FragmentsOf<kConfig>;
  using L = MmaLanes<kConfig.type>;
  static constexpr Features kOn = kConfig.features;
  static constexpr Tiling kTiling = kConfig.tiling;
  static constexpr int kM = Tile::kM, kKeys = Tile::kKeys, kOutBlocks = Tile::kOutBlocks;
  using Step::at, Step::elementwise, Step::scores, Step::out, Step::softmax;
  using Step::keep_queries, Step::multiply_keys, Step::make_weights, Step::multiply_values;

  // ---------------------------------------------------------------------------- the main loop

  // Where a tile's copies are issued behind the first product of the tile before, not in front of
  // it: no product runs while a warp makes addresses. H200, causal, time of the one over the other:
  // D 128 0.90 to 0.95, D 64 0.98, D 80 and 96 1.02 and 1.04. Rows that are read element by element
  // come through registers, of which more are free in front of the product (1.7); D 128 with a bias
  // of keys 1.09, with a mask 1.02.
  static constexpr bool kLoadsLate = kConfig.aligned && !kConfig.bias.one_row && !kOn.mask &&
                                     larger(kConfig.dim, kConfig.dim_v) % 64 == 0;

  // Two stages: a tile's copies run during the previous tile.
  REGARD_DEVICE void loop_ahead(const VisibleTile& first, int end) {
    int stage = 0;
    for (VisibleTile tile = first, next; tile.index < end; tile = next) {
      next = at.map().first_from(tile.index + 1, end);
      cp_async_wait<0>();
      sync_block();
      if (tile.index == first.index) keep_queries();
      const auto load_next = [&] {
        if (next.index >= end) return;
        at.load_keys(stage ^ 1, block_of(next));
        at.load_values(stage ^ 1, next.index * kKeys);
        cp_async_commit();
      };
      if constexpr (!kLoadsLate) load_next();
      this->take(stage, block_of(tile), [&] {
        if constexpr (kLoadsLate) load_next();
      });
      stage ^= 1;
    }
  }

  // One stage: V is copied during the first product, the next K during the softmax and the second
  // product.
  REGARD_DEVICE void loop_over_tiles(const VisibleTile& first, int end) {
    for (VisibleTile tile = first, next; tile.index < end; tile = next) {
      next = at.map().first_from(tile.index + 1, end);
      cp_async_wait<0>();
      sync_block();
      at.load_values(0, tile.index * kKeys);
      cp_async_commit();
      if (tile.index == first.index) keep_queries();
      typename ForwardScores<kConfig, Tile>::SeenKeys seen;
      elementwise.read_seen(seen, block_of(tile));
      multiply_keys(0);
      elementwise.make_logits(scores, 0, block_of(tile), seen);
      cp_async_wait<0>();
      sync_block();
      if (next.index < end) at.load_keys(0, block_of(next));
      cp_async_commit();
      make_weights(tile.index * kKeys);
      multiply_values(0);
    }
  }
  static REGARD_DEVICE KeyBlock block_of(const VisibleTile& tile) {
    return {tile.index * kKeys, tile.is_full};
  }

  // ---------------------------------------------------------------------------------------- result

  REGARD_DEVICE void write() {
    uint32 rows_again[kM] = {};  // of each 16 rows
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      softmax.sum_over_lanes(m);
      if constexpr (kConfig.split_kv) {
        write_part(m);
      } else {
        rows_again[m] = finish_rows(m);
        write_out(m);
      }
    }
    if constexpr (kConfig.repeats_rows) {
#pragma unroll
      for (int m = 0; m < kM; ++m) compute_rows_again(m, rows_again[m]);
    }
  }

  REGARD_DEVICE bool holds_lse() const { return lane_index() % 4 == 0 && at.warp_column() == 0; }
  REGARD_DEVICE int64 row_index_of(const Row& row) const {
    return row.head * at.p.sizes.rows_q + flat_row(at.p, at.seq.whole(), at.b, row.i);
  }

  REGARD_DEVICE void write_part(int m) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int index = at.row_of(m, half);
      if (index >= at.row_count) continue;
      const int64 part = part_index(at.params, at.split, row_index_of(at.row_at(index)));
      float* const to = part_of_out(at.params, part);
#pragma unroll
      for (int n = 0; n < kOutBlocks; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = at.warp_column() + at.column_of(n, e);
          if (column < at.p.sizes.dim_v) to[column] = out[m][n][half * 2 + e];
        }
      }
      const SoftmaxRow<L>& sums = softmax.rows[m][half];
      if (holds_lse()) *row_part(at.params, part) = {sums.max, sums.sum};
    }
  }

  // Divides by the sums; writes lse and flags. Bit r: row r of the 16 is to be computed again.
  REGARD_DEVICE uint32 finish_rows(int m) {
    const View& lse = at.p.lse;
    bool nonfinite[2] = {};  // among the lane's own elements
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int index = at.row_of(m, half);
      const Row row = at.row_at(index);
      if constexpr (kOn.sink) softmax.add_sink(out[m], m, half, sink_of(row.head));
      const SoftmaxRow<L>& sums = softmax.rows[m][half];
      const float factor =
          normaliser<L>(sums) * (kOn.dropout ? float(keep_scale(at.p.dropout)) : 1.0f);
#pragma unroll
      for (int n = 0; n < kOutBlocks; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = out[m][n][half * 2 + e];
          x *= factor;
          nonfinite[half] |= !(x - x == 0);
        }
      }
      int flagged = nonfinite[half];
      if constexpr (kConfig.flags_nonfinite) {
        flagged |= shuffle_xor(flagged, 1);
        flagged |= shuffle_xor(flagged, 2);
      }
      if (index >= at.row_count) continue;
      if (lse.given() && holds_lse()) {
        const int64 to = offset_of(lse.strides, at.b, row.head, at.seq.first_q, row.i);
        static_cast<float*>(lse.data)[to] = lse_of_reference<L>(sums);
      }
      if constexpr (kConfig.flags_nonfinite) write_flag(row, flagged);
    }
    return kConfig.repeats_rows ? rows_with(nonfinite) : 0;
  }
  REGARD_DEVICE float sink_of(int head) const {
    return static_cast<const float*>(at.p.sink.data)[head * at.p.sink.strides.head];
  }
  // One lane writes the flag of each row; slices of a row only set flags that are clear before.
  REGARD_DEVICE void write_flag(const Row& row, int nonfinite) const {
    if (lane_index() % 4 != 0 || (kTiling.slices > 1 && !nonfinite)) return;
    write_row_flag(at.params, row_index_of(row), nonfinite != 0);
  }
  // Computes the warp's own columns of each of these rows again.
  REGARD_DEVICE void compute_rows_again(int m, uint32 rows) const {
    const int first = at.warp_row() + m * 16, left = at.row_count - first;
    if (left < 16) rows &= left > 0 ? (1u << left) - 1 : 0;
    sync_warp();  // the rows have been written
    compute_again<kConfig, kOutBlocks * 8>(
        at.params, at.b, rows, {at.head, at.first_row + first, at.seq.len_q}, at.warp_column());
  }

  REGARD_DEVICE void write_out(int m) const {
    const View& view = at.p.out;
    const int first = at.warp_row() + m * 16, first_column = at.warp_column();
    const TileView tile = at.out_tile();
    const TileView stage{tile.begin + first * tile.row_bytes + first_column * F::kBytes,
                         tile.row_bytes};
    store_rows<kConfig.type>(
        out[m], view, int(at.p.sizes.dim_v) - first_column, false, stage,
        [&](int r) {
          const Row row = at.row_at(first + r);
          return offset_of(view.strides, at.b, row.head, at.seq.first_q, row.i) + first_column;
        },
        [&](int r) { return first + r < at.row_count; });
  }
  REGARD_DEVICE void run() {
    elementwise.find_common_keys();
    clear(out);
    softmax.clear();
    const ShortInterval tiles = at.key_tiles();
    const VisibleTile first = at.map().first_from(tiles.begin, tiles.end);
    if (first.index < tiles.end) {
      at.load_queries();
      at.load_keys(0, block_of(first));
      if constexpr (kConfig.tiling.stages > 1) at.load_values(0, first.index * kKeys);
      cp_async_commit();
      if constexpr (kConfig.tiling.stages > 1) {
        loop_ahead(first, tiles.end);
      } else {
        loop_over_tiles(first, tiles.end);
      }
    }
    sync_block();  // out's tile replaces Q's
    write();
  }
};

template <KernelConfig kConfig>
REGARD_DEVICE void forward_mma(const KernelParams& params) {
  using Tile = ForwardTileMma<kConfig>;
  ForwardMma<kConfig> block{{Tile(params, Tile::of_block(params))}};
  if (block.at.row_count > 0) block.run();
}

}  // namespace regard
