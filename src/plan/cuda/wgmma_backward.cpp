// What the wgmma backward kernel takes, and its tiles.
#include "plan/cuda/wgmma_backward.hpp"

#include "plan/cuda/config_members.hpp"
#include "plan/cuda/facts.hpp"
#include "plan/cuda/kernel/block_grid.h"
#include "plan/cuda/kernel/wgmma_backward_layout.h"
#include "plan/cuda/tma_tensor.hpp"

namespace regard {
namespace {

constexpr int64 kLargestHead = 256;        // dk or dv of 64 keys is 128 registers then
constexpr int64 kLargestHeadOfBoth = 128;  // of dk and dv in one warpgroup's registers
constexpr int64 kLargestF32Head = 128;     // f32, which has sums of a tile beside those of all
constexpr int64 kLeastF32Rows = 16;
// Scales below it would make lse / scale pass what the sum of three f16 terms can be.
constexpr double kLeastScaleF16 = 0x1p-12;

constexpr Tiling kTiling = {.rows = 64, .keys = 128, .warps = 12, .stages = 2};
constexpr Tiling kWideTiling = {.rows = 64, .keys = 64, .warps = 12, .stages = 2};

const Tiling& tiling_of(Type type, int64 dim, int64 dim_v) {
  const int64 largest = type == Type::f32 ? kLargestF32Head / 2 : kLargestHeadOfBoth;
  return larger(dim, dim_v) > largest ? kWideTiling : kTiling;
}
const Tiling& tiling_of(const Problem& p) { return tiling_of(p.type, p.sizes.dim, p.sizes.dim_v); }

// Under softcap and dropout weights and their shares in dS^T are two operands at once, which leave
// no registers to draw what is dropped beside the widest dv.
bool has_registers_for_shares(const Sizes& s) { return s.dim_v <= 192; }

bool is_loadable(const TmaTensor& x) { return x.sizes[1] > 0 && is_tma_loadable(x); }

// Whether a gradient that is wanted can be written by the copy engine.
bool is_storable(const Problem& p, const View& gradient, const TmaTensor& x) {
  return !gradient.given() || (gradient.type == p.type && is_tma_storable(x));
}

const char* why_not_bias(const Problem& p) {
  if (!p.features.bias) return nullptr;
  if (p.wants(p.dbias) && larger(p.sizes.dim, p.sizes.dim_v) > kLargestHeadOfBoth) {
    return "the wgmma backward kernel has no gradient of the bias for head sizes above 128";
  }
  if (p.wants(p.dbias) && has_slope(p.features)) {
    return "the wgmma backward kernel has no gradient of the bias beside a softcap, whose slope is "
           "in its dS";
  }
  if (!is_bias_aligned(p) && !is_bias_of_keys(p, false)) {
    return "the wgmma backward kernel reads no bias one by one: it is f64, unaligned, or all keys "
           "share it";
  }
  return nullptr;
}

// Where a pair of blocks shares dq's columns: panels must be even, rows many enough for the price
// of an exchange, and shared memory has no room for terms beside it.
bool is_paired(const Problem& p) {
  constexpr int64 kLeastRows = 512;
  const bool plain = is_plain(p.features) && !p.features.mask && !p.features.dropout;
  return plain && !p.varlen && p.wants(p.dq) && p.sizes.len_q >= kLeastRows &&
         p.sizes.len_k > kWideTiling.keys && round_up(p.sizes.dim, 16) == 2 * kLargestHeadOfBoth;
}

// The batch entries of a cluster: they walk over the same rows and keys, and share the bias.
int batch_of_cluster(const Problem& p) {
  if (p.varlen || p.bias_sizes[2] != p.sizes.len_q) return 1;
  for (const int blocks : kBlocksOfCluster) {
    if (batch_of_bias(p) % blocks == 0) return blocks;
  }
  return 1;
}

void ask_for_dbias(KernelConfig& c, const Problem& p) {
  if (!p.features.bias || !p.wants(p.dbias)) return;
  const Sizes& s = p.sizes;
  const int64* const sizes = p.bias_sizes;
  const int cluster = batch_of_cluster(p);
  const bool whole = sizes[1] == s.heads_q && sizes[2] == s.len_q && sizes[3] == s.len_k &&
                     (sizes[0] == s.batch || cluster == s.batch);
  // The order of additions in memory is nobody's; a pass of its own makes dbias then.
  if (p.deterministic && !whole) return;
  c.cluster = cluster;
  const bool stores = whole && !p.varlen;
  c.dbias.how = stores          ? BiasGradient::store
                : sizes[2] == 1 ? BiasGradient::add_to_row
                                : BiasGradient::add;
  c.dbias.is_f32 = stores && p.dbias.given() && p.dbias.type != p.bias.type;
  // Sums of the workspace begin their rows at 16 bytes.
  const bool in_place = stores || (p.accumulate && p.dbias.type == Type::f32);
  c.dbias.aligned = !in_place || !p.dbias.given() || has_aligned_vectors(p.dbias);
}

// What planes do not take; their rows begin anywhere, and a product adds neither lse nor delta.
const char* why_not_f32(const Problem& p) {
  const Sizes& s = p.sizes;
  if (p.precision != 0) return "wgmma kernels multiply f32 at its own precision alone";
  if (larger(s.dim, s.dim_v) > kLargestF32Head) {
    return "wgmma kernels have no tile for head sizes of f32 above 128";
  }
  if (s.len_q == 0 || s.rows_q == 0 || s.len_k == 0 || s.rows_k == 0) {
    return "there are no rows to load";
  }
  if (s.group() * s.len_q < kLeastF32Rows) {
    return "so few query rows do not repay planes, and dv of a few terms shows their rounding";
  }
  if (!has_hi_lo_tensors(p)) {
    return "its planes of f16 would have more rows or blocks than 31 bits count";
  }
  if (p.features.bias && p.wants(p.dbias)) {
    return "the wgmma backward kernel of f32 has no gradient of the bias";
  }
  return why_not_bias(p);
}

// The wide kernel takes as many stages as there is room for.
Fit take_stages(KernelConfig& c, const TilingWish& wish, const Tiling& tiling) {
  Fit fit = Fit::impossible;
  for (int stages = tiling == kWideTiling ? kMostBackwardStages : 2; stages >= 2; --stages) {
    c.tiling = tiling;
    c.tiling.stages = stages;
    c.tiling.warps = backward_warps(c);
    if (wish.forced && overridden(c.tiling, *wish.forced) != c.tiling) continue;
    if (backward_wgmma_shared(c) <= wish.limits.block) return Fit::fits;
    fit = Fit::no_room;
  }
  return fit;
}

}  // namespace

const char* why_not_wgmma_backward(const Problem& p, const Chip& chip, int level) {
  if (chip.major != 9 || level < 90) {
    return "products of warpgroups are of compute capability 9.0 alone";
  }
  if (p.type == Type::f64) return "f64 is computed without tensor cores";
  if (p.type == Type::f32) return why_not_f32(p);
  if (p.sizes.dim > kLargestHead || p.sizes.dim_v > kLargestHead) {
    return "the wgmma backward kernel has no tile for head sizes above 256";
  }
  if (p.type == Type::f16 && adds_lse_by_product(p.features) && p.score.scale < kLeastScaleF16) {
    return "lse / scale would pass the range of f16 terms";
  }
  if (has_slope(p.features) && p.features.dropout && !has_registers_for_shares(p.sizes)) {
    return "softcap and dropout together take more registers than there are for these head sizes";
  }
  const BackwardTmaTensors tensors = backward_tma_tensors(p, tiling_of(p));
  for (const TmaTensor* x : {&tensors.q, &tensors.k, &tensors.v}) {
    if (x->sizes[1] == 0 || x->sizes[3] == 0) return "there are no rows to load";
  }
  for (const TmaTensor* x : {&tensors.q, &tensors.k, &tensors.v, &tensors.dout}) {
    if (x->type != Type::none && !is_loadable(*x)) {
      return "the copy engine takes no q, k, v, dout whose data does not begin at a multiple of 16 "
             "bytes, and no 2^31 rows";
    }
  }
  return why_not_bias(p);
}

const char* why_rather_mma_backward(const Problem& p) {
  constexpr int64 kRows = 128;
  if (p.type == Type::f32 && p.sizes.len_q <= kRows) {
    return "so few query rows do not repay its planes";
  }
  return nullptr;
}

KernelConfig wgmma_backward_config(const Problem& p, int level) {
  const BackwardTmaTensors tensors = backward_tma_tensors(p, tiling_of(p));
  KernelConfig c{.kernel = Kernel::backward,
                 .family = Family::wgmma,
                 .level = level,
                 .type = p.type,
                 .products = p.type == Type::f32 ? Products::f16x3 : Products::direct,
                 .features = p.features,
                 .out_by_tma = p.type != Type::f32 && !p.accumulate &&
                               is_storable(p, p.dk, tensors.dk) && is_storable(p, p.dv, tensors.dv),
                 .bias = bias_form(p, false),
                 .mask = mask_form(p, false),
                 .varlen = p.varlen,
                 .wanted = wanted_of(p)};
  c.features.sink = false;  // it is in the lse
  c.ordered_dq = p.deterministic && c.wanted.dq;
  if (p.type == Type::f32) return c;
  c.cta_pair = is_paired(p);
  ask_for_dbias(c, p);
  return c;
}

Fit take_wgmma_backward_tiling(KernelConfig& c, const TilingWish& wish) {
  c.dim = int(round_up(wish.dim, 16));
  c.dim_v = int(round_up(wish.dim_v, 16));
  const Tiling& first = tiling_of(c.type, wish.dim, wish.dim_v);
  const Fit fit = take_stages(c, wish, first);
  if (fit == Fit::fits || c.type != Type::f32 || first == kWideTiling) return fit;
  return take_stages(c, wish, kWideTiling);
}

int64 key_tiles(const KernelConfig& c, int64 len_k) {
  const int64 tiles = divide_up(len_k, c.tiling.keys);
  return c.cta_pair ? round_up(tiles, 2) : tiles;
}

int64 heads_taking_turns(const KernelConfig& c, const Chip& chip, int64 len_k) {
  constexpr int64 kFewTiles = 16;
  if (c.ordered_dq && c.family == Family::mma) return 16;
  const int64 tiles = larger<int64>(key_tiles(c, len_k), 1);
  // About two blocks a multiprocessor: few enough for the cache to keep what they add to.
  if (c.ordered_dq) return larger<int64>(2 * chip.multiprocessors / tiles, 1);
  // Under a causal mask the first keys are seen by the most rows. Those of about as many heads as
  // fill the chip begin first, so that no long tile begins last; of few tiles the cache would have
  // to hold too many heads.
  const bool differ = c.features.interval && tiles >= kFewTiles;
  return differ ? larger<int64>(chip.multiprocessors / tiles, 1) : 1;
}

void ask_for_row_terms(KernelConfig& delta, const KernelConfig& main) {
  if (main.products == Products::f16x3) return;  // of whoever makes the planes
  delta.row_terms = {.used = true,
                     .joined = main.cta_pair,
                     .lse_in_product = adds_lse_by_product(main.features),
                     .delta_in_product = adds_delta_by_product(main.features)};
}

Count row_terms_bytes(const Problem& p, const KernelConfig& main) {
  const Count heads = p.sizes.heads_q;
  const Count rows =
      main.products == Products::f16x3 ? heads * hi_lo_term_rows(p) : heads * dq_rows(p) + 64;
  return rows * (2 * row_term_bytes(main) + (main.products == Products::f16x3 ? 4 : 0));
}

}  // namespace regard
