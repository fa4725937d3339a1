// Configurations, tilings and grids of the simt family.
#include "plan/cuda/config_members.hpp"
#include "plan/cuda/facts.hpp"
#include "plan/cuda/families.hpp"
#include "plan/cuda/kernel/finish_layout.h"

namespace regard {
namespace {

// Whether a kernel of products can have its tiling.
bool is_possible(const KernelConfig& c) {
  const auto fits = [](int x) { return x == 16 || x == 32 || x == 64; };
  return fits(c.tiling.rows) && fits(c.tiling.keys) && c.tiling.warps == 8;
}

// Largest squares of (query, key) pairs whose sums and products fit the registers, and shared
// memory.
Tiling product_tiling(KernelConfig c, int64 shared_limit) {
  const Kernel own_kernel = c.kernel != Kernel::finish   ? c.kernel
                            : c.wanted.dk || c.wanted.dv ? Kernel::key_gradient
                                                         : Kernel::query_gradient;
  const bool of_keys = own_kernel == Kernel::key_gradient;
  // Words of a block's sums, for each of its own rows.
  const int64 words =
      round_up(simt_sums(own_kernel, c.dim, c.dim_v), kSimtSide) * real_bytes(c.type) / 4;
  // Two blocks of finish fit a multiprocessor, because they mostly move memory.
  const bool is_finish = c.kernel == Kernel::finish;
  const int most = simt_words(c.type) * kSimtThreads / (is_finish ? 2 : 1);
  int own = 64, walked = c.type == Type::f64 || is_finish ? 32 : 64;
  while (own > 16 && own * words > most) own /= 2;
  if (own * words > 32 * kSimtThreads) walked /= 2;
  for (;; (walked >= own ? walked : own) /= 2) {
    c.tiling = {.rows = of_keys ? walked : own,
                .keys = of_keys ? own : walked,
                .warps = kSimtThreads / 32,
                .stages = 1,
                .min_blocks = is_finish ? 2 : 1};
    if (shared_bytes_of(c) <= shared_limit || (own <= 16 && walked <= 16)) return c.tiling;
  }
}

Tiling tiling_of(const KernelConfig& c, int64 shared_limit) {
  switch (c.kernel) {
    case Kernel::delta:
      return {.rows = 64,
              .keys = 0,
              .warps = 8,
              .stages = 1,
              .min_blocks = c.type == Type::f64 ? 2 : 6};
    case Kernel::combine:
      return {.rows = 32 / lanes_of_row(c.dim_v, 4),
              .keys = 0,
              .warps = 4,
              .stages = 1,
              .slices = 4,
              .min_blocks = 4};
    case Kernel::combine_dkv:
      return {.rows = 1,
              .keys = 4 * 32 / lanes_of_row(larger(c.dim, c.dim_v), 4),
              .warps = 4,
              .stages = 1,
              .min_blocks = 4};
    case Kernel::finish:
      if (c.flags_nonfinite) return product_tiling(c, shared_limit);
      return {.rows = 64, .keys = 0, .warps = 4, .stages = 1, .min_blocks = 4};
    case Kernel::sink_gradient:
      return {.rows = 1, .keys = 0, .warps = 8, .stages = 1};
    default:
      return product_tiling(c, shared_limit);
  }
}

}  // namespace

KernelConfig plain_config(const Problem& p, Kernel kernel) {
  return {
      .kernel = kernel, .family = Family::simt, .level = 50, .type = p.type, .varlen = p.varlen};
}

KernelConfig simt_config(const Problem& p, Kernel kernel) {
  KernelConfig c = plain_config(p, kernel);
  c.bias.type = p.features.bias ? p.bias.type : Type::none;
  c.features = kernel_features(p);
  c.seed_in_memory = reads_seed(p);
  c.dim = int(p.sizes.dim);
  c.dim_v = int(p.sizes.dim_v);
  c.aligned = is_aligned(p);
  c.continues = p.continues && kernel == Kernel::forward;
  const bool has_keys = kernel == Kernel::key_gradient || kernel == Kernel::finish;
  c.wanted.dq = kernel == Kernel::query_gradient || (kernel == Kernel::finish && p.wants(p.dq));
  c.wanted.dk = has_keys && p.wants(p.dk);
  c.wanted.dv = has_keys && p.wants(p.dv);
  return c;
}

KernelConfig simt_main_config(const Facts& f) {
  return simt_config(f.problem, f.problem.backward ? Kernel::key_gradient : Kernel::forward);
}

Fit choose_simt_tiling(KernelConfig& c, const TilingRequest& request) {
  c.tiling = tiling_of(c, request.limits.block);
  // If there are enough rows for every multiprocessor, one warp merges all splits of its rows.
  if (c.kernel == Kernel::combine && request.heads * request.rows > 4 * request.multiprocessors) {
    c.tiling.rows *= c.tiling.slices;
    c.tiling.slices = 1;
  }
  if (request.forced) c.tiling = overridden(c.tiling, *request.forced);
  if (shared_bytes_of(c) > request.limits.block) return Fit::no_room;
  return request.forced && !is_possible(c) ? Fit::impossible : Fit::fits;
}

int64 simt_heads(const Problem& p, const KernelConfig& c) {
  return c.only_flagged || c.kernel == Kernel::finish ? 1 : simt_own_heads(p, c);
}
int64 simt_tiles(const Problem& p, const KernelConfig& c) {
  if (c.kernel == Kernel::finish) return finish_blocks(p, c).all();
  return c.only_flagged ? flagged_tile_blocks(p, c) : simt_own_tiles(p, c);
}

}  // namespace regard
