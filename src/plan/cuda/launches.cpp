// Grids, threads and shared memory of every launch.
#include "plan/cuda/launches.hpp"

#include <cstdint>

#include "plan/cuda/facts.hpp"
#include "plan/cuda/families.hpp"
#include "plan/cuda/kernel/hi_lo_layout.h"
#include "plan/cuda/kernel/wgmma_backward_layout.h"

namespace regard {

GridDivisors divisors_of(const BlockGrid& grid, const Sizes& s) {
  const auto positive = [](int64 n) { return divisor_of(larger<int64>(n, 1)); };
  const int64 of_head = int64(grid.tiles) * grid.splits;
  return {.head = positive(of_head),
          .tiles = positive(grid.tiles),
          .group = positive(of_head * grid.heads_per_group),
          .heads_per_group = positive(grid.heads_per_group),
          .entry = positive(s.batch == 0 ? 1 : grid.heads / s.batch),
          .query_heads = positive(s.heads_kv == 0 ? 1 : s.group()),
          .rows = positive(s.len_q)};
}

void add_launch(Draft& d, const KernelConfig& c, int64 heads, int64 tiles, int64 splits,
                int64 heads_per_group) {
  const double blocks = double(heads) * double(tiles) * double(splits);
  if (blocks == 0) return;
  if (blocks > double(INT32_MAX)) {
    d.refuse(kTooManyBlocks);
    return;
  }
  const bool is_persistent =
      c.persistent || (c.family == Family::wgmma && c.kernel == Kernel::forward);
  const BlockGrid grid{.heads = int32(heads),
                       .tiles = int32(tiles),
                       .splits = int32(splits),
                       .heads_per_group = int32(clamp_to<int64>(heads_per_group, 1, heads)),
                       .batch = c.family == Family::simt ? 1 : int32(batch_of_bias(d.p))};
  d.plan.launches.push_back({.config = c,
                             .grid = grid,
                             .by = divisors_of(grid, d.p.sizes),
                             .threads = c.tiling.warps * 32,
                             .shared_bytes = shared_bytes_of(c),
                             .resident = is_persistent ? d.facts.chip.multiprocessors : 0});
}

void add_simt_launch(Draft& d, KernelConfig c, int64 splits) {
  const bool is_main = d.plan.family == Family::simt && c.kernel == d.main.kernel;
  if (!is_main && choose_simt_tiling(c, d.request(c, false)) != Fit::fits) {
    d.refuse("no tile fits the shared memory of a block");
  }
  add_launch(d, c, simt_heads(d.p, c), simt_tiles(d.p, c), splits);
}

void add_fixup_launch(Draft& d, Kernel kernel) {
  KernelConfig c = simt_config(d.p, kernel);
  c.only_flagged = true;
  add_simt_launch(d, c);
}

bool needs_fixup(const Problem& p, const KernelConfig& main) {
  // The terms of lse that f16 adds by a product end at 2^31.
  const bool has_lse_terms = p.backward && p.type == Type::f16 && main.family == Family::wgmma &&
                             adds_lse_by_product(main.features);
  return main.family != Family::simt &&
         (hides_pairs(p) || has_two_terms(main.products) || main.cta_pair || has_lse_terms);
}

void explain_fixup(const Because& because) {
  because(
      "fix-up: a row or key is computed again without tensor cores if its result is not finite, as "
      "after 0 * NaN of a hidden pair, or if the split into parts may have lost too much of it");
}

void add_split_launch(Draft& d) {
  constexpr int64 kTensors = 3;  // q is with dout
  const Sizes& s = d.p.sizes;
  if (d.main.products != Products::f16x3 || s.len_q == 0) return;
  const int rows = d.p.backward ? d.main.tiling.rows : d.main.tiling.keys;  // of a block
  KernelConfig c = plain_config(d.p, Kernel::split_f32);
  c.dim = d.main.dim;
  c.dim_v = d.main.dim_v;
  c.tiling = {.rows = rows, .keys = rows, .warps = 8, .stages = 1};
  c.aligned = is_aligned(d.p);
  c.row_terms.used = d.p.backward;
  const int64 unit = d.p.backward ? kHiLoBackwardUnit : rows;
  add_launch(d, c, s.batch * s.heads_q, round_up(larger(s.len_q, s.len_k), unit) / rows, kTensors);
}

// Kernels compute the same layout in plain integers. It is used only where none of them wraps
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

CudaWorkspace lay_out(std::initializer_list<PartSize> sizes) {
  Count bytes[kWorkspaceParts];
  for (const PartSize& each : sizes) bytes[int(each.part)] = each.bytes;
  CudaWorkspace workspace;
  MemoryLayout<256> layout;
  for (int n = 0; n < kWorkspaceParts; ++n) workspace.begins[n] = layout.take(bytes[n]);
  workspace.size = layout.size();
  return workspace;
}

}  // namespace regard
