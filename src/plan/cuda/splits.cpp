// Costs of splits of keys, by measurements.
#include "plan/cuda/splits.hpp"

#include "plan/cuda/facts.hpp"
#include "plan/cuda/kernel/mma_layout.h"
#include "plan/cuda/kernel/wgmma_layout.h"
#include "plan/cuda/visible_tiles.hpp"

namespace regard {
namespace {

constexpr int64 kMostSplits = 128;
constexpr int64 kMostBlocksOfCluster = 8;  // on every chip that has clusters

// Blocks that a multiprocessor surely holds at once.
int64 resident_blocks(const KernelConfig& c, const Chip& chip) {
  constexpr int64 kRegistersOfThread = 256;  // at most: 255, given out in units of 8
  const int64 registers = c.tiling.warps * 32 * kRegistersOfThread;
  const int64 by_registers =
      larger<int64>(c.tiling.min_blocks, chip.registers_per_multiprocessor / registers);
  const int64 by_shared = chip.shared_per_multiprocessor / (shared_bytes_of(c) + kReservedShared);
  return larger<int64>(1, smaller(by_registers, by_shared));
}

// What one block reads to merge the splits of a tile: only rows that exist.
int64 bytes_of_merge(const KernelConfig& c, const TilingRequest& request, int64 splits) {
  return smaller<int64>(request.rows, c.tiling.rows) * splits * partial_row_bytes(c);
}

// Whole tiles of rows take longer to merge than few keys, and a second wave of blocks longer than
// splits spare. H100, us, with splits, and of more heads, which have none: (2 heads, 200 rows and
// keys, D 256) 10.4 and 8.4, (2, 360, 128) 7.9 and 6.9, (1, 512, 64) 6.1 and 4.9. In two waves (2,
// 632, 256) 23, and wgmma 18.
bool has_whole_tiles(const TilingRequest& request) {
  constexpr int64 kRows = 64;
  return request.usual_rows > kRows;
}
bool is_too_short_to_merge(const TilingRequest& request) {
  constexpr int64 kElements = 80000;  // of the keys of a head
  return has_whole_tiles(request) && request.keys * larger(request.dim, request.dim_v) <= kElements;
}

// Decoding waits for memory: costs are in bytes that a multiprocessor could read meanwhile. Blocks
// that run at once share the memory's bandwidth; one alone on a multiprocessor reads little more
// than the share of one. Where some multiprocessors have two blocks and others one, these are done
// early, and a part of the bandwidth idles: on an H100, 136 and 160 tiles of 4096 keys take 5 and 9
// % more than the bandwidth allows, 192 tiles 3 %. The blocks of a cluster spare each other flags
// and memory, but must find room next to each other: on an H200, clusters of four and eight that
// would fill 128 of 132 multiprocessors take 1.03 to 1.33 times as long as free blocks.
int splits_of_decoding(const KernelConfig& c, const Chip& chip, const TilingRequest& request,
                       int64 tiles, int64 key_tiles) {
  constexpr int64 kBlockOf16 = 40 << 10, kMerge = 64 << 10, kCombine = 144 << 10;
  constexpr double kAlone = 0.93;  // of the time that its share of the bandwidth would take
  constexpr double kUneven = 0.12;
  if (tiles == 0 || is_too_short_to_merge(request)) return 1;
  const Tiling& t = c.tiling;
  const int64 tile_bytes = t.keys * (c.dim + c.dim_v) * int64(element_bytes(c.type));
  const int64 of_block = kBlockOf16 * t.rows / 16;  // before its first tile, and after its last
  const auto merge_cost = [&](int64 splits) {
    return splits == 1 || cluster_merges(c, chip, request, tiles, splits) ? 0
           : last_split_merges(c, request, splits) ? kMerge + bytes_of_merge(c, request, splits)
                                                   : kCombine;
  };
  const double multiprocessors = double(chip.multiprocessors);
  const int64 at_once = chip.multiprocessors * resident_blocks(c, chip);
  const auto cost = [&](int64 splits) {
    const int64 blocks = tiles * splits, waves = (blocks - 1) / at_once;
    const double last = double(blocks - waves * at_once) / multiprocessors;
    const double uneven = last > 1 && last < 2 ? 1 + kUneven * (2 - last) : 1;
    const double each = double(divide_up(key_tiles, splits) * tile_bytes + of_block);
    return each * (double(waves * at_once) / multiprocessors + larger(uneven * last, kAlone)) +
           double(merge_cost(splits));
  };
  const int64 most = smaller(kMostSplits, key_tiles / larger(2, t.key_warps));
  int64 best = 1;
  const auto consider = [&](int64 splits) {
    if (splits < 2 || (has_whole_tiles(request) && tiles * splits > at_once)) return;
    if (cost(splits) < cost(best)) best = splits;
  };
  for (int64 each = 1; each <= 4; ++each) {
    consider(smaller(each * chip.multiprocessors / tiles, most));
  }
  for (int64 splits = 2; splits <= smaller(most, kMostBlocksOfCluster); splits *= 2) {
    if (cluster_merges(c, chip, request, tiles, splits)) consider(splits);
  }
  return int(best);
}

// The time of all blocks, each of which takes `mean` on average. Equal blocks end in waves. Of
// unequal ones the longest begin first, so that they end nearly together.
double time_of_blocks(const VisibleTiles& visible, double mean, int64 blocks, int64 at_once) {
  if (visible.equal()) return double(divide_up(blocks, at_once)) * mean;
  return mean * (double(blocks) / double(at_once) + 0.25);
}
// The tiles of keys that some row of a tile sees.
VisibleTiles visible_key_tiles(const Problem& p, int64 tile_rows, int64 tile_keys) {
  const int64 rows = p.sizes.len_q, keys = p.sizes.len_k, all = divide_up(keys, tile_keys);
  if (!p.features.interval || p.features.positions || rows == 0) return {all, all};
  return visible_tiles(rows, tile_rows, tile_keys, [&](int64 first, int64 last) {
    return Interval{visible_keys(p.mask_params, first, rows, keys).begin,
                    visible_keys(p.mask_params, last, rows, keys).end};
  });
}

// Microseconds that a forward block of wgmma takes for a tile of keys (H100).
double time_of_key_tile(const KernelConfig& c, const Sizes& s) {
  const int64 columns = larger(s.dim, s.dim_v);
  const double rate = columns <= 64    ? 4.6e6
                      : columns <= 128 ? 6.4e6
                      : columns <= 256 ? 6.9e6
                                       : 4e6;  // operations
  const double products = hi_lo_parts(c) > 1 ? 3 : 1;
  return products * 2 * c.tiling.rows * c.tiling.keys * double(s.dim + s.dim_v) / rate;
}

}  // namespace

bool last_split_merges(const KernelConfig& c, const TilingRequest& request, int64 splits) {
  constexpr int64 kMost = 80 << 10;  // more takes longer than a launch that all the chip works on
  return c.tiling.key_warps > 1 && splits * partial_row_bytes(c) <= merge_room(c) &&
         bytes_of_merge(c, request, splits) <= kMost;
}

// Few numbers of splits, because each is a kernel of its own. Products of f32 take longer than the
// merge spares.
bool cluster_merges(const KernelConfig& c, const Chip& chip, const TilingRequest& request,
                    int64 tiles, int64 splits) {
  const Tiling& t = c.tiling;
  if (c.level < 90 || c.type == Type::f32 || t.key_warps == 1 || request.rows > t.rows)
    return false;
  if ((t.key_warps + 1) * t.rows * partial_row_bytes(c) > merge_room(c)) return false;
  const int64 blocks = tiles * splits;
  switch (splits) {
    case 2:
      return blocks <= chip.multiprocessors;
    case 4:
    case kMostBlocksOfCluster:
      return blocks <= chip.multiprocessors * 3 / 4;
    default:
      return false;
  }
}

int splits_for(const KernelConfig& c, const Chip& chip, const TilingRequest& request, int64 tiles,
               int64 key_tiles) {
  if (c.family != Family::mma) return 1;
  if (c.tiling.key_warps > 1) return splits_of_decoding(c, chip, request, tiles, key_tiles);
  constexpr int64 kBusyWarps = 4;
  const int64 resident = resident_blocks(c, chip);
  const int64 busy = smaller(resident, divide_up(kBusyWarps, c.tiling.warps));
  const int64 start = c.tiling.keys < 32 ? 2 : 1;  // of a block, in key tiles
  if (tiles == 0 || 3 * tiles >= 2 * chip.multiprocessors * busy || key_tiles < 4 * start) return 1;
  const int64 at_once = chip.multiprocessors * resident;
  // Costs are in sixteenths of the time of a key tile. A merge costs two starts and, for each
  // split, one sixteenth.
  const auto cost = [&](int64 splits) {
    const int64 each = divide_up(key_tiles, splits);
    return divide_up(tiles * splits, at_once) * (each + start) * 16 +
           (splits > 1 ? 32 * start + splits : 0);
  };
  int64 best = 1;
  for (int64 waves = 1; waves <= 4; ++waves) {
    const int64 most = smaller(smaller(waves * at_once / tiles, key_tiles / 2), kMostSplits);
    if (most < 2) continue;
    const int64 splits = divide_up(key_tiles, divide_up(key_tiles, most));  // none without keys
    if (splits >= 2 && cost(splits) < cost(best)) best = splits;
  }
  return int(best);
}

int key_splits_of_wgmma(const KernelConfig& c, const Problem& p, int64 multiprocessors,
                        int64 tiles) {
  // Microseconds: of a call, of a share of a tile next to its tiles of keys, and of the launch that
  // merges. Bytes of parts, written and read, in a microsecond.
  constexpr double kCall = 4, kShare = 1.5, kLaunch = 4, kBytes = 1.6e6;
  const Sizes& s = p.sizes;
  if (tiles == 0 || tiles > 2 * multiprocessors) return 1;
  const VisibleTiles visible = visible_key_tiles(p, c.tiling.rows, c.tiling.keys);
  const double of_tile = time_of_key_tile(c, s);
  const auto each = [&](int64 key_tiles, int64 splits) {
    return kShare + of_tile * double(divide_up(key_tiles, splits));
  };
  const double row_bytes = 8 * double(s.heads_q) * double(s.rows_q) * double(s.dim_v);
  const auto time = [&](int64 splits) {
    const double merge = splits == 1 ? 0 : kLaunch + row_bytes * double(splits) / kBytes;
    const double all =
        time_of_blocks(visible, each(visible.mean, splits), tiles * splits, multiprocessors);
    return kCall + larger(each(visible.most, splits), all) + merge;
  };
  int64 best = 1;
  for (int64 waves = 1; waves <= 4; ++waves) {
    const int64 splits =
        smaller(smaller(waves * multiprocessors / tiles, visible.most / 2), kMostSplits);
    if (splits >= 2 && time(splits) < time(best)) best = splits;
  }
  return time(best) <= 0.95 * time(1) ? int(best) : 1;
}

}  // namespace regard
