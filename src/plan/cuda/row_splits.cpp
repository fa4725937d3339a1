// Costs of splits of query rows, by measurements.
#include "plan/cuda/backward_order.hpp"
#include "plan/cuda/splits.hpp"
#include "plan/cuda/visible_tiles.hpp"

namespace regard {
namespace {

constexpr int64 kRowsOfTile = 64;
constexpr int64 kWideColumns = 128;  // above it, a tile has 64 keys instead of 128
constexpr double kStart = 3;         // microseconds of a block

// Of mma's kernel for all keys of a sequence (H200): microseconds of an iteration over 64 rows
// where a block is alone on its multiprocessor; and where two share it, half of what both take.
struct OfWholeKeys {
  double alone, shared;

  double of_blocks(int64 count) const {
    return double(count % 2) * alone + double(count / 2 * 2) * shared;
  }
};
OfWholeKeys of_whole_keys(int64 columns, int64 keys) {
  if (columns <= 64 && keys <= 64) return {3.3, 2.6};
  if (columns <= 32) return {4.3, 2.9};
  if (columns <= 64) return {5.6, 3.75};
  if (columns <= kWideColumns) return {6.3, 6.3};
  return columns <= 192 ? OfWholeKeys{7.2, 7.2} : OfWholeKeys{8.9, 8.9};
}

// The tiles of rows of a query head that see some key of a tile.
VisibleTiles visible_row_tiles(const Problem& p, int64 tile_keys) {
  const int64 rows = p.sizes.len_q, keys = p.sizes.len_k, all = divide_up(rows, kRowsOfTile);
  if (!p.features.interval || p.features.positions) return {all, all};
  return visible_tiles(keys, tile_keys, kRowsOfTile, [&](int64 first, int64 last) {
    return Interval{visible_queries(p.mask_params, first, rows, keys).begin,
                    visible_queries(p.mask_params, last, rows, keys).end};
  });
}

// Times are in microseconds, and fitted to an H100: docs/notes/gpu-wgmma-backward.md, "Few tiles of
// keys", has what was measured.
struct RowSplitCosts {
  const Problem& p;
  const RowBlocks& blocks;
  const int64 at_once = blocks.at_once;
  const bool as_wgmma = blocks.as_wgmma;
  const Sizes& s = p.sizes;
  const int64 columns = larger(s.dim, s.dim_v), heads = s.batch * s.heads_kv;
  const int64 tile_keys = columns > kWideColumns ? 64 : 128;
  const int64 tiles_of_head =
      round_up(divide_up(s.len_k, tile_keys), blocks.in_pairs ? int64(2) : int64(1));
  const int64 tiles = heads * tiles_of_head;
  const VisibleTiles visible = visible_row_tiles(p, tile_keys);
  const bool rows_outer = as_wgmma && is_for_rows_outer(p);
  const bool whole_heads = p.deterministic || p.features.bias;

  RowSplits best() const {
    constexpr int64 kFewSplits = 16, kWaves = 4;
    if (tiles == 0) return {};
    if (tiles > most_tiles()) return {1, time(1)};
    int64 best = 1;
    const double unsplit = time(1), enough = (as_wgmma ? 0.95 : 0.9) * unsplit;
    double least = unsplit;
    const auto consider = [&](int64 splits) {
      if (splits < 2 || splits > most_splits()) return;
      if (const double x = time(splits); x < least) best = splits, least = x;
    };
    const int64 most = larger(kFewSplits, kWaves * at_once / tiles);
    for (int64 splits = 2; splits <= most; splits += larger<int64>(1, splits / 8)) consider(splits);
    for (int64 waves = 1; waves <= kWaves; ++waves) consider(waves * at_once / tiles);
    return least <= enough ? RowSplits{int(best), least} : RowSplits{1, unsplit};
  }

  // More blocks end at about the same time by themselves; unequal ones where there are many.
  int64 most_tiles() const { return (visible.equal() || !as_wgmma ? 2 : 8) * at_once; }
  // Parts take little memory, or less than the sums of dq.
  int64 most_splits() const {
    constexpr double kLittle = 64 << 20;
    const double of_dq = 4 * double(s.batch) * double(s.heads_q) * double(s.len_q) * double(s.dim);
    const int64 by_memory = int64(larger(kLittle, of_dq) / bytes_of_part());
    return smaller(s.group() * (whole_heads ? 1 : visible.most), by_memory);
  }
  double bytes_of_part() const {
    return 4 * double(s.batch) * double(s.heads_kv) * double(s.len_k) * double(s.dim + s.dim_v);
  }

  // The time of an iteration over 64 rows. Unequal blocks keep the chip mostly full, which makes
  // an iteration kFull times as slow. Few rows of f32 run on mma.
  double of_iteration() const {
    constexpr int64 kFewRows = 128;
    constexpr double kFull = 1.3;
    const double of_16_bits = columns <= 64 ? 1.2 : columns <= kWideColumns ? 1.8 : 2.5;
    const double x = columns > 64 && !visible.equal() ? kFull * of_16_bits : of_16_bits;
    if (p.type != Type::f32) return x;
    return s.len_q <= kFewRows ? 15 : 3 * x;
  }
  double of_block(int64 row_tiles, int64 splits) const {
    return kStart + of_iteration() * double(iterations(row_tiles, splits));
  }
  int64 iterations(int64 row_tiles, int64 splits) const {
    return whole_heads ? divide_up(s.group(), splits) * row_tiles
                       : divide_up(s.group() * row_tiles, splits);
  }
  double of_blocks_with_whole_keys(int64 splits) const {
    const double iteration =
        of_whole_keys(columns, s.len_k).of_blocks(divide_up(tiles * splits, at_once));
    return kStart + iteration * double(iterations(visible.mean, splits));
  }
  // A launch that adds the parts of dk and dv, which are written and read.
  double of_parts(int64 splits) const {
    const double kLaunch = as_wgmma ? 2 : 3, kBytes = as_wgmma ? 3e6 : 1.7e6;
    return splits == 1 ? 0 : kLaunch + 2 * bytes_of_part() * double(splits) / kBytes;
  }
  // Equal blocks end in waves. Of unequal ones the longest of a group of heads begin first: those
  // of one group end together, but for kTogether; of several groups, the longest blocks of the last
  // one begin late, and run alone for kLate of their time. Blocks that are split take the rows of
  // one head after another, which the cache may not keep: they are kSplit times as slow.
  double time(int64 splits) const {
    if (blocks.whole_keys) return of_blocks_with_whole_keys(splits) + of_parts(splits);
    constexpr double kTogether = 1.05, kLate = 0.6, kSplit = 1.05;
    const double mean = of_block(visible.mean, splits), longest = of_block(visible.most, splits);
    const int64 all_blocks = tiles * splits;
    if (visible.equal()) return double(divide_up(all_blocks, at_once)) * mean + of_parts(splits);
    const double all = mean * double(all_blocks) / double(at_once);
    const double slower = splits > 1 && rows_outer ? kSplit : 1;
    const bool together = heads_of_group(splits) >= heads * splits;
    const double ends =
        slower * all * (together ? kTogether : 1) + (together ? 0 : kLate * longest);
    return larger(longest, ends) + of_parts(splits);
  }
  int64 heads_of_group(int64 splits) const {
    if (splits == 1 && rows_outer) return heads_of_rows_outer(heads, tiles_of_head, at_once);
    return larger<int64>(1, at_once / tiles_of_head);
  }
};

}  // namespace

RowSplits row_splits_for(const Problem& p, const RowBlocks& blocks) {
  return RowSplitCosts{p, blocks}.best();
}

}  // namespace regard
