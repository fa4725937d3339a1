// The tile of a block of the backward kernel: which keys it owns and which query rows it loops
// over, where their tiles lie in shared memory and how they get there, and which elements of S^T a
// lane holds.
#pragma once

#include "cuda/kernels/params.h"
#include "cuda/kernels/tile/mask_copy.cuh"
#include "cuda/kernels/tile/row_products.cuh"
#include "cuda/kernels/tile/score_tile.cuh"
#include "cuda/kernels/tile/tile_map.cuh"

namespace regard {

template <KernelConfig kConfig>
struct BackwardTileMma {
  using F = FragmentsOf<kConfig>;
  static constexpr Tiling kTiling = kConfig.tiling;
  static constexpr BackwardMmaLayout kLayout = backward_mma_layout(kConfig);
  static constexpr int kThreads = kTiling.warps * 32;
  static constexpr int kRows = kTiling.rows, kKeys = kTiling.keys, kSlices = kTiling.slices;
  static constexpr int kN = kKeys * kSlices / kTiling.warps / 16;
  static constexpr int kScoreRows = kRows / kSlices;  // of a warp's part of S^T
  static constexpr int kScoreBlocks = kScoreRows / 8;
  static_assert(kN * kTiling.warps * 16 == kKeys * kSlices && kScoreBlocks % 2 == 0);

  using Scores = Accumulator[kN][kScoreBlocks];  // a warp's part of S^T

  // One iteration: a tile of rows of one query head.
  struct Step {
    int head;  // the query head
    int tile;
    bool is_full = true;  // with a tile map: mask and spans show every pair

    REGARD_DEVICE int first_row() const { return tile * kRows; }
  };

  const KernelParams& params;
  const Problem& p;
  const int b, kv;  // split_q: kv counts the splits of all key heads
  const int group;  // query heads of a key head
  const ShortSequence seq;
  const int key_tile_index;
  const int first_key;
  const int key_count;
  const ShortInterval whole_rows;  // that see every key of the tile, as far as intervals say
  const SharedAddress shared;

  REGARD_DEVICE BackwardTileMma(const KernelParams& kernel_params, const BlockCoords& place)
      : BackwardTileMma(kernel_params, place, divide(place.head, kernel_params.by.entry)) {}
  // at: of the batch entry, and of the key head in it.
  REGARD_DEVICE BackwardTileMma(const KernelParams& kernel_params, const BlockCoords& place,
                                const Divided& at)
      : params(kernel_params),
        p(kernel_params.problem),
        b(at.quotient),
        kv(at.rest),
        group(group_of(params)),
        seq(short_sequence<kConfig>(p, b)),
        key_tile_index(place.tile),
        first_key(place.tile * kKeys),
        key_count(clamp_to(seq.len_k - first_key, 0, kKeys)),
        whole_rows(rows_of_all_keys()),
        shared(shared_address(&shared_memory<uint8>())) {}

  // ---------------------------------------------------------------------------------------- lanes

  REGARD_DEVICE int warp_key() const { return warp_index() / kSlices * kN * 16; }
  REGARD_DEVICE int warp_slice() const { return warp_index() % kSlices; }
  REGARD_DEVICE int warp_score_row() const { return warp_slice() * kScoreRows; }

  // The key and the row, within their tiles, of accumulator element 2 half + e of block [m][n].
  REGARD_DEVICE int key_of(int m, int half) const {
    return warp_key() + m * 16 + half * 8 + lane_index() / 4;
  }
  REGARD_DEVICE int row_of(int n, int e) const {
    return warp_score_row() + n * 8 + lane_index() % 4 * 2 + e;
  }

  // ---------------------------------------------------------------------------- the main loop

  // A block begins with the last rows, which blocks of all keys see under a causal mask: blocks
  // that run together then read the same rows.
  static constexpr bool kLastFirst = kConfig.features.interval && !kConfig.whole_keys &&
                                     !kConfig.split_q && !kConfig.tile_map && !kConfig.ordered_dq;

  // The tiles of rows that see some key of the block; whole_keys: all.
  REGARD_DEVICE ShortInterval row_tiles() const {
    // Rows that see no key have a dq of 0.
    if constexpr (kConfig.whole_keys) return {0, int(divide_up(seq.len_q, kRows))};
    return row_tiles_of_keys<kConfig>(p, seq, b, key_tile_index);
  }
  REGARD_DEVICE int key_head() const { return kConfig.split_q ? kv / params.splits : kv; }
  // split_q: the first step of the block, or of the next split.
  REGARD_DEVICE Step split_step(const ShortInterval& tiles, int next) const {
    const int count = tiles.end - tiles.begin;
    const int first =
        first_iteration(kConfig, group, count, params.splits, kv % params.splits + next);
    return {key_head() * group + first / count, tiles.begin + first % count};
  }
  REGARD_DEVICE Step first_step(const ShortInterval& tiles) const {
    if constexpr (kConfig.split_q) return visible_from(split_step(tiles, 0), tiles);
    return visible_from({kv * group, first_tile(tiles)}, tiles);
  }
  // The first tile of rows that the block visits in a query head.
  REGARD_DEVICE int first_tile(const ShortInterval& tiles) const {
    return kLastFirst ? tiles.end - 1 : tiles.begin;
  }
  // Behind the last step: split_q only.
  REGARD_DEVICE Step end_step(const ShortInterval& tiles) const {
    if constexpr (kConfig.split_q) return split_step(tiles, 1);
    return {};
  }
  REGARD_DEVICE bool has_steps(const ShortInterval& tiles) const {
    return tiles.begin < tiles.end &&
           (!(kConfig.split_q || kConfig.tile_map) || exists(first_step(tiles), end_step(tiles)));
  }
  REGARD_DEVICE Step after(const Step& step, const ShortInterval& tiles) const {
    const int next = kLastFirst ? step.tile - 1 : step.tile + 1;
    const bool last = next == (kLastFirst ? tiles.begin - 1 : tiles.end);
    return visible_from({step.head + last, last ? first_tile(tiles) : next}, tiles);
  }
  // What the tile map says of the rows of a query head and the block's keys.
  REGARD_DEVICE int64 map_row_of(int query_head) const {
    return map_row(p, kConfig, b, query_head, seq.first_k, key_tile_index);
  }
  REGARD_DEVICE TileMap<kConfig> map_of(int query_head) const {
    if constexpr (!kConfig.tile_map) return {};
    return TileMap<kConfig>::at(params, map_row_of(query_head));
  }
  // The next step that the map does not hide, which may be this one.
  REGARD_DEVICE Step visible_from(Step step, const ShortInterval& tiles) const {
    if constexpr (!kConfig.tile_map) return step;
    const int end_head = (key_head() + 1) * group;
#pragma unroll 1
    for (; step.head < end_head; step = {step.head + 1, tiles.begin}) {
      const VisibleTile found = map_of(step.head).first_from(step.tile, tiles.end);
      step.tile = found.index;
      step.is_full = found.is_full;
      if (step.tile < tiles.end) break;
    }
    return step;
  }
  REGARD_DEVICE bool exists(const Step& step, const Step& end) const {
    if constexpr (!kConfig.split_q) return step.head < (kv + 1) * group;
    return step.head < end.head || (step.head == end.head && step.tile < end.tile);
  }
  REGARD_DEVICE ShortInterval rows_of_all_keys() const {
    if (key_count < kKeys) return {0, 0};
    if constexpr (!kConfig.features.interval) return {0, seq.len_q};
    return {int(rows_of_key<kConfig>(p, seq, b, first_key + kKeys - 1).begin),
            int(rows_of_key<kConfig>(p, seq, b, first_key).end)};
  }
  // Whether every row of the tile exists and sees every key of the block, as far as intervals and
  // the tile map say.
  REGARD_DEVICE bool is_whole(const Step& step) const {
    if (kConfig.tile_map && !step.is_full) return false;
    const int first = step.first_row();
    return whole_rows.begin <= first && first + kRows <= whole_rows.end;
  }

  // ---------------------------------------------------------------------------------------- tiles

  REGARD_DEVICE TileView key_tile() const {
    return {shared + kLayout.keys, tile_row_bytes(kConfig, kConfig.dim)};
  }
  REGARD_DEVICE TileView value_tile() const {
    return {shared + kLayout.values, tile_row_bytes(kConfig, kConfig.dim_v)};
  }
  REGARD_DEVICE TileView exchange_tile(int at) const {
    return {shared + at, exchange_row_bytes(kConfig), is_exchange_swizzled(kConfig)};
  }
  REGARD_DEVICE TileView dscore_tile() const { return exchange_tile(kLayout.dscores); }
  REGARD_DEVICE TileView weight_tile() const { return exchange_tile(kLayout.weights); }
  REGARD_DEVICE SharedAddress stage_at(int stage) const {
    return shared + kLayout.stage + stage * kLayout.stage_bytes;
  }
  REGARD_DEVICE TileView query_tile(int stage) const {
    return {stage_at(stage) + kLayout.queries, staged_row_bytes(kConfig, kConfig.dim),
            is_swizzled(kConfig, kConfig.dim)};
  }
  REGARD_DEVICE TileView dout_tile(int stage) const {
    return {stage_at(stage) + kLayout.douts, staged_row_bytes(kConfig, kConfig.dim_v),
            is_swizzled(kConfig, kConfig.dim_v)};
  }
  REGARD_DEVICE TileView bias_tile(int stage) const {
    return {stage_at(stage) + kLayout.bias, bias_row_bytes(kConfig)};
  }
  REGARD_DEVICE TileView mask_tile(int stage) const {
    return {stage_at(stage) + kLayout.mask, mask_row_bytes(kConfig)};
  }
  REGARD_DEVICE SharedAddress states_at(int stage, int row) const {
    return stage_at(stage) + kLayout.states + row * 8;
  }

  // ---------------------------------------------------------------------------------------- loads

  REGARD_DEVICE RowsInMemory rows_of(const View& view, int head, int first_row) const {
    const int64 first = offset_of(view.strides, b, head, 0, first_row) * F::kBytes;
    return {static_cast<const uint8*>(view.data) + first, view.strides.row * F::kBytes};
  }

  // whole_keys: a copy whose code is short, because it runs once or a few times.
  template <int kOf, int kColumns>
  REGARD_DEVICE void load(const TileView& tile, int rows, int64 columns,
                          const RowsInMemory& from) const {
    constexpr bool kAligned = kConfig.aligned, kExact = kConfig.exact_dims;
    if constexpr (kConfig.whole_keys) {
      load_tile_in_steps<kThreads, kOf, kColumns, F::kBytes, kAligned, kExact>(
          tile, rows, int(columns), from, thread_index());
    } else {
      load_tile<kThreads, kOf, kColumns, F::kBytes, kAligned, kExact>(tile, rows, int(columns),
                                                                      from);
    }
  }

  REGARD_DEVICE void load_keys() const {
    const int first = seq.first_k + first_key;
    load<kKeys, kConfig.dim>(key_tile(), key_count, p.sizes.dim, rows_of(p.k, key_head(), first));
    load<kKeys, kConfig.dim_v>(value_tile(), key_count, p.sizes.dim_v,
                               rows_of(p.v, key_head(), first));
  }

  // Q, the rows' states, their bias and mask, and dO.
  REGARD_DEVICE void load_rows(int stage, const Step& step) const {
    const int count = seq.len_q - step.first_row();
    load<kRows, kConfig.dim>(query_tile(stage), count, p.sizes.dim,
                             rows_of(p.q, step.head, seq.first_q + step.first_row()));
    if constexpr (!kConfig.whole_keys) load_states(stage, step, count);
    if constexpr (stages_bias(kConfig)) load_bias(stage, step, count);
    if constexpr (stages_mask(kConfig)) {
      // A tile that the mask shows as a whole needs none of it.
      if (!kConfig.tile_map || !step.is_full) load_mask(stage, step, count);
    }
    load_douts(stage, step, count);
    if constexpr (kConfig.whole_keys) make_states(stage, step);  // while the copies run
  }
  REGARD_DEVICE void load_states(int stage, const Step& step, int count) const {
    const int64 first = step.head * p.sizes.rows_q + flat_row(p, seq.whole(), b, step.first_row());
    const auto* const states = static_cast<const RowState<float>*>(params.buffers.row_states);
    const int row = thread_index();
    if (row >= kRows) return;
    const bool exists = row < count;
    cp_async<8>(states_at(stage, row), exists ? states + first + row : nullptr, exists ? 8 : 0);
  }
  // whole_keys: what the delta kernel makes otherwise. Lanes that share rows take kCount of them.
  REGARD_DEVICE void make_states(int stage, const Step& step) const {
    constexpr int kElements = 16 / F::kBytes, kLanes = lanes_of_row(kConfig.dim_v, kElements);
    constexpr int kAtOnce = kThreads / kLanes, kCount = (kRows + kAtOnce - 1) / kAtOnce;
    constexpr int kFinished = (kCount + kLanes - 1) / kLanes;  // each lane every kLanes-th row
    const int first = thread_index() / kLanes, lane = lane_index() % kLanes;
    const int64 i = step.first_row() + first;
    const Sequence whole = seq.whole();
    RowInputs<float, kConfig.given_delta> inputs[kFinished];
#pragma unroll
    for (int n = 0; n < kFinished; ++n) {
      const int r = n * kLanes + lane;
      if (r < kCount) inputs[n].load(p, whole, b, step.head, i + r * kAtOnce);
    }
    float products[kCount] = {};
    if constexpr (!kConfig.given_delta) {
      if (has_row_vectors<kConfig.type, kElements>(p)) {
        multiply_vectors<kConfig.type, kLanes, kElements>(products, p, whole, b, step.head, i,
                                                          kAtOnce);
      } else {
        multiply_any<kConfig.type, kLanes, kElements>(products, p, whole, b, step.head, i, kAtOnce);
      }
#pragma unroll
      for (int r = 0; r < kCount; ++r) products[r] = sum_of_lanes<kLanes>(products[r]);
    }
#pragma unroll
    for (int n = 0; n < kFinished; ++n) {
      const int r = n * kLanes + lane, row = first + r * kAtOnce;
      if (r >= kCount || row >= kRows) continue;
      const RowState<float> state = inputs[n].state(picked_at<kLanes>(products, n));
      store_shared_64(states_at(stage, row), bits_of(state.lse), bits_of(state.delta));
    }
  }
  // Element n kLanes + lane, by selection.
  template <int kLanes, int kCount>
  static REGARD_DEVICE float picked_at(const float (&x)[kCount], int n) {
    float found = 0;
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      found = r == n * kLanes + lane_index() % kLanes ? x[r] : found;
    }
    return found;
  }
  REGARD_DEVICE void load_bias(int stage, const Step& step, int count) const {
    constexpr int kBytes = element_bytes(kConfig.bias.type), kStaged = bias_rows(kConfig);
    const Strides& s = p.bias.strides;
    const int64 first = (offset_of(s, b, step.head, 0, step.first_row()) + first_key) * kBytes;
    load_tile<kThreads, kStaged, kKeys, kBytes, kConfig.bias.aligned, false>(
        bias_tile(stage), smaller(count, kStaged), key_count,
        RowsInMemory{static_cast<const uint8*>(p.bias.data) + first, s.row * kBytes});
  }
  REGARD_DEVICE void load_mask(int stage, const Step& step, int count) const {
    constexpr int kStaged = mask_rows(kConfig);
    const Strides& s = p.mask.strides;
    const int64 first = offset_of(s, b, step.head, 0, step.first_row()) + first_key * s.column;
    load_mask_tile<kThreads, kStaged, kKeys, kConfig.mask.copy_bytes>(
        mask_tile(stage), smaller(count, kStaged), key_count, first_key, s.column,
        RowsInMemory{static_cast<const uint8*>(p.mask.data) + first, s.row});
  }
  REGARD_DEVICE void load_douts(int stage, const Step& step, int count) const {
    const int first = seq.first_q + step.first_row();
    if constexpr (kConfig.dout_is_f32 && F::kBytes == 2) {
      narrow_douts(stage, count, offset_of(p.dout.strides, b, step.head, 0, first));
    } else {
      load<kRows, kConfig.dim_v>(dout_tile(stage), count, p.sizes.dim_v,
                                 rows_of(p.dout, step.head, first));
    }
  }
  // dout may be f32 when the other inputs are not.
  REGARD_DEVICE void narrow_douts(int stage, int count, int64 first) const {
    constexpr int kPairs = kConfig.dim_v / 2;
    const TileView tile = dout_tile(stage);
    for (int index = thread_index(); index < kRows * kPairs; index += kThreads) {
      const int row = index / kPairs, column = index % kPairs * 2;
      const float* const from =
          static_cast<const float*>(p.dout.data) + first + row * p.dout.strides.row;
      const int left = row < count ? int(p.sizes.dim_v) - column : 0;
      store_shared_32(tile.at(row, column * 2),
                      pack<typename F::Format>(left > 0 ? from[column] : 0.0f,
                                               left > 1 ? from[column + 1] : 0.0f));
    }
  }
};

}  // namespace regard
