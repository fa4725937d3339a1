// Forward attention of few query rows over many keys, as in decoding (split-KV within a block).
//
// Every warp has all rows of the tile and loops over its own key tiles, in its own stages. No warp
// waits for another before the keys are done, so that copies never pause. The warps' results are
// merged in shared memory. If keys are split over blocks too, the blocks of a cluster merge their
// parts, or `combine` merges the parts in memory, or (merges_splits) the block of the last split
// does; it waits for the other blocks, which began before it. With stream_k, blocks have equal
// shares of the keys of all heads, and the block in which a head ends merges its parts.
#pragma once

#include "cuda/kernels/tile/mma/forward_step.cuh"
#include "cuda/kernels/tile/mma/key_shares.cuh"
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
  static_assert(!(kConfig.split_kv && kConfig.stream_k));
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

  // The parts of every warp over these tiles of keys.
  REGARD_DEVICE void attend(const ShortInterval& tiles) {
    elementwise.find_common_keys();
    clear(out);
    softmax.clear();
    loop_over_tiles(tiles);
    sync_block();  // parts replace the stages
    store_parts();
    sync_block();
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

  // out and lse of a row, of which these are all parts.
  template <class Parts>
  static REGARD_DEVICE void write_row(Merged& row, const Parts& parts) {
    parts.template merge<true>(row,
                               [&](int d, float(&sums)[kElements]) { row.write_columns(d, sums); });
    row.write_end();
  }

  // The block's part of a row: for the blocks of its cluster, for `combine`, or in a slot in
  // memory.
  REGARD_DEVICE void store_in_cluster(Merged& row, int index) const {
    const SharedAddress to = part_of_block(index);
    parts_of(index).template merge<false>(row, [&](int d, float(&sums)[kElements]) {
      if (!row.exists) return;
      store_shared_128(to + d * 4,
                       {{bits_of(sums[0]), bits_of(sums[1]), bits_of(sums[2]), bits_of(sums[3])}});
    });
    if (row.lane != 0 || !row.exists) return;
    store_shared_64(to + PartsInShared<kConfig>::kPart, bits_of(row.largest), bits_of(row.total));
  }
  REGARD_DEVICE void store_for_combine(Merged& row, int index) const {
    const int64 dim = at.p.sizes.dim_v, part = part_index(at.params, at.split, row.row_index);
    const View to{.data = part_of_out(at.params, part), .type = Type::f32, .strides = {}};
    parts_of(index).template merge<false>(row, [&](int d, float(&sums)[kElements]) {
      if (!row.exists) return;
      store_vector<Type::f32>(to, d, dim - d, dim % kElements == 0, sums);
    });
    if (row.lane != 0 || !row.exists) return;
    *row_part(at.params, part) = {row.largest, row.total};
  }
  REGARD_DEVICE void store_in_slot(Merged& row, int index, int slot) const {
    float* const to = part_in_slot(slot) + index * kPartFloats;
    parts_of(index).template merge<false>(row, [&](int d, float(&sums)[kElements]) {
      if (row.exists) store_four(to + d, sums[0], sums[1], sums[2], sums[3]);
    });
    if (row.lane == 0 && row.exists) store_four(to + kConfig.dim_v, row.largest, row.total, 0, 0);
  }
  // A part of the tile in memory: [rows], laid out as in shared memory.
  REGARD_DEVICE float* part_in_slot(int slot) const {
    return at.params.buffers.partial_out + int64(slot) * (Tile::kRows * kPartFloats);
  }
  static REGARD_DEVICE void store_four(float* to, float a, float b, float c, float d) {
    store_global_128(to, {{bits_of(a), bits_of(b), bits_of(c), bits_of(d)}});
  }

  // ------------------------------------------------------------------------------------ the splits

  // Each block of the cluster, which has one split, merges some rows of all.
  REGARD_DEVICE void merge_in_cluster() const {
    constexpr int kBlocks = kConfig.cluster;
    const int each = (at.row_count + kBlocks - 1) / kBlocks;
    const int begin = cluster_rank() * each;
    sync_cluster();
    for_rows(begin, smaller(begin + each, at.row_count), [&](Merged& row, int index) {
      write_row(row, PartsInShared<kConfig, true>{part_of_block(index), 0, kBlocks});
    });
    sync_cluster();  // no block ends while another reads its part
  }

  // Tells the block that merges that this block's part is stored.
  REGARD_DEVICE void show_part(int slot) const {
    sync_block();
    if (thread_index() == 0) set_flag(at.params.buffers.arrivals + slot, at.params.nonce);
  }

  // Merges the parts of a tile, in their order. Other blocks show all but the last, which is this
  // block's own.
  REGARD_DEVICE void merge_slots(const PartSlots& slots) const {
    constexpr int kBytes = partial_row_bytes(kConfig);
    uint64* const signals = at.params.buffers.arrivals;
    sync_block();
    // As many rows at a time as there is room for: [parts][rows].
    const int most = merge_room(kConfig) / (slots.count * kBytes);
    for (int n = thread_index(); n < slots.count - 1; n += Tile::kBlockThreads) {
      uint64* const signal = signals + slots.at(n);
      wait_flag(signal, at.params.nonce);
      *signal = 0;  // a replayed graph brings the same nonce
    }
    for (int begin = 0; begin < at.row_count; begin += most) {
      const int rows = smaller(most, at.row_count - begin);
      const SharedAddress to = at.shared + Tile::kLayout.stage;
      sync_block();
      for (int n = warp_index(); n < slots.count; n += kConfig.tiling.warps) {
        const float* const from = part_in_slot(slots.at(n)) + begin * kPartFloats;
#pragma unroll 4
        for (int byte = lane_index() * 16; byte < rows * kBytes; byte += 32 * 16) {
          cp_async<16>(to + n * rows * kBytes + byte, from + byte / 4);
        }
      }
      cp_async_commit();
      cp_async_wait<0>();
      sync_block();
      for_rows(begin, begin + rows, [&](Merged& row, int index) {
        write_row(
            row, PartsInShared<kConfig>{to + (index - begin) * kBytes, rows * kBytes, slots.count});
      });
    }
  }

  // ------------------------------------------------------------------------------------ one block

  // A split of a tile, or all of its keys; `first` is the block of the first split.
  REGARD_DEVICE void run(int first) {
    attend(at.key_tiles());
    for_rows(0, at.row_count, [&](Merged& row, int index) {
      if constexpr (kInCluster) {
        store_in_cluster(row, index);
      } else if constexpr (kConfig.merges_splits) {
        store_in_slot(row, index, first + at.split);
      } else if constexpr (kConfig.split_kv) {
        store_for_combine(row, index);
      } else {
        write_row(row, parts_of(index));
      }
    });
    if constexpr (kInCluster) merge_in_cluster();
    if constexpr (kConfig.merges_splits) {
      if (at.split < at.params.splits - 1) return show_part(first + at.split);
      merge_slots({.first = first, .count = at.params.splits});
    }
  }

  // stream_k: some of a head's tiles of keys, into this slot.
  REGARD_DEVICE void run_part(const ShortInterval& tiles, int slot) {
    attend(tiles);
    for_rows(0, at.row_count, [&](Merged& row, int index) { store_in_slot(row, index, slot); });
  }
  // All of them.
  REGARD_DEVICE void run_whole(const ShortInterval& tiles) {
    attend(tiles);
    for_rows(0, at.row_count, [&](Merged& row, int index) { write_row(row, parts_of(index)); });
  }
};

template <KernelConfig kConfig>
REGARD_DEVICE void forward_decode_split(const KernelParams& params) {
  using Tile = ForwardTileMma<kConfig>;
  const BlockCoords place = Tile::of_block(params);
  ForwardDecode<kConfig> block{{Tile(params, place)}};
  const int tile = place.head * params.grid.tiles + place.tile;
  if (block.at.row_count > 0) block.run(tile * params.splits);
}

// Computes each head of which the block has keys, then merges the head that ends in the block but
// began before it.
template <KernelConfig kConfig>
REGARD_DEVICE void forward_decode_shares(const KernelParams& params) {
  using Block = ForwardDecode<kConfig>;
  const KeyShares<kConfig> shares(params);
  for (auto part = shares.first_part(); part.exists(); part = shares.next(part)) {
    Block block{{shares.tile_of(part)}};
    const ShortInterval tiles = shares.key_tiles_of(part, block.at);
    if (part.is_whole()) {
      block.run_whole(tiles);
    } else {
      block.run_part(tiles, shares.slot_of(part));
      if (part.ends_later()) block.show_part(shares.slot_of(part));
    }
    sync_block();  // the next tiles replace the parts
  }
  const auto first = shares.first_part();  // found again, not kept in registers
  if (first.exists() && first.began_before() && !first.ends_later()) {
    Block{{shares.tile_of(first)}}.merge_slots(shares.slots_of(first));
  }
}

template <KernelConfig kConfig>
REGARD_DEVICE void forward_decode(const KernelParams& params) {
  if constexpr (kConfig.stream_k) {
    forward_decode_shares<kConfig>(params);
  } else {
    forward_decode_split<kConfig>(params);
  }
}

}  // namespace regard
