// Costs of split-KV, by measurements.
#include "plan/cuda/splits.hpp"

#include "plan/cuda/kernel/mma_layout.h"

namespace regard {
namespace {

constexpr int64 kMostSplits = 128;

// Blocks that a multiprocessor surely holds at once.
int64 resident_blocks(const KernelConfig& c, const Chip& chip) {
  constexpr int64 kReservedShared = 1024;    // of each block, for the system
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

// Decoding waits for memory: costs are in bytes that a multiprocessor could read meanwhile.
int splits_of_decoding(const KernelConfig& c, const Chip& chip, const TilingRequest& request,
                       int64 tiles, int64 key_tiles) {
  constexpr int64 kBlockStart = 40 << 10, kMerge = 64 << 10, kCombine = 144 << 10;
  if (tiles == 0) return 1;
  const Tiling& t = c.tiling;
  const int64 tile_bytes = t.keys * (c.dim + c.dim_v) * int64(element_bytes(c.type));
  const auto merge_cost = [&](int64 splits) {
    return splits == 1                             ? 0
           : last_split_merges(c, request, splits) ? kMerge + bytes_of_merge(c, request, splits)
                                                   : kCombine;
  };
  const auto cost = [&](int64 splits) {
    const int64 each = divide_up(tiles * splits, chip.multiprocessors);
    return each * (divide_up(key_tiles, splits) * tile_bytes + kBlockStart) + merge_cost(splits);
  };
  int64 best = 1;
  for (int64 each = 1; each <= 4; ++each) {
    const int64 splits = smaller(smaller(each * chip.multiprocessors / tiles, kMostSplits),
                                 key_tiles / larger(2, t.key_warps));
    if (splits >= 2 && cost(splits) < cost(best)) best = splits;
  }
  return int(best);
}

}  // namespace

bool last_split_merges(const KernelConfig& c, const TilingRequest& request, int64 splits) {
  constexpr int64 kMost = 80 << 10;  // more takes longer than a launch that all the chip works on
  return c.tiling.key_warps > 1 && splits * partial_row_bytes(c) <= merge_room(c) &&
         bytes_of_merge(c, request, splits) <= kMost;
}

int splits_for(const KernelConfig& c, const Chip& chip, const TilingRequest& request, int64 tiles,
               int64 key_tiles) {
  if (c.family != Family::mma) return 1;
  if (c.tiling.key_warps > 1) return splits_of_decoding(c, chip, request, tiles, key_tiles);
  constexpr int64 kBusyWarps = 4;
  const int64 resident = resident_blocks(c, chip);
  const int64 busy = smaller(resident, divide_up(kBusyWarps, c.tiling.warps));
  if (tiles == 0 || 3 * tiles >= 2 * chip.multiprocessors * busy || key_tiles < 4) return 1;
  const int64 at_once = chip.multiprocessors * resident;
  // In sixteenths of the time of a key tile: the start of a block costs about one tile, the merge
  // two tiles and one sixteenth for each split.
  const auto cost = [&](int64 splits) {
    const int64 each = divide_up(key_tiles, splits);
    return divide_up(tiles * splits, at_once) * (each + 1) * 16 + (splits > 1 ? 32 + splits : 0);
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

}  // namespace regard
