// Forward attention of few query rows over many keys, as in decoding (split-KV within a block).
//
// Every warp has all rows of the tile and loops over its own key tiles, in its own stages. No warp
// waits for another before the keys are done, so that copies never pause. The warps' results are
// merged in shared memory. If keys are split over blocks too, the blocks of a cluster merge their
// parts, or `combine` merges the parts in memory, or (merges_splits) the block of the last split
// does; it waits for the other blocks, which began before it.
#pragma once

#include "cuda/kernels/tile/mma/forward_step.cuh"
#include "cuda/kernels/tile/mma/parts_in_shared.cuh"

namespace regard {

template <KernelConfig kConfig>
struct ForwardDecode : ForwardStep<kConfig> {
  using Step = ForwardStep<kConfig>;
  using Tile = ForwardTileMma<kConfig>;
  using Merged = MergedRow<kConfig>;
  static constexpr int kKeyWarps = Tile::kKeyWarps, kStages = kConfig.tiling.stages;
  static constexpr int kAhead = kStages - 1;  // tiles in flight during the current one
  static constexpr int kElements = Merged::kElements;
  static constexpr int kPartFloats = partial_row_bytes(kConfig) / 4;
  static constexpr int kRowsAtOnce = Tile::kBlockThreads / Merged::kLanes;
  static_assert(kAhead > 0 && Tile::kThreads == 32);
  static constexpr bool kInCluster = kConfig.cluster > 1;
  static_assert(kConfig.split_kv || !(kConfig.merges_splits || kInCluster));
  using Step::at, Step::elementwise, Step::out, Step::softmax;

  // ---------------------------------------------------------------------------- the main loop

  // Starts the copies of a tile of K and V, if there is one.
  REGARD_DEVICE void load(int stage, int tile, int end) const {
    if (tile >= end) return;
    at.load_keys(stage, {tile * Tile::kKeys, true});
    at.load_values(stage, tile * Tile::kKeys);
  }

  REGARD_DEVICE void loop_over_tiles(const ShortInterval& tiles) {
    int tile = tiles.begin + at.key_warp(), next = tile;
#pragma unroll 1
    for (int stage = 0; stage < kAhead; ++stage, next += kKeyWarps) {
      load(stage, next, tiles.end);
      if (stage == 0) at.load_queries();
      cp_async_commit();
    }
    cp_async_wait<kAhead - 1>();
    sync_block();
    Step::keep_queries();
    int stage = 0, spare = kAhead;
    for (; tile < tiles.end; tile += kKeyWarps, next += kKeyWarps) {
      cp_async_wait<kAhead - 1>();
      sync_warp();
      load(spare, next, tiles.end);
      cp_async_commit();
      Step::take(stage, {tile * Tile::kKeys, true}, [] {});
      stage = stage == kAhead ? 0 : stage + 1;
      spare = spare == kAhead ? 0 : spare + 1;
    }
    cp_async_wait<0>();
  }

  // ------------------------------------------------------------------------------------- the merge

  // The warps' parts of a row of the tile; parts lie in shared memory as [warps][rows].
  REGARD_DEVICE PartsInShared<kConfig> parts_of(int row) const {
    constexpr int kBytes = partial_row_bytes(kConfig);
    return {at.shared + Tile::kLayout.stage + row * kBytes, Tile::kRows * kBytes, kKeyWarps};
  }

  // What the block makes of them, behind them.
  REGARD_DEVICE SharedAddress part_of_block(int row) const { return parts_of(row).at(kKeyWarps); }

  // This warp's part of every row.
  REGARD_DEVICE void store_parts() {
#pragma unroll
    for (int m = 0; m < Tile::kM; ++m) {
      softmax.sum_over_lanes(m);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = at.row_of(m, half);
        const auto& sums = softmax.rows[m][half];
        const SharedAddress to = parts_of(row).at(at.key_warp());
#pragma unroll
        for (int n = 0; n < Tile::kOutBlocks; ++n) {
          const float(&x)[4] = out[m][n];
          store_shared_64(to + at.column_of(n, 0) * 4, bits_of(x[half * 2]),
                          bits_of(x[half * 2 + 1]));
        }
        if (lane_index() % 4 == 0) {
          store_shared_64(to + PartsInShared<kConfig>::kPart, bits_of(sums.max), bits_of(sums.sum));
        }
      }
    }
  }

  // A row of the tile from the warps' parts: out, or the block's own part of it.
  REGARD_DEVICE void merge_warps(Merged& row, int index, int block) const {
    if constexpr (!kConfig.split_kv) {
      parts_of(index).template merge<true>(
          row, [&](int d, float(&sums)[kElements]) { row.write_columns(d, sums); });
      row.write_end();
    } else if constexpr (kInCluster) {
      const SharedAddress to = part_of_block(index);
      parts_of(index).template merge<false>(row, [&](int d, float(&sums)[kElements]) {
        if (!row.exists) return;
        store_shared_128(
            to + d * 4, {{bits_of(sums[0]), bits_of(sums[1]), bits_of(sums[2]), bits_of(sums[3])}});
      });
      if (row.lane == 0 && row.exists) {
        store_shared_64(to + PartsInShared<kConfig>::kPart, bits_of(row.largest),
                        bits_of(row.total));
      }
    } else if constexpr (!kConfig.merges_splits) {
      const auto& sizes = at.p.sizes;
      const int64 row_index = int64(at.split) * sizes.heads_q * sizes.rows_q + row.row_index;
      const View to{.data = at.params.buffers.partial_out, .type = Type::f32, .strides = {}};
      parts_of(index).template merge<false>(row, [&](int d, float(&sums)[kElements]) {
        if (!row.exists) return;
        store_vector<Type::f32>(to, row_index * sizes.dim_v + d, sizes.dim_v - d,
                                sizes.dim_v % kElements == 0, sums);
      });
      if (row.lane != 0 || !row.exists) return;
      reinterpret_cast<RowPart*>(at.params.buffers.partial_rows)[row_index] = {row.largest,
                                                                               row.total};
    } else {
      float* const to = partial(block) + index * kPartFloats;
      parts_of(index).template merge<false>(row, [&](int d, float(&sums)[kElements]) {
        if (row.exists) store_four(to + d, sums[0], sums[1], sums[2], sums[3]);
      });
      if (row.lane == 0 && row.exists) {
        store_four(to + kConfig.dim_v, row.largest, row.total, 0, 0);
      }
    }
  }
  // The part that a block of the grid stores: [rows], laid out as in shared memory.
  REGARD_DEVICE float* partial(int block) const {
    return at.params.buffers.partial_out + int64(block) * (Tile::kRows * kPartFloats);
  }
  static REGARD_DEVICE void store_four(float* to, float a, float b, float c, float d) {
    store_global_128(to, {{bits_of(a), bits_of(b), bits_of(c), bits_of(d)}});
  }

  // Calls of(row, index) for rows [first, end) of the tile; all threads take part.
  template <class Of>
  REGARD_DEVICE void for_rows(int first, int end, Of of) const {
    for (; first < end; first += kRowsAtOnce) {
      const int index = first + thread_index() / Merged::kLanes;
      const int known = smaller(index, end - 1);
      const auto place = at.row_at(known);
      Merged row(at.params, at.seq.whole(), at.b, place.head, place.i, index < end);
      of(row, known);
    }
  }

  // ------------------------------------------------------------------------------------ the splits

  // Each block of the cluster, which has one split, merges some rows of all.
  REGARD_DEVICE void merge_in_cluster() const {
    constexpr int kBlocks = kConfig.cluster;
    const int each = (at.row_count + kBlocks - 1) / kBlocks;
    const int begin = cluster_rank() * each;
    sync_cluster();
    for_rows(begin, smaller(begin + each, at.row_count), [&](Merged& row, int index) {
      const PartsInShared<kConfig, true> parts{part_of_block(index), 0, kBlocks};
      parts.template merge<true>(
          row, [&](int d, float(&sums)[kElements]) { row.write_columns(d, sums); });
      row.write_end();
    });
    sync_cluster();  // no block ends while another reads its part
  }

  // The last block of the tile merges the parts of all splits, in their order; `first` is the block
  // of the first split.
  REGARD_DEVICE void merge_splits(int first) const {
    constexpr int kBytes = partial_row_bytes(kConfig);
    const int splits = at.params.splits;
    uint64* const signals = at.params.buffers.arrivals + first;
    sync_block();
    if (at.split < splits - 1) {
      if (thread_index() == 0) set_flag(signals + at.split, at.params.nonce);
      return;
    }
    // As many rows at a time as there is room for: [splits][rows].
    const int most = merge_room(kConfig) / (splits * kBytes);
    for (int s = thread_index(); s < splits - 1; s += Tile::kBlockThreads) {
      wait_flag(signals + s, at.params.nonce);
      signals[s] = 0;  // a replayed graph brings the same nonce
    }
    for (int begin = 0; begin < at.row_count; begin += most) {
      const int rows = smaller(most, at.row_count - begin);
      const SharedAddress to = at.shared + Tile::kLayout.stage;
      sync_block();
      for (int s = warp_index(); s < splits; s += kConfig.tiling.warps) {
        const float* const from = partial(first + s) + begin * kPartFloats;
#pragma unroll 4
        for (int byte = lane_index() * 16; byte < rows * kBytes; byte += 32 * 16) {
          cp_async<16>(to + s * rows * kBytes + byte, from + byte / 4);
        }
      }
      cp_async_commit();
      cp_async_wait<0>();
      sync_block();
      for_rows(begin, begin + rows, [&](Merged& row, int index) {
        const PartsInShared<kConfig> parts{to + (index - begin) * kBytes, rows * kBytes, splits};
        parts.template merge<true>(
            row, [&](int d, float(&sums)[kElements]) { row.write_columns(d, sums); });
        row.write_end();
      });
    }
  }

  REGARD_DEVICE void run(int first) {
    elementwise.find_common_keys();
    clear(out);
    softmax.clear();
    loop_over_tiles(at.key_tiles());
    sync_block();  // parts replace the stages
    store_parts();
    sync_block();
    for_rows(0, at.row_count,
             [&](Merged& row, int index) { merge_warps(row, index, first + at.split); });
    if constexpr (kInCluster) merge_in_cluster();
    if constexpr (kConfig.merges_splits) merge_splits(first);
  }
};

template <KernelConfig kConfig>
REGARD_DEVICE void forward_decode(const KernelParams& params) {
  using Tile = ForwardTileMma<kConfig>;
  const BlockCoords place = Tile::of_block(params);
  ForwardDecode<kConfig> block{{Tile(params, place)}};
  const int tile = place.head * params.grid.tiles + place.tile;
  if (block.at.row_count > 0) block.run(tile * params.splits);
}

}  // namespace regard
