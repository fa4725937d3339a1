// What a wgmma backward block works on: a tile of keys, and the tiles of query rows that see it.
#pragma once

#include "cuda/kernels/params.h"
#include "cuda/kernels/ptx_hopper.cuh"
#include "cuda/kernels/tile/score_tile.cuh"
#include "cuda/kernels/tile/tile_map.cuh"
#include "plan/cuda/kernel/wgmma_backward_layout.h"

namespace regard {

// The row tiles are those of every query head that shares the key head.
struct BackwardTask {
  int b;
  int dkv_head;   // of its dk and dv: the key head; split_q: key head * splits + split
  int key_tile;   // index among the tiles of keys
  int first_key;  // in its sequence
  int key_count;
  int first_row_tile, end_row_tile;
  int iterations;  // row tiles of all query heads together; split_q: the block's part
  ShortSequence seq;
  int map_row;               // set only with a tile map: of query head 0
  int first_head, end_head;  // query heads; set only if rows_outer
};
static_assert(sizeof(BackwardTask) <= kBackwardTaskBytes);

// What one iteration of a mainloop works on: a tile of rows of one query head.
struct RowTile {
  int head;
  int index;            // among the tiles of rows
  bool is_full = true;  // with a tile map: mask and spans show every pair
};

template <KernelConfig kConfig>
REGARD_DEVICE int key_head(const KernelParams& params, const BackwardTask& task) {
  return kConfig.split_q ? task.dkv_head / params.splits : task.dkv_head;
}

// split_q: the first of the block's iterations, or of the next split's.
template <KernelConfig kConfig>
REGARD_DEVICE int split_begin(const KernelParams& params, const BackwardTask& task, int next = 0) {
  return first_iteration(kConfig, group_of(params), task.end_row_tile - task.first_row_tile,
                         params.splits, task.dkv_head % params.splits + next);
}

// Whether a walk goes from the last rows to the first, so that under a causal mask all blocks of a
// head begin at the same rows, which the cache then keeps for them. Ordered additions to dq, and
// sums of dbias that end with a head, need the other direction.
template <KernelConfig kConfig>
constexpr bool kDescends = !kConfig.ordered_dq && kConfig.dbias.how == BiasGradient::none;

// The row of the tile map for a query head and the block's keys, and what it says.
template <KernelConfig kConfig>
REGARD_DEVICE int64 map_row_of_head(const KernelParams& params, const BackwardTask& task,
                                    int head) {
  const Problem& p = params.problem;
  int64 row = task.map_row;
  if (kConfig.tile_map && map_heads(p) > 1) row += head * map_rows_of_head(p, kConfig);
  return row;
}
template <KernelConfig kConfig>
REGARD_DEVICE TileMap<kConfig> map_of_head(const KernelParams& params, const BackwardTask& task,
                                           int head) {
  return TileMap<kConfig>::at(params, map_row_of_head<kConfig>(params, task, head));
}

// The walk over the row tiles of a task, which is at one of them. With a tile map, the bits of the
// word at which it is are in registers, so that most steps read no memory.
template <KernelConfig kConfig, bool kMapped = kConfig.tile_map>
struct RowWalk : RowTile {};
template <KernelConfig kConfig>
struct RowWalk<kConfig, true> : RowTile {
  static constexpr bool kDown = kDescends<kConfig>;
  typename TileMap<kConfig>::Bits bits{};  // visible: tiles of the word behind the present one

  // Reads the word of `from`, whose tiles from this one on are still to come.
  REGARD_DEVICE void read(const KernelParams& params, const BackwardTask& task, int from) {
    const int word = from / kTilesOfMapWord, first = word * kTilesOfMapWord;
    const int begin = kDown ? task.first_row_tile : from,
              end = kDown ? from + 1 : task.end_row_tile;
    bits = map_of_head<kConfig>(params, task, head).bits(word);
    bits.visible &= TileMap<kConfig>::bit_range(begin - first, end - first);
    index = first;
  }
  // Moves to the first tile that is still to come. Behind the last one, the head is the first of
  // the next key head.
  REGARD_DEVICE void take(const KernelParams& params, const BackwardTask& task) {
#pragma unroll 1
    while (bits.visible == 0) {
      const int word = index / kTilesOfMapWord;
      int next = kDown ? word * kTilesOfMapWord - 1 : (word + 1) * kTilesOfMapWord;
      if (kDown ? next < task.first_row_tile : next >= task.end_row_tile) {
        // The call divides, which takes fewer registers here than group_of.
        const int group = int(params.problem.sizes.group());
        if (++head >= (key_head<kConfig>(params, task) + 1) * group) return;
        next = kDown ? task.end_row_tile - 1 : task.first_row_tile;
      }
      read(params, task, next);
    }
    const int bit = kDown ? 31 - leading_zeros(bits.visible) : lowest_bit(bits.visible);
    bits.visible &= ~(1u << bit);
    index = index / kTilesOfMapWord * kTilesOfMapWord + bit;
    is_full = (bits.full >> bit & 1) != 0;
  }
};
template <KernelConfig kConfig>
REGARD_DEVICE void advance(RowWalk<kConfig>& walk, const KernelParams& params,
                           const BackwardTask& task) {
  if constexpr (kConfig.tile_map) {
    walk.take(params, task);
  } else if constexpr (kConfig.rows_outer) {
    if (++walk.head < task.end_head) return;
    walk.head = task.first_head;
    if (--walk.index < task.first_row_tile) walk.index = task.end_row_tile - 1;
  } else if constexpr (kDescends<kConfig>) {
    if (--walk.index >= task.first_row_tile) return;
    walk.index = task.end_row_tile - 1;
    ++walk.head;
  } else {
    if (++walk.index < task.end_row_tile) return;
    walk.index = task.first_row_tile;
    ++walk.head;
  }
}

// The tile of the block's first iteration. With a tile map it may be hidden.
//
// rows_outer: each tile of keys begins one iteration after the one before, and ends with what lies
// before its beginning, so that no two add to the same rows of dq at the same time.
template <KernelConfig kConfig>
REGARD_DEVICE RowTile first_iteration_tile(const KernelParams& params, const BackwardTask& task) {
  const int tiles = larger(task.end_row_tile - task.first_row_tile, 1);
  if constexpr (kConfig.rows_outer) {
    const int heads = task.end_head - task.first_head;
    const int first = task.key_tile / cluster_size(kConfig) % (heads * tiles);
    return {task.first_head + first % heads, task.end_row_tile - 1 - first / heads};
  }
  const int head = key_head<kConfig>(params, task) * group_of(params);
  const int begin = kConfig.split_q ? split_begin<kConfig>(params, task) : 0;
  return {head + begin / tiles, kDescends<kConfig> ? task.end_row_tile - 1 - begin % tiles
                                                   : task.first_row_tile + begin % tiles};
}

// A walk at its first tile; of a task without iterations, anywhere.
template <KernelConfig kConfig>
REGARD_DEVICE RowWalk<kConfig> row_walk(const KernelParams& params, const BackwardTask& task) {
  RowWalk<kConfig> walk{first_iteration_tile<kConfig>(params, task)};
  if constexpr (kConfig.tile_map) {
    if (task.iterations == 0) return walk;
    walk.read(params, task, walk.index);
    walk.take(params, task);
  }
  return walk;
}

// The tile that a walk was at kBehind steps ago. With a tile map, remembered; else walked again.
template <KernelConfig kConfig, int kBehind, bool kMapped = kConfig.tile_map>
struct TileBehind {
  RowWalk<kConfig> walk;

  REGARD_DEVICE const RowTile& tile() const { return walk; }
  REGARD_DEVICE void start(const RowWalk<kConfig>&) {}
  REGARD_DEVICE void advance(const RowWalk<kConfig>&, const KernelParams& params,
                             const BackwardTask& task) {
    regard::advance<kConfig>(walk, params, task);
  }
};
template <KernelConfig kConfig, int kBehind>
struct TileBehind<kConfig, kBehind, true> {
  RowTile tiles[kBehind] = {};

  REGARD_DEVICE explicit TileBehind(const RowTile&) {}
  REGARD_DEVICE const RowTile& tile() const { return tiles[0]; }
  // Called at each of the first kBehind steps, before the walk advances.
  REGARD_DEVICE void start(const RowTile& walk) {
#pragma unroll
    for (int n = 0; n + 1 < kBehind; ++n) tiles[n] = tiles[n + 1];
    tiles[kBehind - 1] = walk;
  }
  // Called at each later step, also before the walk advances.
  REGARD_DEVICE void advance(const RowTile& walk, const KernelParams&, const BackwardTask&) {
    start(walk);
  }
};

// How many of the task's iterations visit a visible tile. task.iterations still counts all tiles.
// All lanes of a warp call this.
template <KernelConfig kConfig>
REGARD_DEVICE int visible_iterations(const KernelParams& params, const BackwardTask& task) {
  const int begin = kConfig.split_q ? split_begin<kConfig>(params, task) : 0;
  const int end = begin + task.iterations;
  const int tiles = larger(task.end_row_tile - task.first_row_tile, 1);
  const int first_head = key_head<kConfig>(params, task) * group_of(params);
  int sum = 0;
#pragma unroll 1
  for (int head = begin / tiles; head * tiles < end; ++head) {
    const int first = larger(begin - head * tiles, 0), last = smaller(end - head * tiles, tiles);
    const int first_tile =
        kDescends<kConfig> ? task.end_row_tile - last : task.first_row_tile + first;
    sum += map_of_head<kConfig>(params, task, first_head + head)
               .count_of_lane(first_tile, first_tile + last - first);
  }
  return sum_of_warp(sum);
}

// The two blocks of a CTA pair have neighbouring tiles of keys.
template <KernelConfig kConfig>
REGARD_DEVICE BlockCoords backward_coords(const KernelParams& params, int block) {
  if constexpr (kConfig.tile_order) return HeadOrder<kConfig>::of(params).coords(params, block);
  if constexpr (!kConfig.cta_pair) return block_coords(params, block);
  BlockGrid grid = params.grid;
  grid.tiles /= 2;
  BlockCoords coords = block_coords(grid, block / 2);
  coords.tile = 2 * coords.tile + block % 2;
  return coords;
}

// CTA pair: the first key of the other block; whether either has keys.
template <KernelConfig kConfig>
REGARD_DEVICE int peer_first_key(const BackwardTask& task) {
  return (task.key_tile ^ 1) * kConfig.tiling.keys;
}
template <KernelConfig kConfig>
REGARD_DEVICE bool pair_has_keys(const BackwardTask& task) {
  return (task.key_tile & ~1) * kConfig.tiling.keys < task.seq.len_k;
}

// With a tile map, all lanes of a warp call this.
//
// iterations == 0: no row sees the keys, whose gradients are 0. key_count == 0: the block has
// nothing to do, except in a CTA pair, where the other block may need it.
template <KernelConfig kConfig>
REGARD_DEVICE BackwardTask backward_task(const KernelParams& params, int block) {
  constexpr int kRows = kConfig.tiling.rows, kKeys = kConfig.tiling.keys;
  const Problem& p = params.problem;
  const BlockCoords coords = backward_coords<kConfig>(params, block);
  const Divided at = divide(coords.head, params.by.entry);
  BackwardTask x;
  x.b = at.quotient;
  x.dkv_head = at.rest;
  x.seq = short_sequence<kConfig>(p, x.b);
  // Under intervals, ordered additions to dq begin with the last keys, whose rows begin the latest.
  x.key_tile = kConfig.ordered_dq && kConfig.features.interval ? params.grid.tiles - 1 - coords.tile
                                                               : coords.tile;
  if constexpr (kConfig.tile_order) {
    const int64 head = int64(key_head<kConfig>(params, x)) * group_of(params);
    x.key_tile = tile_of_rank<kConfig>(params, x.b, head, x.seq.first_k, x.seq.len_k, coords.tile);
  }
  x.first_key = x.key_tile * kKeys;
  x.key_count = clamp_to(x.seq.len_k - x.first_key, 0, kKeys);
  Interval rows{0, x.seq.len_q};
  if constexpr (kConfig.features.interval) {
    // Both blocks of a CTA pair iterate over the rows that see the keys of either.
    const int first = kConfig.cta_pair ? x.key_tile / 2 * 2 * kKeys : x.first_key;
    const int last = kConfig.cta_pair ? smaller(first + 2 * kKeys, x.seq.len_k) - 1
                                      : x.first_key + x.key_count - 1;
    rows = {rows_of_key<kConfig>(p, x.seq, x.b, first).begin,
            rows_of_key<kConfig>(p, x.seq, x.b, last).end};
  }
  const bool has_keys = kConfig.cta_pair ? pair_has_keys<kConfig>(x) : x.key_count > 0;
  const bool any = has_keys && !rows.empty();
  x.first_row_tile = any ? int(rows.begin) / kRows : 0;
  x.end_row_tile = any ? (int(rows.end) + kRows - 1) / kRows : 0;
  if constexpr (kConfig.rows_outer) {
    x.first_head = x.dkv_head * group_of(params);
    x.end_head = x.first_head + group_of(params);
  }
  if constexpr (kConfig.split_q) {
    x.iterations = split_begin<kConfig>(params, x, 1) - split_begin<kConfig>(params, x);
  } else {
    x.iterations = (x.end_row_tile - x.first_row_tile) * group_of(params);
  }
  if constexpr (kConfig.tile_map) {
    x.map_row = int(map_row(p, kConfig, x.b, 0, x.seq.first_k, x.key_tile));
    x.iterations = visible_iterations<kConfig>(params, x);
  }
  return x;
}

// The same value in registers, marked as warp-uniform so that it takes uniform ones where it can.
template <KernelConfig kConfig>
REGARD_DEVICE BackwardTask uniform_task(const BackwardTask& x) {
  return {
      uniform(x.b),
      uniform(x.dkv_head),
      uniform(x.key_tile),
      uniform(x.first_key),
      uniform(x.key_count),
      uniform(x.first_row_tile),
      uniform(x.end_row_tile),
      uniform(x.iterations),
      {uniform(x.seq.len_q), uniform(x.seq.len_k), uniform(x.seq.first_q), uniform(x.seq.first_k)},
      kConfig.tile_map ? uniform(x.map_row) : 0,
      kConfig.rows_outer ? uniform(x.first_head) : 0,
      kConfig.rows_outer ? uniform(x.end_head) : 0};
}

}  // namespace regard
