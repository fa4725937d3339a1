// Tiling tables. Of a table's lines for the head sizes, the first that fits is taken: its shared
// memory is that of plan/*_layout.h, `min_blocks` times on a multiprocessor. Every line is a guess
// that a measurement may overrule; none changes a result beyond rounding.
#include "plan/cuda/tiling.hpp"

#include <span>

#include "plan/cuda/config_members.hpp"
#include "plan/cuda/kernel/mma_layout.h"
#include "plan/cuda/kernel/simt_layout.h"
#include "plan/cuda/kernel/wgmma_backward_layout.h"

namespace regard {
namespace {

// The system keeps this much of each block's shared memory.
constexpr int64 kReservedShared = 1024;
// Registers of a thread, at most; they are given out in units that make 255 of them 256.
constexpr int64 kRegistersOfThread = 256;

struct Line {
  int dim;  // the largest that it is meant for
  int dim_v;
  Tiling tiling;
};

// Forward. rows * slices * key_warps = warps * 16 m with m = 1 or 2; out takes m * dim_v / slices /
// 2 registers of a thread, a row of scores m * keys / 2.
constexpr Line kForward16[] = {
    {64, 64, {.rows = 128, .keys = 64, .warps = 4, .stages = 2, .min_blocks = 2}},
    {64, 64, {.rows = 128, .keys = 64, .warps = 4, .stages = 2}},
    {64, 64, {.rows = 64, .keys = 64, .warps = 4, .stages = 2, .min_blocks = 3}},
    {64, 64, {.rows = 64, .keys = 64, .warps = 4, .stages = 2, .min_blocks = 2}},
    {64, 64, {.rows = 64, .keys = 64, .warps = 4, .stages = 2}},
    {64, 64, {.rows = 32, .keys = 32, .warps = 4, .stages = 3, .key_warps = 4, .min_blocks = 2}},
    {64, 64, {.rows = 32, .keys = 32, .warps = 4, .stages = 2, .key_warps = 4}},
    {64, 64, {.rows = 32, .keys = 64, .warps = 2, .stages = 2}},
    {64, 64, {.rows = 16, .keys = 32, .warps = 4, .stages = 3, .key_warps = 4, .min_blocks = 2}},
    {64, 64, {.rows = 16, .keys = 32, .warps = 4, .stages = 2, .key_warps = 4}},
    {64, 64, {.rows = 16, .keys = 64, .warps = 1, .stages = 2}},

    {128, 128, {.rows = 128, .keys = 64, .warps = 4, .stages = 2, .min_blocks = 2}},
    {128, 128, {.rows = 128, .keys = 32, .warps = 4, .stages = 2, .min_blocks = 2}},
    {128, 128, {.rows = 128, .keys = 64, .warps = 8, .stages = 2}},
    {128, 128, {.rows = 128, .keys = 32, .warps = 8, .stages = 2}},
    {128, 128, {.rows = 64, .keys = 64, .warps = 4, .stages = 2, .min_blocks = 2}},
    {128, 128, {.rows = 64, .keys = 32, .warps = 4, .stages = 2}},
    {128, 128, {.rows = 32, .keys = 16, .warps = 4, .stages = 3, .key_warps = 4, .min_blocks = 2}},
    {128, 128, {.rows = 32, .keys = 16, .warps = 4, .stages = 2, .key_warps = 4}},
    {128, 128, {.rows = 32, .keys = 64, .warps = 2, .stages = 2}},
    {128, 128, {.rows = 32, .keys = 32, .warps = 2, .stages = 2}},
    {128, 128, {.rows = 16, .keys = 16, .warps = 4, .stages = 3, .key_warps = 4, .min_blocks = 2}},
    {128, 128, {.rows = 16, .keys = 16, .warps = 4, .stages = 2, .key_warps = 4}},
    {128, 128, {.rows = 16, .keys = 64, .warps = 1, .stages = 2}},
    {128, 128, {.rows = 16, .keys = 32, .warps = 1, .stages = 2}},

    {256, 256, {.rows = 128, .keys = 64, .warps = 8, .stages = 2}},
    {256, 256, {.rows = 128, .keys = 32, .warps = 8, .stages = 2}},
    {256, 256, {.rows = 64, .keys = 32, .warps = 4, .stages = 2}},
    {256, 256, {.rows = 64, .keys = 32, .warps = 4, .stages = 1}},
    {256, 256, {.rows = 64, .keys = 16, .warps = 4, .stages = 1}},
    {256, 256, {.rows = 32, .keys = 32, .warps = 2, .stages = 2}},
    {256, 256, {.rows = 32, .keys = 16, .warps = 2, .stages = 1}},
    {256, 256, {.rows = 16, .keys = 16, .warps = 4, .stages = 3, .key_warps = 4}},
    {256, 256, {.rows = 16, .keys = 16, .warps = 4, .stages = 2, .key_warps = 4}},
    {256, 256, {.rows = 16, .keys = 32, .warps = 2, .stages = 2, .slices = 2}},
    {256, 256, {.rows = 16, .keys = 16, .warps = 2, .stages = 2, .slices = 2}},

    {512, 512, {.rows = 64, .keys = 32, .warps = 8, .stages = 2, .slices = 2}},
    {512, 512, {.rows = 64, .keys = 32, .warps = 8, .stages = 1, .slices = 2}},
    {512, 512, {.rows = 32, .keys = 32, .warps = 8, .stages = 1, .slices = 4}},
    {512, 512, {.rows = 32, .keys = 16, .warps = 8, .stages = 1, .slices = 4}},
    {512, 512, {.rows = 16, .keys = 32, .warps = 4, .stages = 2, .slices = 4}},
    {512, 512, {.rows = 16, .keys = 32, .warps = 4, .stages = 1, .slices = 4}},
    {512, 512, {.rows = 16, .keys = 16, .warps = 4, .stages = 1, .slices = 4}},
};

constexpr Line kForward32[] = {
    {64, 64, {.rows = 128, .keys = 32, .warps = 4, .stages = 1, .min_blocks = 2}},
    {64, 64, {.rows = 64, .keys = 64, .warps = 4, .stages = 2, .min_blocks = 2}},
    {64, 64, {.rows = 64, .keys = 32, .warps = 4, .stages = 2, .min_blocks = 2}},
    {64, 64, {.rows = 64, .keys = 32, .warps = 4, .stages = 2}},
    {64, 64, {.rows = 32, .keys = 32, .warps = 2, .stages = 2}},
    {64, 64, {.rows = 16, .keys = 32, .warps = 1, .stages = 2}},

    {128, 128, {.rows = 64, .keys = 32, .warps = 4, .stages = 2, .min_blocks = 2}},
    {128, 128, {.rows = 64, .keys = 32, .warps = 4, .stages = 2}},
    {128, 128, {.rows = 64, .keys = 32, .warps = 4, .stages = 1}},
    {128, 128, {.rows = 32, .keys = 32, .warps = 2, .stages = 2}},
    {128, 128, {.rows = 16, .keys = 32, .warps = 1, .stages = 2}},

    {256, 256, {.rows = 64, .keys = 32, .warps = 4, .stages = 2}},
    {256, 256, {.rows = 64, .keys = 32, .warps = 4, .stages = 1}},
    {256, 256, {.rows = 64, .keys = 16, .warps = 4, .stages = 1}},
    {256, 256, {.rows = 32, .keys = 16, .warps = 2, .stages = 1}},
    {256, 256, {.rows = 16, .keys = 32, .warps = 2, .stages = 2, .slices = 2}},
    {256, 256, {.rows = 16, .keys = 16, .warps = 2, .stages = 2, .slices = 2}},

    {512, 512, {.rows = 64, .keys = 16, .warps = 8, .stages = 1, .slices = 2}},
    {512, 512, {.rows = 32, .keys = 16, .warps = 8, .stages = 1, .slices = 4}},
    {512, 512, {.rows = 16, .keys = 16, .warps = 4, .stages = 2, .slices = 4}},
    {512, 512, {.rows = 16, .keys = 16, .warps = 4, .stages = 1, .slices = 4}},
};

// Backward. keys * slices = warps * 16 m with m = 1 or 2, rows / slices a multiple of 16; dk and dv
// take m (dim + dim_v) / slices / 2 registers of a thread, two tiles of scores m * rows / slices.
constexpr Line kBackward16[] = {
    {64, 64, {.rows = 32, .keys = 128, .warps = 4, .stages = 2, .min_blocks = 2}},
    {64, 64, {.rows = 64, .keys = 128, .warps = 8, .stages = 2}},
    {64, 64, {.rows = 64, .keys = 64, .warps = 4, .stages = 2}},
    {64, 64, {.rows = 32, .keys = 64, .warps = 4, .stages = 2}},
    {64, 64, {.rows = 32, .keys = 64, .warps = 4, .stages = 1}},

    {128, 128, {.rows = 64, .keys = 128, .warps = 8, .stages = 2, .slices = 2}},
    {128, 128, {.rows = 64, .keys = 128, .warps = 8, .stages = 1, .slices = 2}},
    {128, 128, {.rows = 32, .keys = 128, .warps = 8, .stages = 2}},
    {128, 128, {.rows = 32, .keys = 128, .warps = 8, .stages = 1}},
    {128, 128, {.rows = 32, .keys = 64, .warps = 4, .stages = 2}},
    {128, 128, {.rows = 32, .keys = 64, .warps = 4, .stages = 1}},
    {128, 128, {.rows = 32, .keys = 32, .warps = 2, .stages = 1}},

    {256, 256, {.rows = 64, .keys = 64, .warps = 8, .stages = 1, .slices = 4}},
    {256, 256, {.rows = 32, .keys = 64, .warps = 8, .stages = 2, .slices = 2}},
    {256, 256, {.rows = 32, .keys = 64, .warps = 8, .stages = 1, .slices = 2}},
    {256, 256, {.rows = 32, .keys = 32, .warps = 4, .stages = 1, .slices = 2}},
    {256, 256, {.rows = 32, .keys = 16, .warps = 2, .stages = 1, .slices = 2}},

    {512, 512, {.rows = 64, .keys = 32, .warps = 8, .stages = 1, .slices = 4}},
    {512, 512, {.rows = 32, .keys = 32, .warps = 4, .stages = 1, .slices = 2}},
    {512, 512, {.rows = 32, .keys = 16, .warps = 2, .stages = 1, .slices = 2}},
};

constexpr Line kBackward32[] = {
    {64, 64, {.rows = 64, .keys = 128, .warps = 8, .stages = 1, .slices = 2}},
    {64, 64, {.rows = 32, .keys = 64, .warps = 4, .stages = 1, .min_blocks = 2}},
    {64, 64, {.rows = 64, .keys = 64, .warps = 4, .stages = 2}},
    {64, 64, {.rows = 32, .keys = 64, .warps = 4, .stages = 2}},
    {64, 64, {.rows = 32, .keys = 64, .warps = 4, .stages = 1}},
    {64, 64, {.rows = 32, .keys = 32, .warps = 2, .stages = 1}},

    {128, 128, {.rows = 64, .keys = 64, .warps = 8, .stages = 1, .slices = 4}},
    {128, 128, {.rows = 32, .keys = 64, .warps = 8, .stages = 1, .slices = 2}},
    {128, 128, {.rows = 32, .keys = 32, .warps = 4, .stages = 1, .slices = 2}},

    {256, 256, {.rows = 64, .keys = 32, .warps = 8, .stages = 1, .slices = 4}},
    {256, 256, {.rows = 32, .keys = 32, .warps = 4, .stages = 1, .slices = 2}},
    {256, 256, {.rows = 32, .keys = 16, .warps = 2, .stages = 1, .slices = 2}},
};

std::span<const Line> table_of(const KernelConfig& c) {
  if (c.kernel == Kernel::backward) {
    if (c.type == Type::f32) return kBackward32;
    return kBackward16;
  }
  if (c.type == Type::f32) return kForward32;
  return kForward16;
}

// Warps that split the keys rely on asynchronous copies.
bool splits_over_warps(int level) { return level >= 80; }

// The warps that share a tile's rows (forward) or keys (backward) have 16 or 32 each.
bool is_possible(const KernelConfig& c) {
  const Tiling& t = c.tiling;
  const bool backward = c.kernel == Kernel::backward;
  const int owned = (backward ? t.keys : t.rows * t.key_warps) * t.slices, each = t.warps * 16;
  const bool walks = t.key_warps == 1
                         ? t.stages <= 2
                         : !backward && splits_over_warps(c.level) && t.key_warps == t.warps &&
                               t.slices == 1 && t.stages >= 2 && t.stages <= 8;
  return (owned == each || owned == 2 * each) && t.warps % t.slices == 0 && t.warps <= 32 &&
         t.rows % 16 == 0 && t.keys % 16 == 0 && t.rows <= 256 && t.keys <= 256 && walks &&
         t.min_blocks <= 32 && (!backward || t.rows % (16 * t.slices) == 0);
}

// The first line for the head sizes; the others of its block follow it.
const Line* first_line(std::span<const Line> table, const TilingWish& wish) {
  for (const Line& line : table) {
    if (wish.dim <= line.dim && wish.dim_v <= line.dim_v) return &line;
  }
  return nullptr;
}

// Terms of single pairs, and softcaps, leave few registers for two units of rows a warp.
bool is_too_wide(const KernelConfig& c) {
  const Features& f = c.features;
  const bool of_pairs = (f.bias && !c.bias.one_row) || (f.mask && !c.mask.one_row);
  const bool narrow = c.tiling.keys <= 32 && c.dim > 64;
  return c.kernel == Kernel::forward && c.tiling.key_warps == 1 &&
         c.tiling.rows * c.tiling.slices > c.tiling.warps * 16 && !narrow &&
         (f.softcap || of_pairs);
}

bool fits(const KernelConfig& c, const SharedLimits& limits) {
  const int64 bytes = shared_bytes_of(c);
  return bytes <= limits.block &&
         (c.tiling.min_blocks == 1 ||
          c.tiling.min_blocks * (bytes + kReservedShared) <= limits.multiprocessor);
}

// Forward: half the tile would hold all rows, or tiles so high leave multiprocessors without any.
bool is_too_high(int rows, const TilingWish& wish) {
  const int64 enough = larger<int64>(16, round_up(wish.rows, 16));
  return rows >= 2 * enough ||
         (rows > 64 && wish.heads * divide_up(wish.rows, rows) < wish.multiprocessors);
}

void set_tiling(KernelConfig& c, const TilingWish& wish, const Tiling& tiling) {
  c.tiling = tiling;
  // The slope of a softcap is one more value of every score: half the rows keep within registers.
  if (c.kernel == Kernel::backward && has_slope(c.features) && tiling.rows == 64 &&
      tiling.slices <= 2) {
    c.tiling.rows = 32;
  }
  // Masks' tests need registers that 64 keys leave too few of at 128 columns; dropout serves 32
  // keys at a time.
  if (c.kernel == Kernel::forward && c.type != Type::f32 && tiling.rows == 128 &&
      tiling.keys == 64 && tiling.warps == 4) {
    const bool wide = wish.dim > 64 || wish.dim_v > 64;
    if (c.features.dropout && !wide) c.tiling.keys = 96, c.tiling.stages = 2;
    if (c.features.interval && !c.features.dropout && wide) c.tiling.keys = 48;
  }
  if (wish.forced) c.tiling = overridden(c.tiling, *wish.forced);
  c.dim = mma_head_size(c, wish.dim, c.kernel == Kernel::backward);
  c.dim_v = mma_head_size(c, wish.dim_v, true);
  c.exact_dims = c.dim == wish.dim && c.dim_v == wish.dim_v;
}

}  // namespace

int mma_head_size(const KernelConfig& c, int64 size, bool sliced) {
  // Blocks of eight columns of out, dk and dv come in pairs.
  return int(round_up(size, sliced ? 16 * c.tiling.slices : step_of(c.type)));
}

int64 shared_bytes_of(const KernelConfig& c) {
  if (c.family == Family::simt) return simt_shared_bytes(c);
  if (c.family == Family::wgmma) {
    return c.kernel == Kernel::backward ? backward_wgmma_shared(c) : forward_wgmma_shared(c);
  }
  return c.kernel == Kernel::backward ? backward_mma_shared(c) : forward_mma_shared(c);
}

int64 resident_blocks(const KernelConfig& c, int64 shared_bytes, const Chip& chip) {
  const int64 registers = c.tiling.warps * 32 * kRegistersOfThread;
  const int64 by_registers =
      larger<int64>(c.tiling.min_blocks, chip.registers_per_multiprocessor / registers);
  const int64 by_shared = chip.shared_per_multiprocessor / (shared_bytes + kReservedShared);
  return larger<int64>(1, smaller(by_registers, by_shared));
}

namespace {

// What one block reads to merge the splits of a tile: only its rows that exist.
int64 bytes_of_merge(const KernelConfig& c, const TilingWish& wish, int64 splits) {
  return smaller<int64>(wish.rows, c.tiling.rows) * splits * partial_row_bytes(c);
}

// Decoding waits for memory. Costs are bytes that a multiprocessor could read meanwhile.
int splits_of_decoding(const KernelConfig& c, const Chip& chip, const TilingWish& wish,
                       int64 blocks, int64 key_tiles) {
  constexpr int64 kMostSplits = 128, kBeginning = 40 << 10, kMerging = 64 << 10;
  constexpr int64 kCombining = 144 << 10;
  if (blocks == 0) return 1;
  const Tiling& t = c.tiling;
  const int64 tile = t.keys * (c.dim + c.dim_v) * int64(element_bytes(c.type));
  const auto merging = [&](int64 splits) {
    return splits == 1                          ? 0
           : last_split_merges(c, wish, splits) ? kMerging + bytes_of_merge(c, wish, splits)
                                                : kCombining;
  };
  const auto cost = [&](int64 splits) {
    const int64 each = divide_up(blocks * splits, chip.multiprocessors);
    return each * (divide_up(key_tiles, splits) * tile + kBeginning) + merging(splits);
  };
  int64 best = 1;
  for (int64 each = 1; each <= 4; ++each) {
    const int64 splits = smaller(smaller(each * chip.multiprocessors / blocks, kMostSplits),
                                 key_tiles / larger(2, t.key_warps));
    if (splits >= 2 && cost(splits) < cost(best)) best = splits;
  }
  return int(best);
}

}  // namespace

bool last_split_merges(const KernelConfig& c, const TilingWish& wish, int64 splits) {
  constexpr int64 kMost = 80 << 10;  // more takes longer than a launch that all the chip works on
  return c.tiling.key_warps > 1 && splits * partial_row_bytes(c) <= merge_room(c) &&
         bytes_of_merge(c, wish, splits) <= kMost;
}

int splits_for(const KernelConfig& c, const Chip& chip, const TilingWish& wish, int64 blocks,
               int64 key_tiles) {
  if (c.tiling.key_warps > 1) return splits_of_decoding(c, chip, wish, blocks, key_tiles);
  constexpr int64 kMostSplits = 128, kBusyWarps = 4;
  const int64 resident = resident_blocks(c, shared_bytes_of(c), chip);
  const int64 busy = smaller(resident, divide_up(kBusyWarps, c.tiling.warps));
  if (blocks == 0 || 3 * blocks >= 2 * chip.multiprocessors * busy || key_tiles < 4) return 1;
  const int64 at_once = chip.multiprocessors * resident;
  // In sixteenths of a key tile's time: beginning a block costs about one, merging what splits
  // leave two and a little for each.
  const auto cost = [&](int64 splits) {
    const int64 each = divide_up(key_tiles, splits);
    return divide_up(blocks * splits, at_once) * (each + 1) * 16 + (splits > 1 ? 32 + splits : 0);
  };
  int64 best = 1;
  for (int64 waves = 1; waves <= 4; ++waves) {
    const int64 most = smaller(smaller(waves * at_once / blocks, key_tiles / 2), kMostSplits);
    if (most < 2) continue;
    const int64 splits = divide_up(key_tiles, divide_up(key_tiles, most));  // none without keys
    if (splits >= 2 && cost(splits) < cost(best)) best = splits;
  }
  return int(best);
}

Fit take_mma_tiling(KernelConfig& c, const TilingWish& wish) {
  const std::span<const Line> table = table_of(c);
  const Line* const first = first_line(table, wish);
  if (!first) return Fit::no_room;
  // Tiles do not depend on pointers: there is room for a bias, whether it can be staged or not.
  const bool bias_aligned = c.bias.aligned;
  c.bias.aligned = c.features.bias && c.bias.type != Type::f64;
  Fit fit = wish.forced ? Fit::impossible : Fit::no_room;
  KernelConfig taken = c;
  for (const Line* line = first; line != table.data() + table.size(); ++line) {
    if (line->dim != first->dim || line->dim_v != first->dim_v) break;
    set_tiling(c, wish, line->tiling);
    const bool asked = !wish.forced || wish.forced->key_warps > 0;
    if (line->tiling.key_warps > 1 && !(asked && splits_over_warps(c.level))) continue;
    if (wish.forced ? !is_possible(c) : is_too_wide(c)) continue;
    if (!fits(c, wish.limits)) {
      if (fit == Fit::impossible) fit = Fit::no_room;
      continue;
    }
    // A lower tile may follow, for few rows.
    fit = Fit::fits;
    taken = c;
    if (c.kernel == Kernel::backward || wish.forced || !is_too_high(c.tiling.rows, wish)) break;
  }
  c = taken;
  c.bias.aligned = bias_aligned;
  return fit;
}

Fit take_simt_tiling(KernelConfig& c, const TilingWish& wish) {
  c.tiling = simt_tiling(c.kernel, c.type, c.dim, c.dim_v, wish.limits.block);
  // With rows enough for every multiprocessor, a warp has all splits of its own.
  if (c.kernel == Kernel::combine && wish.heads * wish.rows > 4 * wish.multiprocessors) {
    c.tiling.rows *= c.tiling.slices;
    c.tiling.slices = 1;
  }
  if (wish.forced) c.tiling = overridden(c.tiling, *wish.forced);
  if (shared_bytes_of(c) > wish.limits.block) return Fit::no_room;
  if (wish.forced && !simt_tiling_fits(c, wish.limits.block)) return Fit::impossible;
  return Fit::fits;
}

}  // namespace regard
