// Forward attention of few query rows over many keys, as in decoding.
//
// Every warp has all rows of the tile and walks over key tiles of its own, with stages of its own:
// nothing waits for another warp until the keys are done, so that copies never pause. The warps'
// results are then merged in shared memory. Where keys are split over blocks too, what the splits
// leave in memory is merged by `combine`, or (ordered) by the block of the last split, which waits
// for the others: they began before it.
#pragma once

#include "cuda/kernels/tile/mma/forward_step.cuh"
#include "cuda/kernels/tile/mma/parts_in_shared.cuh"

namespace regard {

template <KernelConfig kConfig>
struct ForwardDecode : ForwardStep<kConfig> {
  using Step = ForwardStep<kConfig>;
  using Place = ForwardPlace<kConfig>;
  using Merged = MergedRow<kConfig>;
  static constexpr int kKeyWarps = Place::kKeyWarps, kStages = kConfig.tiling.stages;
  static constexpr int kAhead = kStages - 1;  // tiles on their way while one is worked on
  static constexpr int kElements = Merged::kElements;
  static constexpr int kPartFloats = partial_row_bytes(kConfig) / 4;
  static constexpr int kRowsAtOnce = Place::kBlockThreads / Merged::kLanes;
  static_assert(kAhead > 0 && Place::kThreads == 32);
  static_assert(kConfig.split_kv || !kConfig.merges_splits);
  using Step::at, Step::elementwise, Step::out, Step::softmax;

  // -------------------------------------------------------------------------------------- the walk

  // A tile of keys and values on its way; none past the end.
  REGARD_DEVICE void load(int stage, int tile, int end) const {
    if (tile >= end) return;
    at.load_keys(stage, tile * Place::kKeys);
    at.load_values(stage, tile * Place::kKeys);
  }

  REGARD_DEVICE void walk(const ShortInterval& tiles) {
    int tile = tiles.begin + at.walker(), next = tile;
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
      Step::take(stage, tile * Place::kKeys);
      stage = stage == kAhead ? 0 : stage + 1;
      spare = spare == kAhead ? 0 : spare + 1;
    }
    cp_async_wait<0>();
  }

  // ------------------------------------------------------------------------------------- the merge

  // Of a row of the tile: [warps][rows].
  REGARD_DEVICE PartsInShared<kConfig> parts_of(int row) const {
    constexpr int kBytes = partial_row_bytes(kConfig);
    return {at.shared + Place::kLayout.stage + row * kBytes, Place::kRows * kBytes, kKeyWarps};
  }

  // This walker's part of every row.
  REGARD_DEVICE void store_parts() {
#pragma unroll
    for (int m = 0; m < Place::kM; ++m) {
      softmax.sum_over_lanes(m);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = at.row_of(m, half);
        const auto& sums = softmax.rows[m][half];
        const SharedAddress to = parts_of(row).at(at.walker());
        // Where no key was seen there may be NaN from hidden values.
        const bool seen = sums.max != -infinity<float>();
#pragma unroll
        for (int n = 0; n < Place::kOutBlocks; ++n) {
          const float(&x)[4] = out[m][n];
          store_shared_64(to + at.column_of(n, 0) * 4, seen ? bits_of(x[half * 2]) : 0,
                          seen ? bits_of(x[half * 2 + 1]) : 0);
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
    } else if constexpr (!kConfig.merges_splits) {
      const auto& sizes = at.p.sizes;
      const int64 line = int64(at.split) * sizes.heads_q * sizes.rows_q + row.line;
      const View to{.data = at.params.buffers.partial_out, .type = Type::f32, .strides = {}};
      parts_of(index).template merge<false>(row, [&](int d, float(&sums)[kElements]) {
        if (!row.exists) return;
        store_line<Type::f32>(to, line * sizes.dim_v + d, sizes.dim_v - d,
                              sizes.dim_v % kElements == 0, sums);
      });
      if (row.lane != 0 || !row.exists) return;
      reinterpret_cast<RowPart*>(at.params.buffers.partial_rows)[line] = {row.largest, row.total};
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
  // What a block of the grid leaves: [rows], as parts lie in shared memory.
  REGARD_DEVICE float* partial(int block) const {
    return at.params.buffers.partial_out + int64(block) * (Place::kRows * kPartFloats);
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

  // The last block of the tile merges what all of them left, in the order of the splits; `first` is
  // the block of the first.
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
    for (int s = thread_index(); s < splits - 1; s += Place::kBlockThreads) {
      wait_flag(signals + s, at.params.nonce);
      signals[s] = 0;  // a graph may come again with the same number
    }
    for (int begin = 0; begin < at.row_count; begin += most) {
      const int rows = smaller(most, at.row_count - begin);
      const SharedAddress to = at.shared + Place::kLayout.stage;
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
    walk(at.key_tiles());
    sync_block();  // parts take the place of the stages
    store_parts();
    sync_block();
    for_rows(0, at.row_count,
             [&](Merged& row, int index) { merge_warps(row, index, first + at.split); });
    if constexpr (kConfig.merges_splits) merge_splits(first);
  }
};

template <KernelConfig kConfig>
REGARD_DEVICE void forward_decode(const KernelParams& params) {
  using Place = ForwardPlace<kConfig>;
  const BlockCoords place = Place::of_block(params);
  ForwardDecode<kConfig> block{{Place(params, place)}};
  const int tile = place.head * params.grid.tiles + place.tile;
  if (block.at.row_count > 0) block.run(tile * params.splits);
}

}  // namespace regard
