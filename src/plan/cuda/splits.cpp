// Costs of splits of keys, by measurements.
#include "plan/cuda/splits.hpp"

#include "plan/cuda/facts.hpp"
#include "plan/cuda/kernel/wgmma_layout.h"
#include "plan/cuda/visible_tiles.hpp"

namespace regard {
namespace {

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

int64 resident_blocks(const KernelConfig& c, const Chip& chip) {
  constexpr int64 kRegistersOfThread = 256;  // at most: 255, given out in units of 8
  const int64 registers = c.tiling.warps * 32 * kRegistersOfThread;
  const int64 by_registers =
      larger<int64>(c.tiling.min_blocks, chip.registers_per_multiprocessor / registers);
  const int64 by_shared = chip.shared_per_multiprocessor / (shared_bytes_of(c) + kReservedShared);
  return larger<int64>(1, smaller(by_registers, by_shared));
}

int splits_for(const KernelConfig& c, const Chip& chip, int64 tiles, int64 key_tiles) {
  if (c.family != Family::mma) return 1;
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
