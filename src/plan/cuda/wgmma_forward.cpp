// What the wgmma kernels take, and their table of tiles.
#include "plan/cuda/wgmma_forward.hpp"

#include <span>

#include "plan/cuda/config_members.hpp"
#include "plan/cuda/facts.hpp"
#include "plan/cuda/kernel/wgmma_layout.h"
#include "plan/cuda/tma_tensor.hpp"

namespace regard {
namespace {

constexpr int64 kLargestHead = 256;     // accumulators of out are 128 registers then
constexpr int64 kLargestF32Head = 128;  // f32, which has them twice

struct Line {
  int dim;  // the largest that it is meant for
  int dim_v;
  Tiling tiling;
};

// The first line for the head sizes whose rows are not too many. Accumulators and weights take
// keys * 3 / 4 + dim_v / 2 registers of a thread; two consumer warpgroups leave it 232, three 160,
// four 112.
constexpr Line kLines[] = {
    {64, 64, {.rows = 256, .keys = 64, .stages = 4}},
    {64, 64, {.rows = 192, .keys = 128, .stages = 3}},
    {64, 64, {.rows = 128, .keys = 128, .stages = 3}},
    {128, 128, {.rows = 128, .keys = 128, .stages = 2}},
    {192, 128, {.rows = 128, .keys = 128, .stages = 2}},
    {192, 192, {.rows = 128, .keys = 96, .stages = 2}},
    {256, 128, {.rows = 128, .keys = 96, .stages = 2}},
    {256, 256, {.rows = 128, .keys = 64, .stages = 2}},
};

// f32: scores and weights take keys registers of a thread, out and P V of a block dim_v. Fewer keys
// leave room for tiles of a bias and a mask.
constexpr Line kF32Lines[] = {
    {64, 64, {.rows = 128, .keys = 128, .stages = 2}},
    {128, 128, {.rows = 128, .keys = 64, .stages = 2}},
    {128, 128, {.rows = 128, .keys = 48, .stages = 2}},
    {128, 128, {.rows = 128, .keys = 32, .stages = 2}},
};

std::span<const Line> table_of(const KernelConfig& c) {
  if (c.products == Products::f16x3) return kF32Lines;
  return kLines;
}

// Whose bits are made for 32 keys at a time.
bool serves_dropout(const KernelConfig& c) {
  return !c.features.dropout || c.tiling.keys % 32 == 0;
}

bool is_possible(const KernelConfig& c) {
  const Tiling& t = c.tiling;
  const int consumers = consumers_of(t);
  const bool planes = c.products == Products::f16x3;
  const int registers = planes ? t.keys + c.dim_v : t.keys * 3 / 4 + c.dim_v / 2;
  if (planes && (t.keys < 16 || t.keys > 128)) return false;
  return t.warps == forward_warps(c) && consumers >= 2 && consumers <= (planes ? 3 : 4) &&
         t.rows == consumers * kWarpgroupRows && t.keys % 16 == 0 && t.keys <= 256 &&
         serves_dropout(c) && t.stages <= kMostWgmmaStages && t.slices * t.key_warps == 1 &&
         t.min_blocks == 1 &&
         registers <= (consumers == 2   ? 196
                       : consumers == 3 ? 132
                                        : 80);
}

// Three warpgroups have no registers for elementwise terms but a bias that tensors bring, and leave
// more of a short row idle: under intervals at its diagonal, without at its end. Four hide in one
// another's products what a tile of rows costs beside its own, which is most of it where rows are
// short; their steps of half the keys cost more where they are long.
bool is_too_high(const KernelConfig& c, const TilingWish& wish) {
  const Features& f = c.features;
  if (c.tiling.rows <= 128) return false;
  if (!is_within(f, {.bias = true, .interval = true, .signed_scale = true})) return true;
  if (f.bias && (!c.bias.by_tma || f.interval || c.tiling.rows > 192)) return true;
  if (c.tiling.rows <= 192) return f.interval ? wish.rows < 4096 : wish.rows <= 128;
  const int64 tiles = wish.heads * divide_up(wish.rows, int64(c.tiling.rows));
  const int64 length = larger(wish.rows, wish.keys);
  return c.varlen || !c.out_by_tma || wish.rows <= 128 || length > (f.interval ? 1024 : 512) ||
         tiles < 4 * wish.multiprocessors;
}

// Of more keys than a warpgroup has rows there is one block at most that it does not see, and the
// look at it costs as much; where rows are long, warpgroups that walk together are faster. Boxes of
// a bias, and what dropout drops, are taken by all.
bool is_uneven(const KernelConfig& c, const TilingWish& wish) {
  constexpr int64 kMostKeys = 1024;
  return c.features.interval && !c.varlen && !c.bias.by_tma && !has_dropout_warpgroup(c) &&
         c.products == Products::direct && c.tiling.keys <= kWarpgroupRows &&
         wish.keys <= kMostKeys;
}

void set_tiling(KernelConfig& c, const TilingWish& wish, const Tiling& tiling, bool bias_by_tma) {
  c.tiling = tiling;
  if (wish.forced) c.tiling = overridden(c.tiling, *wish.forced);
  c.dim = int(round_up(wish.dim, 16));
  c.dim_v = int(round_up(wish.dim_v, 16));
  if (!wish.forced || wish.forced->warps == 0) c.tiling.warps = forward_warps(c);
  c.bias.by_tma = bias_by_tma && c.tiling.keys % kPanelColumns == 0;
  c.skips_blocks = is_uneven(c, wish);
}

Fit take_line(KernelConfig& c, const TilingWish& wish) {
  const bool bias_by_tma = c.bias.by_tma;
  for (const Line& line : table_of(c)) {
    if (wish.dim > line.dim || wish.dim_v > line.dim_v) continue;
    // What is forced changes the common tiles, or those of so many rows.
    if (wish.forced && line.tiling.rows > 192 && wish.forced->rows != line.tiling.rows) continue;
    set_tiling(c, wish, line.tiling, bias_by_tma);
    if (wish.forced && !is_possible(c)) return Fit::impossible;
    if (!wish.forced && (is_too_high(c, wish) || !serves_dropout(c))) continue;
    if (shared_bytes_of(c) <= wish.limits.block) return Fit::fits;
    if (wish.forced) break;
  }
  return Fit::no_room;
}

// Out as it will be, where it is not given yet.
bool stores_out_by_tma(const Problem& p) {
  return !p.out.given() ||
         (p.out.type == p.type && is_tma_storable(forward_tma_tensors(p, kLines[0].tiling).out));
}

// Not in varlen batches: rows behind a sequence would take part in what a warp decides for its own.
bool loads_bias_by_tma(const Problem& p) {
  return is_bias_aligned(p) && !is_bias_of_keys(p, false) && !p.features.mask && !p.varlen &&
         p.type != Type::f32 && is_tma_loadable(forward_tma_tensors(p, kLines[0].tiling).bias);
}

}  // namespace

const char* why_not_wgmma(const Problem& p, const Chip& chip, int level) {
  if (chip.major != 9 || level < 90) {
    return "products of warpgroups are of compute capability 9.0 alone";
  }
  if (p.type == Type::f64) return "f64 is computed without tensor cores";
  if (p.type == Type::f32 && p.precision != 0) {
    return "wgmma kernels multiply f32 at its own precision alone";
  }
  if (p.type == Type::f32 && larger(p.sizes.dim, p.sizes.dim_v) > kLargestF32Head) {
    return "wgmma kernels have no tile for head sizes of f32 above 128";
  }
  if (p.sizes.dim > kLargestHead || p.sizes.dim_v > kLargestHead) {
    return "wgmma kernels have no tile for head sizes above 256";
  }
  if (p.sizes.len_k == 0 || p.sizes.rows_k == 0) return "there is no key to load";
  if (p.type == Type::f32) {
    return has_hi_lo_tensors(p)
               ? nullptr
               : "its planes of f16 would have more rows or blocks than 31 bits count";
  }
  const ForwardTmaTensors tensors = forward_tma_tensors(p, kLines[0].tiling);
  for (const TmaTensor* x : {&tensors.q, &tensors.k, &tensors.v}) {
    if (x->sizes[1] > 0 && x->sizes[3] > 0 && !is_tma_loadable(*x)) {
      return "the copy engine takes no q, k, v whose data does not begin at a multiple of 16 "
             "bytes, and no 2^31 rows";
    }
  }
  return nullptr;
}

const char* why_rather_mma(const Problem& p, const Chip& chip) {
  const Sizes& s = p.sizes;
  constexpr int64 kRows = 128;
  const bool planes = p.type == Type::f32;
  if (planes && s.group() * s.len_q <= kRows) return "so few query rows do not repay its planes";
  if (s.len_q <= kRows / 2) return "so few query rows leave most of a tile of 128 idle";
  // Of f32 a quarter of them is as fast as all with mma.
  if ((planes ? 4 : 2) * s.batch * s.heads_q * divide_up(s.len_q, kRows) < chip.multiprocessors) {
    return "tiles of 128 rows would leave most multiprocessors idle";
  }
  if (p.features.bias && is_bias_of_keys(p, false)) {
    return "mma kernels read a bias of keys once for all rows of a tile";
  }
  return nullptr;
}

int64 heads_of_wgmma_group(const Problem& p, const Chip& chip) {
  constexpr int64 kShort = 512, kFew = 4;
  const int64 heads = heads_sharing_cache(p, chip, false);
  const Sizes& s = p.sizes;
  const bool is_short = s.len_k <= kShort && s.dim > 64 && s.dim <= 128;
  return p.features.interval && is_short && batch_of_bias(p) == 1 ? smaller(heads, kFew) : heads;
}

KernelConfig wgmma_config(const Problem& p, int level) {
  return {.kernel = Kernel::forward,
          .family = Family::wgmma,
          .level = level,
          .type = p.type,
          .products = p.type == Type::f32 ? Products::f16x3 : Products::direct,
          .features = p.features,
          .out_by_tma = p.type != Type::f32 && stores_out_by_tma(p),
          .bias = {.type = p.features.bias ? p.bias.type : Type::none,
                   .aligned = is_bias_aligned(p),
                   .by_tma = loads_bias_by_tma(p)},
          .mask = {.copy_bytes = bytes_of_mask_copy(p)},
          .varlen = p.varlen};
}

Fit take_wgmma_tiling(KernelConfig& c, const TilingWish& wish) {
  // Where bias and mask lie in memory does not decide the size of the workspace; nor the tile, but
  // for the rows that tensors of a bias allow.
  const bool bias_aligned = c.bias.aligned;
  const int mask_copy = c.mask.copy_bytes;
  c.bias.aligned = c.features.bias && c.bias.type != Type::f64;
  if (c.features.mask) c.mask.copy_bytes = 16;
  const Fit fit = take_line(c, wish);
  if (fit == Fit::no_room && (stages_bias(c) || stages_mask(c))) {
    // Then they are read where they are.
    c.bias.aligned = c.bias.by_tma = false;
    c.mask.copy_bytes = 1;
    return take_line(c, wish);
  }
  c.bias.aligned = bias_aligned;
  c.mask.copy_bytes = mask_copy;
  return fit;
}

void add_split_launch(CudaPlan& plan, const Problem& p, const KernelConfig& main) {
  constexpr int kTensors = 3;  // q is with dout
  const Sizes& s = p.sizes;
  if (main.products != Products::f16x3 || s.batch * s.heads_q * s.len_q == 0) return;
  const int rows = p.backward ? main.tiling.rows : main.tiling.keys;  // of a block
  const KernelConfig c{
      .kernel = Kernel::split_f32,
      .family = Family::simt,
      .level = 50,
      .type = p.type,
      .dim = main.dim,
      .dim_v = main.dim_v,
      .tiling = {.rows = rows, .keys = rows, .warps = 8, .stages = 1, .slices = 1, .min_blocks = 1},
      .aligned = is_aligned(p),
      .varlen = p.varlen,
      .row_terms = {.used = p.backward}};
  const int64 unit = p.backward ? kHiLoBackwardUnit : c.tiling.keys;
  const int64 tiles = round_up(larger(s.len_q, s.len_k), unit) / c.tiling.keys;
  plan.launches.push_back(
      {.config = c,
       .grid = {.heads = int32(s.batch * s.heads_q), .tiles = int32(tiles), .splits = kTensors},
       .threads = c.tiling.warps * 32,
       .shared_bytes = shared_bytes_of(c)});
}

// The layout is the kernels' too, in plain numbers: they are asked for only where none wraps
// around.
Count hi_lo_bytes(const Problem& p, const KernelConfig& main) {
  if (main.products != Products::f16x3) return 0;
  const Sizes& s = p.sizes;
  const int64 unit = p.backward ? kHiLoBackwardUnit : main.tiling.keys;
  const int64 rows =
      hi_lo_rows(p, s.rows_q, s.len_q, unit) + hi_lo_rows(p, s.rows_k, s.len_k, unit);
  const Count more = Count(s.heads_q) * (rows + 1) * (main.dim + main.dim_v) * 16;
  return more.fits() ? Count(hi_lo_layout(p, main).size) : more;
}

}  // namespace regard
