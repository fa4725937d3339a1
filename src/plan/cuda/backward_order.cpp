#include "plan/cuda/backward_order.hpp"

#include "plan/cuda/facts.hpp"

namespace regard {
namespace {

// What a head's blocks read and add to while they walk over its rows: q, dout, and sums of dq.
int64 bytes_of_rows(const Sizes& s, Type type) {
  return larger<int64>(1, s.len_q * (int64(size_of(type)) * (s.dim + s.dim_v) + 4 * s.dim));
}

}  // namespace

int64 key_tiles(const KernelConfig& c, int64 len_k) {
  const int64 tiles = divide_up(len_k, c.tiling.keys);
  return c.cta_pair ? round_up(tiles, 2) : tiles;
}

bool is_uneven(const Problem& p) {
  if (p.features.positions) return false;  // nothing is known of them
  const Sizes& s = p.sizes;
  const auto seen = [&](int64 key) {
    const Interval rows = visible_queries(p.mask_params, key, s.len_q, s.len_k);
    return larger<int64>(0, rows.end - rows.begin);
  };
  return 2 * larger(seen(0), seen(s.len_k - 1)) > 3 * seen(s.len_k / 2);
}

// Many query heads that share keys: under a causal mask, blocks that took head after head would be
// at different rows all the time, and the cache would have to hold all of them (H100, D 128, 1366
// rows: 16/2 heads, batch 16: 1065 us -> 901; 55/5 heads, batch 5: 1289 -> 1028; four query heads a
// key head: 570 -> 597). Long sequences are slower that way (64/8 heads, 4096 rows: 6141 -> 6482).
bool is_for_rows_outer(const Problem& p) {
  constexpr int64 kManyHeads = 6, kMostRows = 3072;
  return p.features.interval && p.sizes.group() >= kManyHeads && p.sizes.len_q <= kMostRows &&
         !p.deterministic && is_uneven(p);
}

// Eight, or twice as many rather than few at last.
int64 heads_of_rows_outer(int64 heads, int64 tiles, int64 multiprocessors) {
  constexpr int64 kHeads = 8, kFew = 4;
  if (heads * tiles <= multiprocessors) return heads;
  const int64 last = heads % kHeads;
  return last > 0 && last < kFew ? 2 * kHeads : kHeads;
}

// With ordered additions to dq, a key tile waits for the one before it, and tiles of other heads
// run in between: about two blocks for each multiprocessor, because the cache can hold their sums.
//
// Under a causal mask, the most rows see the first keys. The first tiles of as many heads as fill
// the chip begin first, so that no long tile begins last. Heads of few tiles are not interleaved,
// because the cache would have to hold too many of them, except where several query heads share
// keys: each tile then takes long, and the heads are few. Half of the cache for their rows is a
// compromise (H100, D 128: 55/5 heads, batch 2, 1366 rows: 562 us -> 464; 32/8 heads, batch 8, 1024
// rows: 647 -> 568). Where rows are split over blocks, each walks over few heads, and those that
// share them run at the same time (36 key heads of 25 query heads, 678 rows, D 184, four splits,
// us: 8 heads 2328, 16 2533, 32 3079).
int64 heads_per_group(const Facts& f, const KernelConfig& c) {
  constexpr int64 kFewTiles = 16, kHeadsOfMma = 16;
  const int64 multiprocessors = f.chip.multiprocessors;
  const Sizes& s = f.problem.sizes;
  const int64 tiles = larger<int64>(key_tiles(c, s.len_k), 1);
  int64 heads = 1;
  if (c.ordered_dq) {
    heads = c.family == Family::mma ? kHeadsOfMma : 2 * multiprocessors / tiles;
  } else if (c.rows_outer) {
    heads = heads_of_rows_outer(s.batch * s.heads_kv, tiles, multiprocessors);
  } else if (c.features.interval || c.tile_order) {
    if (tiles >= kFewTiles || (c.split_q && c.family == Family::wgmma)) {
      heads = multiprocessors / tiles;
    } else if (c.family == Family::wgmma && s.group() > 1 && is_uneven(f.problem)) {
      heads = even_group(s.batch * s.heads_kv, f.chip.l2 / 2 / bytes_of_rows(s, c.type));
    }
  }
  return round_up(larger<int64>(heads, 1), batch_of_bias(f.problem));
}

}  // namespace regard
