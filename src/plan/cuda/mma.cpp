// The mma family: what it can compute, its configuration, and its tilings.
//
// Of a table's entries for the head sizes, the first that fits is taken: its shared memory is that
// of mma_layout.h, `min_blocks` times on a multiprocessor. Every entry is a guess that a
// measurement may overrule; none changes a result beyond rounding.
#include <optional>
#include <span>

#include "plan/cuda/config_members.hpp"
#include "plan/cuda/facts.hpp"
#include "plan/cuda/families.hpp"
#include "plan/cuda/input_copies.hpp"
#include "plan/cuda/kernel/mma_layout.h"

namespace regard {
namespace {

// Forward. rows * slices * key_warps = warps * 16 m with m = 1 or 2; out takes m * dim_v / slices /
// 2 registers of a thread, a row of scores m * keys / 2.
constexpr TilingEntry kForward16[] = {
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
    {128, 128, {.rows = 64, .keys = 32, .warps = 4, .stages = 2, .min_blocks = 3}},
    {128, 128, {.rows = 64, .keys = 32, .warps = 4, .stages = 2}},
    {128, 128, {.rows = 32, .keys = 16, .warps = 4, .stages = 3, .key_warps = 4, .min_blocks = 2}},
    {128, 128, {.rows = 32, .keys = 16, .warps = 4, .stages = 2, .key_warps = 4}},
    {128, 128, {.rows = 32, .keys = 64, .warps = 2, .stages = 2}},
    {128, 128, {.rows = 32, .keys = 32, .warps = 2, .stages = 2}},
    {128, 128, {.rows = 16, .keys = 16, .warps = 4, .stages = 3, .key_warps = 4, .min_blocks = 2}},
    {128, 128, {.rows = 16, .keys = 16, .warps = 4, .stages = 2, .key_warps = 4}},
    {128, 128, {.rows = 16, .keys = 64, .warps = 1, .stages = 2}},
    {128, 128, {.rows = 16, .keys = 32, .warps = 1, .stages = 2}},

    {256, 256, {.rows = 64, .keys = 64, .warps = 4, .stages = 1, .min_blocks = 2}},
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

constexpr TilingEntry kForward32[] = {
    {64, 64, {.rows = 128, .keys = 32, .warps = 4, .stages = 1, .min_blocks = 2}},
    {64, 64, {.rows = 64, .keys = 64, .warps = 4, .stages = 2, .min_blocks = 2}},
    {64, 64, {.rows = 64, .keys = 32, .warps = 4, .stages = 2, .min_blocks = 2}},
    {64, 64, {.rows = 64, .keys = 32, .warps = 4, .stages = 2}},
    {64, 64, {.rows = 32, .keys = 32, .warps = 2, .stages = 2}},
    {64, 64, {.rows = 16, .keys = 32, .warps = 4, .stages = 2, .key_warps = 4}},
    {64, 64, {.rows = 16, .keys = 16, .warps = 4, .stages = 2, .key_warps = 4}},
    {64, 64, {.rows = 16, .keys = 32, .warps = 1, .stages = 2}},

    {128, 128, {.rows = 64, .keys = 32, .warps = 4, .stages = 2, .min_blocks = 2}},
    {128, 128, {.rows = 64, .keys = 32, .warps = 4, .stages = 2}},
    {128, 128, {.rows = 64, .keys = 32, .warps = 4, .stages = 1}},
    {128, 128, {.rows = 64, .keys = 16, .warps = 4, .stages = 2, .min_blocks = 2}},
    {128, 128, {.rows = 64, .keys = 16, .warps = 4, .stages = 2}},
    {128, 128, {.rows = 64, .keys = 16, .warps = 4, .stages = 1}},
    {128, 128, {.rows = 32, .keys = 32, .warps = 2, .stages = 2}},
    {128, 128, {.rows = 16, .keys = 16, .warps = 4, .stages = 2, .key_warps = 4}},
    {128, 128, {.rows = 16, .keys = 16, .warps = 2, .stages = 2, .key_warps = 2}},
    {128, 128, {.rows = 16, .keys = 32, .warps = 1, .stages = 2}},

    {192, 192, {.rows = 64, .keys = 16, .warps = 4, .stages = 2, .min_blocks = 2}},
    {192, 192, {.rows = 64, .keys = 16, .warps = 4, .stages = 1, .min_blocks = 2}},
    {192, 192, {.rows = 64, .keys = 32, .warps = 4, .stages = 2}},
    {192, 192, {.rows = 64, .keys = 32, .warps = 4, .stages = 1}},
    {192, 192, {.rows = 64, .keys = 16, .warps = 4, .stages = 1}},
    {192, 192, {.rows = 32, .keys = 16, .warps = 2, .stages = 1}},
    {192, 192, {.rows = 16, .keys = 16, .warps = 2, .stages = 2, .slices = 2, .min_blocks = 3}},
    {192, 192, {.rows = 16, .keys = 16, .warps = 2, .stages = 2, .slices = 2}},

    {256, 256, {.rows = 64, .keys = 16, .warps = 4, .stages = 1, .min_blocks = 2}},
    {256, 256, {.rows = 64, .keys = 32, .warps = 4, .stages = 2}},
    {256, 256, {.rows = 64, .keys = 32, .warps = 4, .stages = 1}},
    {256, 256, {.rows = 64, .keys = 16, .warps = 4, .stages = 1}},
    {256, 256, {.rows = 32, .keys = 16, .warps = 2, .stages = 1}},
    {256, 256, {.rows = 16, .keys = 16, .warps = 2, .stages = 2, .slices = 2, .min_blocks = 3}},
    {256, 256, {.rows = 16, .keys = 16, .warps = 4, .stages = 2, .slices = 4, .min_blocks = 2}},
    {256, 256, {.rows = 16, .keys = 32, .warps = 2, .stages = 2, .slices = 2}},
    {256, 256, {.rows = 16, .keys = 16, .warps = 2, .stages = 2, .slices = 2}},

    {512, 512, {.rows = 64, .keys = 16, .warps = 8, .stages = 1, .slices = 2}},
    {512, 512, {.rows = 32, .keys = 16, .warps = 8, .stages = 1, .slices = 4}},
    {512, 512, {.rows = 16, .keys = 16, .warps = 4, .stages = 2, .slices = 4}},
    {512, 512, {.rows = 16, .keys = 16, .warps = 4, .stages = 1, .slices = 4}},
};

// Backward. keys * slices = warps * 16 m with m = 1 or 2, rows / slices a multiple of 16; dk and dv
// take m (dim + dim_v) / slices / 2 registers of a thread, two tiles of scores m * rows / slices.
constexpr TilingEntry kBackward16[] = {
    {64, 64, {.rows = 32, .keys = 128, .warps = 4, .stages = 2, .min_blocks = 2}},
    {64, 64, {.rows = 64, .keys = 128, .warps = 8, .stages = 2}},
    {64, 64, {.rows = 64, .keys = 64, .warps = 4, .stages = 1, .min_blocks = 3}},
    {64, 64, {.rows = 64, .keys = 64, .warps = 4, .stages = 2}},
    {64, 64, {.rows = 32, .keys = 64, .warps = 4, .stages = 2}},
    {64, 64, {.rows = 32, .keys = 64, .warps = 4, .stages = 1}},
    {64, 64, {.rows = 32, .keys = 32, .warps = 2, .stages = 1}},

    {128, 128, {.rows = 64, .keys = 64, .warps = 4, .stages = 2, .min_blocks = 2}},
    {128, 128, {.rows = 64, .keys = 128, .warps = 8, .stages = 2, .slices = 2}},
    {128, 128, {.rows = 64, .keys = 128, .warps = 8, .stages = 1, .slices = 2}},
    {128, 128, {.rows = 32, .keys = 128, .warps = 8, .stages = 2}},
    {128, 128, {.rows = 32, .keys = 128, .warps = 8, .stages = 1}},
    {128, 128, {.rows = 32, .keys = 64, .warps = 4, .stages = 2}},
    {128, 128, {.rows = 32, .keys = 64, .warps = 4, .stages = 1}},
    {128, 128, {.rows = 32, .keys = 32, .warps = 2, .stages = 1}},

    {256, 256, {.rows = 64, .keys = 64, .warps = 4, .stages = 1, .min_blocks = 2}},
    {256, 256, {.rows = 128, .keys = 64, .warps = 8, .stages = 1, .slices = 4}},
    {256, 256, {.rows = 64, .keys = 64, .warps = 8, .stages = 1, .slices = 4}},
    {256, 256, {.rows = 32, .keys = 64, .warps = 8, .stages = 2, .slices = 2}},
    {256, 256, {.rows = 32, .keys = 64, .warps = 8, .stages = 1, .slices = 2}},
    {256, 256, {.rows = 32, .keys = 32, .warps = 4, .stages = 1, .slices = 2}},
    {256, 256, {.rows = 32, .keys = 16, .warps = 2, .stages = 1, .slices = 2}},

    {512, 512, {.rows = 64, .keys = 32, .warps = 8, .stages = 1, .slices = 4}},
    {512, 512, {.rows = 32, .keys = 32, .warps = 4, .stages = 1, .slices = 2}},
    {512, 512, {.rows = 32, .keys = 16, .warps = 2, .stages = 1, .slices = 2}},
};

constexpr TilingEntry kBackward32[] = {
    {64, 64, {.rows = 64, .keys = 128, .warps = 8, .stages = 1, .slices = 2}},
    {64, 64, {.rows = 32, .keys = 64, .warps = 4, .stages = 1, .min_blocks = 2}},
    {64, 64, {.rows = 64, .keys = 64, .warps = 4, .stages = 2}},
    {64, 64, {.rows = 32, .keys = 64, .warps = 4, .stages = 2}},
    {64, 64, {.rows = 32, .keys = 64, .warps = 4, .stages = 1}},
    {64, 64, {.rows = 32, .keys = 32, .warps = 4, .stages = 1, .slices = 2}},
    {64, 64, {.rows = 32, .keys = 32, .warps = 2, .stages = 1}},

    {128, 128, {.rows = 64, .keys = 64, .warps = 8, .stages = 1, .slices = 4}},
    {128, 128, {.rows = 32, .keys = 64, .warps = 8, .stages = 1, .slices = 2}},
    {128, 128, {.rows = 32, .keys = 32, .warps = 4, .stages = 1, .slices = 2}},

    {256, 256, {.rows = 32, .keys = 64, .warps = 8, .stages = 1, .slices = 2}},
    {256, 256, {.rows = 64, .keys = 32, .warps = 8, .stages = 1, .slices = 4}},
    {256, 256, {.rows = 32, .keys = 32, .warps = 4, .stages = 1, .slices = 2}},
    {256, 256, {.rows = 32, .keys = 16, .warps = 2, .stages = 1, .slices = 2}},
};

std::span<const TilingEntry> table_of(const KernelConfig& c) {
  if (c.kernel == Kernel::backward) {
    if (c.type == Type::f32) return kBackward32;
    return kBackward16;
  }
  if (c.type == Type::f32) return kForward32;
  return kForward16;
}

// Warps that split the keys rely on asynchronous copies.
bool can_split_over_warps(int level) { return level >= 80; }

// The warps that share a tile's rows (forward) or keys (backward) have 16 or 32 each. Backward, a
// thread loads the state of a row, and tiles begin where blocks of positions do.
bool is_possible(const KernelConfig& c) {
  const Tiling& t = c.tiling;
  const bool backward = c.kernel == Kernel::backward;
  const int owned = (backward ? t.keys : t.rows * t.key_warps) * t.slices, each = t.warps * 16;
  const bool has_stages = t.key_warps == 1 ? t.stages <= 2
                                           : !backward && can_split_over_warps(c.level) &&
                                                 t.key_warps == t.warps && t.slices == 1 &&
                                                 t.stages >= 2 && t.stages <= 8;
  return (owned == each || owned == 2 * each) && t.warps % t.slices == 0 && t.warps <= 32 &&
         t.rows % 16 == 0 && t.keys % 16 == 0 && t.rows <= 256 && t.keys <= 256 && has_stages &&
         t.min_blocks <= 32 && (backward || fits_positions(c)) &&
         (!backward || (t.rows % (16 * t.slices) == 0 && t.rows <= t.warps * 32 &&
                        kPositionBlock % t.rows == 0));
}

// Biases and masks of single pairs, and softcaps, leave too few registers for 32 rows a warp.
bool is_too_wide(const KernelConfig& c) {
  const Features& f = c.features;
  const bool of_pairs = (f.bias && !c.bias.one_row) || (f.mask && !c.mask.one_row) || has_spans(f);
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

// Forward: half the tile would hold all rows, or so few tiles leave multiprocessors idle.
bool is_too_high(int rows, const TilingRequest& request) {
  const int64 enough = larger<int64>(16, round_up(request.usual_rows, 16));
  return rows >= 2 * enough ||
         (rows > 64 && request.heads * divide_up(request.rows, rows) < request.multiprocessors);
}

// Backward, 16 bits. One tile of few rows needs no second stage, and three blocks a multiprocessor
// hide its loads (H100, 4096 heads, 64 rows, D 32: 119 us -> 96; 1024 heads, 20 rows, D 64: 35 ->
// 18 with 32 keys).
bool is_for_other_rows(const Tiling& t, const TilingRequest& request) {
  constexpr int64 kRows = 64;
  const bool narrow = larger(request.dim, request.dim_v) <= 64, few = request.rows <= kRows;
  if (narrow && t.stages == 1 && t.min_blocks == 3 && !few) return true;
  return t.keys >= 2 * larger<int64>(request.keys, narrow && !few ? 64 : 32);
}

// Up to 128 keys or rows a block has few steps, and blocks next to it hide its waits better than
// long steps do (measured on an H100). Forward, D 128: f32, 100 keys, 22 us -> 17 (where
// cheapest_f32_forward does not answer); bf16, 50 keys, 27 -> 24. Backward f32, 50 keys, D 64: 235
// -> 125; 2000 rows, 64 keys: 35 -> 29. Three blocks are for few keys only.
bool is_for_other_lengths(const KernelConfig& c, const TilingRequest& request) {
  constexpr int64 kFew = 128, kMostRows = 2048;
  const Tiling& t = c.tiling;
  const int64 columns = larger(request.dim, request.dim_v);
  const bool is_f32 = c.type == Type::f32;
  if (c.kernel == Kernel::backward) {
    const bool few = request.rows <= kFew || (request.keys <= kFew && request.rows <= kMostRows);
    if (!is_f32) return is_for_other_rows(t, request);
    if (!few) return false;
    return columns <= 128 ? t.rows * t.keys > 32 * 32 : (columns <= 224 || c.varlen) && t.keys > 32;
  }
  if (columns > 128 || t.rows != 64) return false;
  if (request.keys > kFew) return columns > 64 && t.min_blocks == 3;
  return t.keys * columns > (is_f32 ? 2048 : 4096);
}

// Backward, above 160 columns in 16 bits: tiles of 128 rows read half as many fragments of K and V,
// unless last rows and, under a causal mask, hidden parts of tiles are many: docs/notes/gpu-mma.md,
// "Compared with PyTorch". The slope of a softcap would spill, and above 192 columns other terms,
// tests of pairs and dropout, on some chips 350 bytes.
bool repays_tall_tiles(const KernelConfig& c, const Tiling& t, const TilingRequest& request) {
  constexpr int64 kFewKeys = 384;
  const int64 rows = request.usual_rows;
  const bool fills = 10 * round_up(rows, t.rows) <= 11 * round_up(rows, t.rows / 2);
  const Features& f = c.features;
  const bool plain = is_plain(f) && !tests_pairs(f) && !f.dropout;
  const bool has_registers = larger(request.dim, request.dim_v) <= 192 ? !has_slope(f) : plain;
  return fills && request.keys > t.keys && has_registers &&
         !(c.features.interval && request.keys <= kFewKeys);
}

// In 16 bits above 64 columns, two blocks of four warps on a multiprocessor are faster than one
// large block for some head sizes, and under a causal mask for few keys:
// docs/notes/gpu-mma.md, "Compared with PyTorch". Asked for forced tilings too: members
// that they leave open are those that would be chosen.
bool is_for_other_sizes(const KernelConfig& c, const Tiling& t, const TilingRequest& request) {
  constexpr int64 kKeysOfOneTile = 128, kFewKeys = 768, kFewKeysForward = 4096;
  const int64 columns = larger(request.dim, request.dim_v);
  const bool tall = c.kernel == Kernel::backward && t.rows == 128 && columns > 128;
  if (tall && (columns <= 160 || !repays_tall_tiles(c, t, request))) return true;
  const bool small = t.rows == 64 && t.keys == 64 && t.warps == 4 && t.min_blocks == 2;
  if (!small || c.type == Type::f32 || columns <= 64) return false;
  const bool causal = c.features.interval;
  if (c.kernel == Kernel::backward) {
    const Features& f = c.features;
    if (has_slope(f)) return true;
    // With more score terms, these tiles spill registers. Eight warps make dq of one tile of keys
    // at once, so that one kernel makes all gradients (H200, (8, 8, 64, 160): 22 us -> 10).
    if (columns > 128) {
      return columns > 160 || request.keys <= t.keys || !is_plain(f) || tests_pairs(f) || f.dropout;
    }
    // A tile of 128 keys may have all of a sequence, and make its gradients in one kernel.
    if (request.keys > t.keys && request.keys <= kKeysOfOneTile) return true;
    return columns > 96 && !(causal && request.keys <= kFewKeys);
  }
  return columns > 128 && (columns <= 160 || !causal || request.keys > kFewKeysForward);
}

// Head sizes of the tiles: whole steps of every product, in each of the slices. Blocks of eight
// columns of out, dk and dv come in pairs.
int head_size(const KernelConfig& c, int64 size, bool sliced) {
  return int(round_up(size, sliced ? 16 * c.tiling.slices : step_of(c.type)));
}

// Decoding waits for memory: small tiles need more warps, so that as many bytes are on their way
// (D 72: 95 us -> 79, 20 sequences of 31743 keys, H100).
void widen_decoding(KernelConfig& c, const TilingRequest& request) {
  constexpr int64 kRows = 64;
  const Tiling& t = c.tiling;
  if (c.type == Type::f32 || t.key_warps != 4 || t.rows != 16 || t.keys != 16 ||
      request.usual_rows > kRows || larger(request.dim, request.dim_v) > 80) {
    return;
  }
  KernelConfig wider = c;
  wider.tiling.warps = wider.tiling.key_warps = 8;
  wider.tiling.min_blocks = 1;
  if (fits(wider, request.limits)) c = wider;
}

void set_tiling(KernelConfig& c, const TilingRequest& request, const Tiling& tiling) {
  c.tiling = tiling;
  // The slope of a softcap is one more value of every score: half the rows keep within registers.
  if (c.kernel == Kernel::backward && has_slope(c.features) && tiling.rows == 64 &&
      tiling.slices <= 2) {
    c.tiling.rows = 32;
  }
  // Testing intervals takes registers, and 64 keys leave too few of them at 128 columns. Dropout
  // bits are generated for 32 keys at a time.
  if (c.kernel == Kernel::forward && c.type != Type::f32 && tiling.rows == 128 &&
      tiling.keys == 64 && tiling.warps == 4) {
    const bool wide = request.dim > 64 || request.dim_v > 64;
    if (c.features.dropout && !wide) c.tiling.keys = 96, c.tiling.stages = 2;
    if (c.features.interval && !c.features.dropout && wide) c.tiling.keys = 48;
  }
  if (request.forced) c.tiling = overridden(c.tiling, *request.forced);
  c.dim = head_size(c, request.dim, c.kernel == Kernel::backward);
  c.dim_v = head_size(c, request.dim_v, true);
  c.exact_dims = c.dim == request.dim && c.dim_v == request.dim_v;
  if (!request.forced) widen_decoding(c, request);
}

// The entries for the head sizes.
std::span<const TilingEntry> entries_for(const KernelConfig& c, const TilingRequest& request) {
  std::span<const TilingEntry> table = table_of(c);
  while (!table.empty() && (request.dim > table[0].dim || request.dim_v > table[0].dim_v)) {
    table = table.subspan(1);
  }
  std::size_t count = 0;
  while (count < table.size() && table[count].dim == table[0].dim &&
         table[count].dim_v == table[0].dim_v) {
    ++count;
  }
  return table.first(count);
}

// Packed GQA: the rows of all heads that share keys in one tile, where that at least halves the
// number of tiles.
bool packs_gqa(const Problem& p) {
  constexpr int64 kRows = 64;
  const int64 group = p.sizes.group(), rows = p.sizes.len_q;
  return !p.backward && group > 1 && rows <= kRows &&
         2 * divide_up(group * rows, kRows) <= group * divide_up(rows, kRows);
}

// How the kernel makes dbias; none where a separate pass makes it. Adding in any order is
// deterministic only where each element is added once. Nothing would be stored in tiles that
// intervals or lengths hide, because they are not visited.
BiasGradient bias_gradient(const Problem& p) {
  if (!wants_dbias(p) || (p.deterministic && is_broadcast(p))) return BiasGradient::none;
  const bool has_gaps = !p.accumulate && (p.features.interval || p.varlen);
  if (!is_broadcast(p) && !has_gaps) return BiasGradient::store;
  if (p.bias_sizes[2] == 1) return BiasGradient::add_to_row;
  return p.bias_sizes[3] == 1 ? BiasGradient::add_to_column : BiasGradient::add;
}

}  // namespace

Refusal why_not_mma(const Facts& f) {
  if (f.problem.type == Type::f64) return "f64 is computed without tensor cores";
  if (f.level < 75) return "the chip has none of the tensor core instructions that are used here";
  if (f.level < 80 && f.problem.type != Type::f16) {
    return "tensor cores of compute capability 7.5 multiply f16 only";
  }
  return {};
}

KernelConfig mma_config(const Facts& f) {
  const Problem& p = f.problem;
  const bool pack_gqa = packs_gqa(p);
  KernelConfig c{.kernel = p.backward ? Kernel::backward : Kernel::forward,
                 .family = Family::mma,
                 .level = f.level,
                 .type = p.type,
                 .features = kernel_features(p),
                 .aligned = is_aligned(p) || !inputs_to_align(p).empty(),
                 .bias = bias_form(p, pack_gqa),
                 .mask = mask_form(p, pack_gqa),
                 .varlen = p.varlen,
                 .seed_in_memory = reads_seed(p),
                 .pack_gqa = pack_gqa};
  if (p.type == Type::f32) {
    c.products = p.precision == 0 ? Products::tf32x3 : Products::tf32;
  }
  if (!p.backward) return c;
  c.wanted = wanted_of(p);
  c.dout_is_f32 = p.dout.given() && p.dout.type != p.type;
  c.dbias.how = bias_gradient(p);
  c.dbias.pairs = c.dbias.how == BiasGradient::add &&
                  (!adds_to_dbias_itself(p, c) || has_aligned_pairs(p.dbias));
  c.ordered_dq = p.deterministic && c.wanted.dq;
  return c;
}

Fit choose_mma_tiling(KernelConfig& c, const TilingRequest& request) {
  const Tiling* const forced = request.forced;
  const std::span<const TilingEntry> entries = entries_for(c, request);
  if (entries.empty()) return Fit::no_room;
  // Tiles do not depend on pointers: there is room for a bias, whether it can be staged or not.
  const bool bias_aligned = c.bias.aligned;
  c.bias.aligned = c.features.bias && c.bias.type != Type::f64;
  Fit fit = forced ? Fit::impossible : Fit::no_room;
  KernelConfig chosen = c;
  if (const std::optional<Tiling> tiling = short_mma_tiling(c, request)) {
    set_tiling(c, request, *tiling);
    const bool possible = is_possible(c) && !is_too_wide(c) && fits(c, request.limits);
    c.bias.aligned = bias_aligned;
    if (possible) return Fit::fits;
    c = chosen;
  }
  for (const TilingEntry& entry : entries) {
    if (is_for_other_sizes(c, entry.tiling, request)) continue;
    set_tiling(c, request, entry.tiling);
    const bool splits_keys = entry.tiling.key_warps > 1 && (!forced || forced->key_warps > 0);
    if (entry.tiling.key_warps > 1 && !(splits_keys && can_split_over_warps(c.level))) continue;
    if (forced ? !is_possible(c) : is_too_wide(c) || is_for_other_lengths(c, request)) continue;
    if (!fits(c, request.limits)) {
      if (fit == Fit::impossible) fit = Fit::no_room;
      continue;
    }
    // A lower tile may follow, for few rows.
    fit = Fit::fits;
    chosen = c;
    if (c.kernel == Kernel::backward || forced || !is_too_high(c.tiling.rows, request)) break;
  }
  c = chosen;
  c.bias.aligned = bias_aligned;
  return fit;
}

}  // namespace regard
