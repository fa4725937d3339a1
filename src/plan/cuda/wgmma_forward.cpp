// The forward pass of the wgmma family: what it can compute, its configuration, and its tilings.
#include <cmath>
#include <span>

#include "plan/cuda/config_members.hpp"
#include "plan/cuda/facts.hpp"
#include "plan/cuda/families.hpp"
#include "plan/cuda/input_copies.hpp"
#include "plan/cuda/kernel/wgmma_layout.h"
#include "plan/cuda/short_problems.hpp"
#include "plan/cuda/tma_tensor.hpp"

namespace regard {
namespace {

// Accumulators of 256 columns of out are 128 registers. Of more columns two blocks have a slice
// each.
constexpr int64 kLargestSlice = 256;

// The first entry is chosen that has the head sizes, and not too many rows. Accumulators and
// weights take keys * 3 / 4 + out_columns / 2 registers of a thread. A thread has 232 registers
// with two consumer warpgroups, 160 with three, 112 with four.
constexpr TilingEntry kEntries[] = {
    {64, 64, {.rows = 256, .keys = 64, .stages = 4}},
    {64, 64, {.rows = 192, .keys = 128, .stages = 3}},
    {64, 64, {.rows = 128, .keys = 128, .stages = 3}},
    {128, 128, {.rows = 128, .keys = 128, .stages = 2}},
    {192, 128, {.rows = 128, .keys = 128, .stages = 2}},
    {192, 192, {.rows = 128, .keys = 96, .stages = 2}},
    {256, 128, {.rows = 128, .keys = 96, .stages = 2}},
    {256, 256, {.rows = 128, .keys = 64, .stages = 2}},
};

// Tiles for head sizes of q or v above 256 have as many keys as there is room for next to Q.
constexpr TilingEntry kSlicedEntries[] = {
    {320, 512, {.rows = 128, .keys = 64, .stages = 2, .slices = 2}},
    {384, 512, {.rows = 128, .keys = 48, .stages = 2, .slices = 2}},
    {512, 512, {.rows = 128, .keys = 32, .stages = 2, .slices = 2}},
};
constexpr TilingEntry kWideEntries[] = {
    {320, 256, {.rows = 128, .keys = 64, .stages = 2}},
    {384, 256, {.rows = 128, .keys = 48, .stages = 2}},
    {512, 256, {.rows = 128, .keys = 32, .stages = 2}},
};

// f32: scores and weights take `keys` registers of the 240 of a thread, out `dim_v / 2`, and a
// chunk of P V half of its columns. Fewer keys leave room for tiles of a bias and a mask. S of less
// than 64 keys at a time is bound by reading Q from shared memory: where dim is wide, keys come
// before a second stage.
constexpr TilingEntry kF32Entries[] = {
    {64, 64, {.rows = 128, .keys = 128, .stages = 2}},
    {128, 128, {.rows = 128, .keys = 64, .stages = 2}},
    {128, 128, {.rows = 128, .keys = 48, .stages = 2}},
    {128, 128, {.rows = 128, .keys = 32, .stages = 2}},
    {128, 192, {.rows = 128, .keys = 64, .stages = 2}},
    {128, 256, {.rows = 128, .keys = 32, .stages = 2}},
    {192, 192, {.rows = 128, .keys = 64, .stages = 1}},
    {192, 192, {.rows = 128, .keys = 48, .stages = 1}},
    {192, 256, {.rows = 128, .keys = 32, .stages = 2}},
    {256, 128, {.rows = 128, .keys = 64, .stages = 1}},
    {256, 224, {.rows = 128, .keys = 48, .stages = 1}},
    {256, 256, {.rows = 128, .keys = 32, .stages = 1}},
};

std::span<const TilingEntry> table_of(const KernelConfig& c, const TilingRequest& request) {
  if (c.products == Products::f16x3) return kF32Entries;
  if (request.dim_v > kLargestSlice) return kSlicedEntries;
  if (request.dim > kLargestSlice) return kWideEntries;
  return kEntries;
}

// Dropout bits are generated for 32 keys at a time.
bool fits_dropout(const KernelConfig& c) { return !c.features.dropout || c.tiling.keys % 32 == 0; }

bool has_possible_slices(const KernelConfig& c) {
  const bool one = c.tiling.slices == 1;
  return out_columns(c) <= kLargestSlice && (one || (c.tiling.slices == 2 && !c.continues));
}

bool is_possible(const KernelConfig& c) {
  const Tiling& t = c.tiling;
  const int consumers = consumers_of(t);
  const bool is_f32 = c.products == Products::f16x3;
  const int registers =
      is_f32 ? t.keys + (c.dim_v + f32_chunk_columns(c)) / 2 : t.keys * 3 / 4 + out_columns(c) / 2;
  if (is_f32 && (t.keys < 16 || t.keys > 128 || t.slices > 1)) return false;
  return t.warps == forward_warps(c) && consumers >= 2 && consumers <= (is_f32 ? 3 : 4) &&
         t.rows == consumers * kWarpgroupRows && t.keys % 16 == 0 && t.keys <= 256 &&
         fits_dropout(c) && fits_positions(c) && t.stages <= kMostWgmmaStages &&
         has_possible_slices(c) && t.key_warps == 1 && t.min_blocks == 1 &&
         registers <= (consumers == 2   ? (is_f32 ? 208 : 196)
                       : consumers == 3 ? 132
                                        : 80);
}

// What the rows of all tiles of this height cost on the multiprocessor that has most of them,
// relative to a row of a tile of 192. Tiles are equally long, except under intervals, where blocks
// that have short ones take more. Measured at D 64, and D 40 (H100): a tile of 128 rows has fewer
// warpgroups to hide its waits.
double cost_of_tiles(const KernelConfig& c, const TilingRequest& request, int rows) {
  const double of_row = rows == 128 ? (c.features.interval ? 1.04 : 1.17) : rows == 192 ? 1 : 0.97;
  const double tiles = double(request.heads) * double(divide_up(request.rows, int64(rows)));
  const double blocks = double(larger<int64>(request.multiprocessors, 1));
  return of_row * rows * (c.features.interval ? tiles / blocks + 0.5 : std::ceil(tiles / blocks));
}

// Where the model of wgmma_costs.cpp does not choose. More than 128 rows are for kernels without
// score terms, except a bias that TMA loads.
//
// Three consumer warpgroups (192 rows) leave no registers for such terms, and more of a short
// sequence idle: with intervals at the diagonal, without them at the end. Four (256 rows) hide the
// prologue and the epilogue of a tile behind the products of other warpgroups, which pays where
// rows are short; their steps of 64 keys are slower where rows are long.
bool is_too_high(const KernelConfig& c, const TilingRequest& request) {
  const Features& f = c.features;
  if (c.tiling.rows <= 128) return false;
  if (!is_within(f, {.bias = true, .positions = true, .interval = true, .signed_scale = true}))
    return true;
  if (f.bias && (!c.bias.by_tma || f.interval || c.tiling.rows > 192)) return true;
  const auto costs_more_than = [&](int rows) {
    return cost_of_tiles(c, request, c.tiling.rows) > cost_of_tiles(c, request, rows);
  };
  if (request.rows <= 128 || costs_more_than(128)) return true;
  if (c.tiling.rows <= 192) return f.interval && request.rows < 4096;
  const int64 length = larger(request.rows, request.keys);
  return c.varlen || !c.out_by_tma || length > (f.interval ? 1024 : 512) ||
         (!f.interval && costs_more_than(192));
}

// Whether warpgroups skip key blocks that are masked for all of their rows. With tiles of more keys
// than a warpgroup has rows, at most one block can be skipped, and the test costs as much. On long
// rows, warpgroups that stay in step are faster. All warpgroups need each TMA tile of a bias, and
// each block of dropout bits.
bool can_skip_blocks(const KernelConfig& c, const TilingRequest& request) {
  constexpr int64 kMostKeys = 1024;
  return c.features.interval && !c.varlen && !c.bias.by_tma && !has_dropout_warpgroup(c) &&
         c.products == Products::direct && c.tiling.keys <= kWarpgroupRows &&
         request.keys <= kMostKeys;
}

// Few keys: the first product waits for a short block, and the second for what is left (H100, 40
// keys, D 128: 27 us -> 20; 250 keys, D 160: 42 -> 39). Multiprocessors with many tiles, or tiles
// of many rows, have other tiles to work on meanwhile (6320 rows, 83 keys, D 96: 50 -> 68).
bool has_few_keys(const KernelConfig& c, const TilingRequest& request) {
  constexpr int64 kMostRows = 256, kTiles = 4;
  const int64 columns = larger(request.dim, request.dim_v);
  if (columns <= 64 || request.rows > kMostRows) return false;
  if (request.keys <= kWarpgroupRows) return true;
  if (columns > 128) return request.keys <= 256;
  return request.keys <= (c.varlen ? 192 : 128) &&
         request.heads * divide_up(request.rows, 2 * int64(kWarpgroupRows)) <=
             kTiles * request.multiprocessors;
}

// Blocks of keys that warpgroups can skip, where intervals hide much of short rows (measured at D
// 128, 152 and 192).
void shorten_blocks(KernelConfig& c, const TilingRequest& request) {
  const int64 columns = larger(request.dim, request.dim_v);
  if (c.products == Products::direct && has_few_keys(c, request)) {
    c.tiling.keys = smaller<int>(c.tiling.keys, kWarpgroupRows);
  }
  if (columns <= 64 || columns > 192 || request.keys > (columns <= 128 ? 560 : 1024)) return;
  if (tests_pairs(c.features)) return;  // walks over a tile map skip nothing by intervals
  KernelConfig shorter = c;
  shorter.tiling.keys = kWarpgroupRows;
  shorter.tiling.stages = columns <= 128 ? 4 : 2;
  if (can_skip_blocks(shorter, request)) c = shorter;
}

void set_tiling(KernelConfig& c, const TilingRequest& request, const Tiling& tiling,
                bool bias_by_tma, bool may_shorten = true) {
  c.tiling = tiling;
  if (request.forced) c.tiling = overridden(c.tiling, *request.forced);
  c.dim = int(round_up(request.dim, 16));
  c.dim_v = int(round_up(request.dim_v, 16 * c.tiling.slices));
  // Next to wider tiles there is no room for one of out.
  c.out_by_tma &= c.tiling.slices == 1 && c.dim <= kLargestSlice;
  if (!request.forced) {
    c.bias.by_tma = bias_by_tma;
    if (may_shorten) shorten_blocks(c, request);
  }
  if (!request.forced || request.forced->warps == 0) c.tiling.warps = forward_warps(c);
  c.bias.by_tma = bias_by_tma && c.tiling.keys % kPanelColumns == 0;
  c.skips_blocks = can_skip_blocks(c, request);
}

// What a model of tiles' times prefers. Of wide f32 there is one tiling for each head size.
std::optional<Tiling> cheapest_tiling(const KernelConfig& c, const TilingRequest& request) {
  if (c.products == Products::direct) return cheapest_wgmma_tiling(c, request);
  if (larger(request.dim, request.dim_v) > 128) return {};
  const auto found = cheapest_f32_forward(c.features, request, Family::wgmma);
  return found ? std::optional(found->tiling) : std::nullopt;
}

Fit choose_entry(KernelConfig& c, const TilingRequest& request) {
  const bool bias_by_tma = c.bias.by_tma;
  const Tiling* const forced = request.forced;
  if (!forced) {
    if (const std::optional<Tiling> tiling = cheapest_tiling(c, request)) {
      set_tiling(c, request, *tiling, bias_by_tma, false);
      if (fits_dropout(c) && shared_bytes_of(c) <= request.limits.block) return Fit::fits;
    }
  }
  for (const TilingEntry& entry : table_of(c, request)) {
    if (request.dim > entry.dim || request.dim_v > entry.dim_v) continue;
    // Tiles of 256 rows are forced by their number of rows only.
    if (forced && entry.tiling.rows > 192 && forced->rows != entry.tiling.rows) continue;
    set_tiling(c, request, entry.tiling, bias_by_tma);
    if (forced && !is_possible(c)) return Fit::impossible;
    if (!forced && (is_too_high(c, request) || !fits_dropout(c))) continue;
    if (shared_bytes_of(c) <= request.limits.block) return Fit::fits;
    if (forced) break;
  }
  return Fit::no_room;
}

// An out that is not given yet is dense and begins at 16 bytes.
bool stores_out_by_tma(const Problem& p) {
  if (p.type == Type::f32 || p.continues) return false;
  if (!p.out.given()) return p.sizes.dim_v * int64(size_of(p.type)) % 16 == 0;
  return p.out.type == p.type && is_tma_storable(tma_tensors(p, {}).out);
}

// Not in packed batches: rows of another sequence would take part in what a warp decides.
bool loads_bias_by_tma(const Problem& p) {
  return is_bias_aligned(p) && !is_bias_of_keys(p, false) && !tests_pairs(p.features) &&
         !p.varlen && p.type != Type::f32 && is_tma_loadable(tma_tensors(p, {}).bias);
}

constexpr Refusal kTooFewRows = "so few query rows leave most of a tile of 128 idle";
constexpr Refusal kTooFewRowsToSplit =
    "so short a problem, or so few query rows, do not repay the split into hi and lo parts";
constexpr Refusal kNarrowWindow = "lower tiles compute less that so narrow a window hides";
constexpr Refusal kLittleWork = "lower tiles share out so little work to more multiprocessors";
constexpr Refusal kShortAndWide =
    "with so few rows or keys, tiles of a head size above 256 hide none of each other's waits";
constexpr Refusal kEndAnywhere =
    "packed sequences end anywhere in a tile of 128, and lower ones compute less in vain";
constexpr Refusal kShortSequences =
    "packed sequences with so few rows leave half of a tile of 128 idle";

int64 tiles_of(const Problem& p, int64 rows) {
  return p.sizes.batch * p.sizes.heads_q * divide_up(p.sizes.len_q, rows);
}

// f32: the split into parts is a launch of its own, and mma tiles have a quarter of the height.
// Short problems have a model; with many keys, few rows decide.
bool has_few_rows_for_f32(const Facts& f) {
  constexpr int64 kRows = 128, kLow = 64, kLowest = 32, kWidest = 224;
  const Problem& p = f.problem;
  const Sizes& s = p.sizes;
  const int64 columns = larger(s.dim, s.dim_v);
  if (s.len_q <= kLowest || has_few_low_tiles_of_f32(f.request(false))) return true;
  if (const auto best = cheapest_f32_forward(p.features, f.request(false))) {
    return best->family == Family::mma;
  }
  if (columns <= 128) return s.len_q <= kLow || s.group() * s.len_q <= kRows;
  return s.len_q <= kLow ||
         (s.len_q <= kRows && columns <= kWidest && tiles_of(p, kLow) <= f.chip.multiprocessors);
}

// Those that a tile's rows see, at most: a window moves with the rows.
int64 keys_of_tile(const Problem& p) {
  constexpr int64 kRows = 128;
  const MaskParams& mask = p.mask_params;
  const int64 keys = keys_in_reach(p);
  if (!p.features.interval || p.features.positions || mask.left < 0 || mask.right < 0) return keys;
  return mask.left < keys && mask.right < keys ? smaller(keys, mask.left + mask.right + kRows)
                                               : keys;
}

// Whether, up to 64 columns, there is so little work that the lower tiles of mma, which reach more
// multiprocessors, are faster. Figures: docs/notes/gpu-wgmma-forward.md, "Lower tiles of mma".
bool has_little_work(const Problem& p, int64 multiprocessors) {
  constexpr int64 kFewKeys = 256, kKeys = 60;  // for each multiprocessor
  constexpr double kSeen = 0.9;                // of the keys, under intervals
  if (larger(p.sizes.dim, p.sizes.dim_v) > 64) return false;
  const int64 tiles = tiles_of(p, 128), keys = keys_of_tile(p);
  if (keys <= kFewKeys) return 2 * tiles < multiprocessors;
  return double(tiles) * double(keys) * (p.features.interval ? kSeen : 1) <
         double(kKeys * multiprocessors);
}

// Slices do not share keys. Blocks of mma do, and are a third as fast on a whole chip.
bool has_few_slices(const Problem& p, int64 multiprocessors) {
  return p.sizes.dim_v > kLargestSlice && 3 * 2 * tiles_of(p, 128) < multiprocessors;
}

// Whether lower tiles of mma suit the rows. wgmma is as fast with half of a tile idle, except where
// there is little work. Figures: docs/notes/gpu-wgmma-forward.md, "Lower tiles of mma".
Refusal why_too_few_rows(const Problem& p, int64 multiprocessors) {
  constexpr int64 kRows = 128, kFewKeys = 512, kKeys = 90;  // for each multiprocessor
  const Sizes& s = p.sizes;
  const int64 columns = larger(s.dim, s.dim_v), tiles = tiles_of(p, kRows);
  const double heads = double(tiles);  // where a tile holds all rows
  if (usual_rows(p) <= kRows / 4) return kTooFewRows;
  // Next to Q of a wide head there is no second slot, so that short tiles do not overlap. Figures:
  // docs/notes/gpu-wgmma-forward.md, "Head sizes above 256".
  if (columns > kLargestSlice && smaller(s.len_q, keys_in_reach(p)) <= kRows) return kShortAndWide;
  if (s.len_q <= kRows / 2) {
    const int64 keys = keys_in_reach(p);
    const bool is_little = double(tiles) * double(keys) < double(kKeys * multiprocessors);
    const bool is_wide = columns > 192 && keys <= kRows / 2;
    const double hidden = hides_pairs(p) ? 1.5 : 0;
    const double most = (columns <= 128 ? 3 : is_wide ? 16 : 2) + hidden;
    const bool is_short = keys <= kFewKeys && heads < most * double(multiprocessors);
    if (columns <= 64 ? is_little || keys <= kFewKeys
                      : is_short || (is_little && keys > kFewKeys)) {
      return kTooFewRows;
    }
  }
  if (is_between_tiles(s.len_q, s.len_k, columns, hides_pairs(p),
                       heads / double(multiprocessors))) {
    return kTooFewRows;
  }
  if (!p.continues && may_share_keys(p.features, p.varlen) &&
      repays_shared_keys(s.len_q, s.len_k, columns, hides_pairs(p),
                         double(s.batch * s.heads_q) / double(multiprocessors))) {
    return kLittleWork;
  }
  // Half of a tile of 128 rows would be idle in most of these sequences. Figures:
  // docs/notes/gpu-random-problems.md, "Changes that made problems of the map faster".
  if (p.packed && usual_rows(p) <= kRows / 2) return kShortSequences;
  if (p.packed && usual_rows(p) < s.len_q &&
      rows_of_packed_tile(larger(s.len_q, s.len_k), usual_rows(p), columns, hides_pairs(p),
                          tests_pairs(p.features),
                          double(s.batch * s.heads_q) / double(multiprocessors)) > 0) {
    return kEndAnywhere;
  }
  // Tiles of 32 x 32 of mma compute fewer pairs that are hidden. Figures:
  // docs/notes/gpu-random-problems.md, "Low tiles above D 192".
  const bool is_wide = columns > 192 && hides_pairs(p) && s.len_q <= kRows * 3 / 2;
  if (p.packed && is_wide && usual_rows(p) <= kRows) return kShortSequences;
  return {};
}

}  // namespace

Refusal why_not_wgmma(const Facts& f) {
  const Problem& p = f.loaded();
  if (!f.copies_fit) return kRefusedAsTooLarge;
  if (f.chip.major != 9 || f.level < 90) {
    return "wgmma instructions exist on compute capability 9.0 only";
  }
  if (p.type == Type::f64) return "f64 is computed without tensor cores";
  if (p.type == Type::f32 && p.precision != 0) {
    return "wgmma kernels compute f32 in full precision only";
  }
  return {};
}

Refusal why_not_wgmma_forward(const Facts& f) {
  if (const Refusal refusal = why_not_wgmma(f)) return refusal;
  const Problem& p = f.loaded();
  if (p.sizes.len_k == 0 || p.sizes.rows_k == 0) return "there is no key to load";
  if (larger(p.sizes.dim, p.sizes.dim_v) > kLargestSlice) {
    if (p.type == Type::f32) return "wgmma kernels have no tile for head sizes of f32 above 256";
    if (p.continues) return "wgmma kernels continue no call with a head size above 256";
  }
  if (p.type == Type::f32) {
    if (has_hi_lo_tensors(p)) return {};
    return "its hi and lo parts would have more rows or blocks than 31 bits count";
  }
  const TmaTensors tensors = tma_tensors(p, {});
  for (const TmaTensor* x : {&tensors.q, &tensors.k, &tensors.v}) {
    if (x->sizes[1] > 0 && x->sizes[3] > 0 && !is_tma_loadable(*x)) {
      return "TMA cannot load q, k or v: data must begin at a multiple of 16 bytes, and have fewer "
             "than "
             "2^31 rows";
    }
  }
  return {};
}

Refusal why_rather_mma_forward(const Facts& f) {
  const Problem& p = f.problem;
  const int64 multiprocessors = f.chip.multiprocessors;
  if (p.type == Type::f32) {
    if (has_few_rows_for_f32(f)) return kTooFewRowsToSplit;
  } else if (const Refusal refusal = why_too_few_rows(p, multiprocessors)) {
    return refusal;
  }
  if (has_little_work(p, multiprocessors) || has_few_slices(p, multiprocessors)) {
    return kLittleWork;
  }
  const bool is_window = p.features.interval && !p.varlen && !p.features.positions;
  if (is_window && p.type != Type::f32 && has_narrow_window(f.request(false))) return kNarrowWindow;
  // H100, 4096 rows, D 512: 164 TFLOP/s, and wgmma, which reads the bias from memory, 213.
  if (is_bias_of_keys(p, false) && larger(p.sizes.dim, p.sizes.dim_v) <= kLargestSlice) {
    return "mma kernels read a bias that all queries share once for all rows of a tile";
  }
  return why_not_copies(p, f.copies);
}

KernelConfig wgmma_forward_config(const Facts& f) {
  const Problem& p = f.loaded();
  return {.kernel = Kernel::forward,
          .family = Family::wgmma,
          .level = f.level,
          .type = p.type,
          .products = p.type == Type::f32 ? Products::f16x3 : Products::direct,
          .features = p.features,
          .out_by_tma = stores_out_by_tma(p),
          .bias = {.type = p.features.bias ? p.bias.type : Type::none,
                   .aligned = is_bias_aligned(p),
                   .by_tma = loads_bias_by_tma(p)},
          .mask = {.copy_bytes = bytes_of_mask_copy(p)},
          .varlen = p.varlen,
          .seed_in_memory = reads_seed(p),
          .continues = p.continues};
}

Fit choose_wgmma_forward_tiling(KernelConfig& c, const TilingRequest& request) {
  // The tile does not depend on where bias and mask lie in memory, except that a bias by TMA allows
  // more rows, and keeps more keys.
  const bool bias_aligned = c.bias.aligned;
  const int mask_copy = c.mask.copy_bytes;
  c.bias.aligned = c.features.bias && c.bias.type != Type::f64;
  if (c.features.mask) c.mask.copy_bytes = 16;
  const Fit fit = choose_entry(c, request);
  if (fit == Fit::no_room && (stages_bias(c) || stages_mask(c))) {
    // Not staged, they are read from global memory.
    c.bias.aligned = c.bias.by_tma = false;
    c.mask.copy_bytes = 1;
    return choose_entry(c, request);
  }
  c.bias.aligned = bias_aligned;
  c.mask.copy_bytes = mask_copy;
  return fit;
}

}  // namespace regard
