// The backward pass of the wgmma family: what it can compute, its configuration, and its tilings.
#include "plan/cuda/config_members.hpp"
#include "plan/cuda/facts.hpp"
#include "plan/cuda/families.hpp"
#include "plan/cuda/input_copies.hpp"
#include "plan/cuda/kernel/block_grid.h"
#include "plan/cuda/kernel/wgmma_backward_layout.h"
#include "plan/cuda/tma_tensor.hpp"
#include "plan/cuda/whole_keys.hpp"

namespace regard {
namespace {

constexpr int64 kLargestHead = 256;        // of dk or dv in a warpgroup's registers
constexpr int64 kLargestHeadOfBoth = 128;  // of both in one warpgroup's
constexpr int64 kLeastF32Rows = 16;
// With a smaller scale, lse / scale could be larger than a sum of three f16 terms.
constexpr double kLeastScaleF16 = 0x1p-12;

constexpr Tiling kTiling = {.rows = 64, .keys = 128, .warps = 12, .stages = 2};
constexpr Tiling kTallTiling = {.rows = 128, .keys = 128, .warps = 12, .stages = 2};
constexpr Tiling kWideTiling = {.rows = 64, .keys = 64, .warps = 12, .stages = 2};

const Tiling& tiling_of(Type type, int64 dim, int64 dim_v) {
  const int64 largest = type == Type::f32 ? kLargestHeadOfBoth / 2 : kLargestHeadOfBoth;
  return larger(dim, dim_v) > largest ? kWideTiling : kTiling;
}

// With softcap and dropout, P and its share in dS^T are two operands at the same time: next to the
// widest dv they leave no registers for dropout bits.
bool has_registers_for_dropout(const Problem& p) {
  return !(has_slope(p.features) && p.features.dropout) || p.sizes.dim_v <= 192;
}

// Whether TMA can store a gradient, if it is wanted.
bool is_storable(const Problem& p, const View& gradient, const TmaTensor& x) {
  return !gradient.given() || (gradient.type == p.type && is_tma_storable(x));
}

Refusal why_not_bias(const Problem& p) {
  if (!p.features.bias) return {};
  if (p.wants(p.dbias) && larger(p.sizes.dim, p.sizes.dim_v) > kLargestHeadOfBoth) {
    return "the wgmma backward kernel has no gradient of the bias for head sizes above 128";
  }
  if (p.wants(p.dbias) && has_slope(p.features)) {
    return "the wgmma backward kernel has no gradient of the bias together with a softcap";
  }
  if (!is_bias_aligned(p) && !is_bias_of_keys(p, false)) {
    return "the wgmma backward kernel cannot read a bias that is f64, unaligned, or shared by all "
           "keys";
  }
  return {};
}

// Each block of a CTA pair makes a multiple of 32 columns of dq. (H100, causal, 4096 rows, TFLOP/s
// without and with a pair: D 144 364 and 359, 160 371 and 389, 176 371 and 421, 192 395 and 446,
// 208 354 and 381, 224 372 and 400.)
int64 columns_of_pair(int64 dim) { return round_up(dim, 64); }

// Whether the two blocks of a cluster share the columns of dq: 96 or 128 each, which are not padded
// much, rows enough to repay the exchange, and no score terms, for which shared memory has no room.
bool is_cta_pair(const Problem& p) {
  constexpr int64 kLeastRows = 256;
  const int64 columns = p.sizes.dim;
  const bool wide = columns > kLargestHeadOfBoth && 4 * columns_of_pair(columns) <= 5 * columns;
  const bool plain = is_plain(p.features) && !tests_pairs(p.features) && !p.features.dropout;
  const Sizes& s = p.sizes;
  // In most packed sequences both blocks then have keys, and rows for at least half of the time.
  return plain && wide && s.len_q >= kLeastRows &&
         2 * mean_length(p, s.rows_q, s.len_q) >= kLeastRows &&
         mean_length(p, s.rows_k, s.len_k) > kWideTiling.keys;
}

// The batch entries of a cluster: they have the same rows and keys, walk the same tiles, and share
// the bias. Positions may be each entry's own, and intervals go by them.
int batch_of_cluster(const Problem& p) {
  const bool own_tiles = p.varlen || (p.features.positions && p.features.interval);
  if (own_tiles || p.bias_sizes[2] != p.sizes.len_q) return 1;
  for (const int blocks : kBlocksOfCluster) {
    if (batch_of_bias(p) % blocks == 0) return blocks;
  }
  return 1;
}

void set_dbias(KernelConfig& c, const Problem& p) {
  if (!wants_dbias(p)) return;
  const Sizes& s = p.sizes;
  const int64* const sizes = p.bias_sizes;
  const int cluster = batch_of_cluster(p);
  const bool whole = sizes[1] == s.heads_q && sizes[2] == s.len_q && sizes[3] == s.len_k &&
                     (sizes[0] == s.batch || cluster == s.batch);
  // Additions in memory have no fixed order: a separate pass computes dbias.
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

Refusal why_not_f32(const Problem& p) {
  const Sizes& s = p.sizes;
  if (larger(s.dim, s.dim_v) > kLargestHeadOfBoth) {
    return "the wgmma backward kernel has no tile for head sizes of f32 above 128";
  }
  if (s.len_q == 0 || s.rows_q == 0 || s.len_k == 0 || s.rows_k == 0) {
    return "there are no rows to load";
  }
  if (s.group() * s.len_q < kLeastF32Rows) {
    return "so few query rows do not repay the split into hi and lo parts, and dv, a sum of few "
           "terms, "
           "would show its rounding";
  }
  if (!has_hi_lo_tensors(p)) {
    return "its hi and lo parts would have more rows or blocks than 31 bits count";
  }
  if (wants_dbias(p)) return "the wgmma backward kernel of f32 has no gradient of the bias";
  return why_not_bias(p);
}

// Whether the kernel can have tiles of 128 rows, whose scores take 64 registers of a thread.
bool has_tall_tiles(const KernelConfig& c) {
  constexpr int kLargestTallHead = 64;
  const bool plain = is_plain(c.features) && !tests_pairs(c.features) && !c.features.dropout;
  return plain && c.products == Products::direct && larger(c.dim, c.dim_v) <= kLargestTallHead;
}
// Whether they repay the rows that they compute in vain. Few tiles of keys are shared out by tiles
// of rows, more evenly by small ones. (H100, D 64, 32 heads: full, 512 rows 1.04 times as fast,
// 2048 1.10, 16384 1.18; causal 1.01, 1.06, 1.10.)
bool is_for_tall_tiles(const TilingRequest& r) {
  constexpr int64 kFewRows = 448, kNarrowWindow = 1024;
  const MaskParams& mask = r.mask;
  if (r.mean_rows <= kFewRows) return false;
  if (mask.left >= 0 && mask.right >= 0 && mask.left + mask.right < kNarrowWindow) return false;
  return 12 * round_up(r.mean_rows, kTallTiling.rows) <= 13 * round_up(r.mean_rows, kTiling.rows) &&
         r.heads_kv * divide_up(r.mean_keys, kTallTiling.keys) >= r.multiprocessors;
}

// As many stages as there is room for.
Fit choose_stages(KernelConfig& c, const TilingRequest& request, const Tiling& tiling) {
  Fit fit = Fit::impossible;
  for (int stages = tiling == kWideTiling ? kMostBackwardStages : 2; stages >= 2; --stages) {
    c.tiling = tiling;
    c.tiling.stages = stages;
    c.tiling.warps = backward_warps(c);
    if (request.forced && overridden(c.tiling, *request.forced) != c.tiling) continue;
    if (backward_wgmma_shared(c) <= request.limits.block) return Fit::fits;
    fit = Fit::no_room;
  }
  return fit;
}

}  // namespace

Refusal why_not_wgmma_backward(const Facts& f) {
  if (const Refusal refusal = why_not_wgmma(f)) return refusal;
  const Problem& p = f.loaded();
  if (larger(p.sizes.dim, p.sizes.dim_v) > kLargestHead) {
    return "the wgmma backward kernel has no tile for head sizes above 256";
  }
  if (p.type == Type::f32) return why_not_f32(p);
  if (p.type == Type::f16 && adds_lse_by_product(p.features) && p.score.scale < kLeastScaleF16) {
    return "lse / scale would exceed the range of f16";
  }
  if (!has_registers_for_dropout(p)) {
    return "softcap and dropout together need more registers than these head sizes leave";
  }
  const TmaTensors tensors = tma_tensors(p, {});
  for (const TmaTensor* x : {&tensors.q, &tensors.k, &tensors.v}) {
    if (x->sizes[1] == 0 || x->sizes[3] == 0) return "there are no rows to load";
  }
  for (const TmaTensor* x : {&tensors.q, &tensors.k, &tensors.v, &tensors.dout}) {
    if (x->type != Type::none && !is_tma_loadable(*x)) {
      return "TMA cannot load q, k, v or dout: data must begin at a multiple of 16 bytes, and have "
             "fewer "
             "than 2^31 rows";
    }
  }
  return why_not_bias(p);
}

// Each tile of a pair has its own block.
bool may_have_cta_pairs(const Facts& f) {
  return f.problem.type != Type::f32 && !f.is_limited && is_cta_pair(f.problem);
}

Refusal why_rather_mma_backward(const Facts& f) {
  constexpr int64 kRows = 128;
  const Problem& p = f.problem;
  const Sizes& s = p.sizes;
  if (p.type == Type::f32 && s.len_q <= kRows) {
    return "so few query rows do not repay the split into hi and lo parts";
  }
  if (repays_whole_keys(f)) return "one kernel of mma has all keys of so short a sequence";
  return why_not_copies(f.problem, f.copies);
}

KernelConfig wgmma_backward_config(const Facts& f) {
  const Problem& p = f.loaded();
  const TmaTensors tensors = tma_tensors(p, {});
  KernelConfig c{.kernel = Kernel::backward,
                 .family = Family::wgmma,
                 .level = f.level,
                 .type = p.type,
                 .products = p.type == Type::f32 ? Products::f16x3 : Products::direct,
                 .features = kernel_features(p),
                 .out_by_tma = p.type != Type::f32 && !p.accumulate &&
                               is_storable(p, p.dk, tensors.dk) && is_storable(p, p.dv, tensors.dv),
                 .bias = bias_form(p, false),
                 .mask = mask_form(p, false),
                 .varlen = p.varlen,
                 .seed_in_memory = reads_seed(p),
                 .wanted = wanted_of(p)};
  c.ordered_dq = p.deterministic && c.wanted.dq;
  if (p.type == Type::f32) return c;
  c.cta_pair = may_have_cta_pairs(f) && p.wants(p.dq);
  set_dbias(c, p);
  return c;
}

Fit choose_wgmma_backward_tiling(KernelConfig& c, const TilingRequest& request) {
  c.dim = int(c.cta_pair ? columns_of_pair(request.dim) : round_up(request.dim, 16));
  c.dim_v = int(round_up(request.dim_v, 16));
  const int forced_rows = request.forced ? request.forced->rows : 0;
  const bool is_tall =
      forced_rows > 0 ? forced_rows == kTallTiling.rows : is_for_tall_tiles(request);
  if (is_tall && has_tall_tiles(c)) {
    const Fit fit = choose_stages(c, request, kTallTiling);
    if (fit == Fit::fits || forced_rows > 0) return fit;
  }
  const Tiling& first = tiling_of(c.type, request.dim, request.dim_v);
  const Fit fit = choose_stages(c, request, first);
  if (fit == Fit::fits || c.type != Type::f32 || first == kWideTiling) return fit;
  return choose_stages(c, request, kWideTiling);
}

RowTerms row_terms_of_delta(const KernelConfig& main) {
  // f32: the kernel that splits the inputs writes them.
  if (main.family != Family::wgmma || main.products == Products::f16x3) return {};
  return {.used = true,
          .joined = main.cta_pair,
          .lse_in_product = adds_lse_by_product(main.features),
          .delta_in_product = adds_delta_by_product(main.features)};
}

Count row_terms_bytes(const Problem& p, const KernelConfig& main) {
  if (main.family != Family::wgmma) return 0;
  const Count heads = p.sizes.heads_q;
  const Count rows = main.products == Products::f16x3 ? heads * hi_lo_term_rows(p)
                                                      : heads * dq_rows(p) + kRowsOfTermTile;
  return rows * (2 * row_term_bytes(main) + (main.products == Products::f16x3 ? 4 : 0));
}

}  // namespace regard
