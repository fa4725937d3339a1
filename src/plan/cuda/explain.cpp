// How a plan for a GPU explains itself to a person.
#include <string_view>

#include "plan/cuda/config_text.hpp"
#include "plan/cuda/kernel/wgmma_backward_layout.h"
#include "plan/cuda/planner.hpp"
#include "plan/explain_rows.hpp"
#include "problem/describe.hpp"

namespace regard {
namespace {

std::string number(int64 x) { return std::to_string(x); }

bool has_product_tiles(const KernelConfig& c) {
  return c.kernel == Kernel::forward || c.kernel == Kernel::backward ||
         c.kernel == Kernel::key_gradient || c.kernel == Kernel::query_gradient ||
         c.kernel == Kernel::bias_gradient;
}

std::string tile_text(const KernelConfig& c) {
  const Tiling& t = c.tiling;
  std::string text = ", tile " + number(t.rows) + " x " + number(t.keys);
  if (c.family == Family::simt) return text;
  text += ", head " + number(c.dim) + (c.dim_v == c.dim ? "" : " and " + number(c.dim_v));
  text += ", stages " + number(t.stages);
  if (t.slices > 1 && !has_slices_of_blocks(c)) text += ", slices " + number(t.slices);
  if (t.key_warps > 1) text += ", key warps " + number(t.key_warps);
  return text;
}

std::string config_line(const KernelConfig& c) {
  std::string text = name_of(c.kernel);
  if (c.kernel == Kernel::finish) {
    if (c.sums_dim > 0) text += ", dq from its sums";
    if (c.dbias.how != BiasGradient::none) text += ", dbias from its sums";
    return text + (c.flags_nonfinite ? ", flagged rows or keys again" : "");
  }
  if (!has_product_tiles(c)) return text;
  text += std::string(" ") + name_of(c.family);
  if (c.family != Family::simt) text += " level " + number(c.level);
  if (c.products != Products::direct) text += std::string(", ") + name_of(c.products);
  text += tile_text(c);
  if (c.kernel == Kernel::backward && c.family == Family::wgmma && is_wide(c)) {
    text += ", a warpgroup each for dv, dk and dq";
    if (c.cta_pair) text += ", clusters of two blocks";
  }
  if (c.pack_gqa) text += ", packed GQA";
  if (c.split_kv || c.split_q) text += ", split";
  if (c.stream_k) text += ", stream-K";
  if (c.whole_keys) text += ", delta and dq in the same kernel";
  if (c.rows_outer) text += ", query heads of a row tile in turn";
  if (c.only_flagged) text += ", flagged rows or keys only";
  return text;
}

std::string launch_line(const CudaLaunch& launch) {
  const BlockGrid& g = launch.grid;
  std::string text = config_line(launch.config) + ", " + number(launch.threads) + " threads, " +
                     decimal(double(launch.shared_bytes) / 1024, 1) + " KB shared, " +
                     number(launch.blocks()) + " blocks" + (launch.resident > 0 ? " for " : " = ") +
                     number(g.heads) + " heads x " + number(g.tiles) + " tiles";
  if (g.splits > 1 && !launch.config.stream_k) {
    text += " x " + number(g.splits);
    text += has_slices_of_blocks(launch.config) ? " slices" : " splits";
  }
  if (g.heads_per_group > 1) text += ", " + number(g.heads_per_group) + " heads interleaved";
  return text;
}

// The share of visible pairs is that of the largest sizes: the lengths of packed sequences lie in
// the GPU's memory.
std::string visible_text(const Problem& p) {
  const double all = double(p.sizes.len_q) * double(p.sizes.len_k);
  if (all == 0) return "no pairs";
  if (p.sequences.positions.given) return "positions say which pairs are visible";
  const double visible =
      visible_pairs(p.mask_params, {.len_q = p.sizes.len_q, .len_k = p.sizes.len_k});
  return visible_share(p, visible / all, p.varlen ? " of the longest sequences" : "");
}

std::string chip_text(const Chip& chip) {
  return chip.name + ", compute capability " + number(chip.major) + "." + number(chip.minor) +
         ", " + number(chip.multiprocessors) + " multiprocessors, " +
         number(chip.shared_per_block / 1024) + " KB of shared memory for a block, " +
         megabytes(chip.l2) + " of cache";
}

// The names in the order of WorkspacePart. Neighbours of equal name are shown as one part.
constexpr std::string_view kPartNames[kWorkspaceParts] = {
    "tile counter",    "dq semaphores", "flags",     "flags",           "flags",
    "dbias sums",      "row states",    "row terms", "dq sums",         "partial results",
    "partial results", "arrivals",      "tile map",  "hi and lo parts", "copies"};

std::string workspace_text(const CudaWorkspace& w) {
  std::string text = megabytes(w.size), separator = ": ";
  for (int first = 0, last; first < kWorkspaceParts; first = last + 1) {
    last = first;
    while (last + 1 < kWorkspaceParts && kPartNames[last + 1] == kPartNames[first]) ++last;
    const int64 bytes = w.end(WorkspacePart(last)) - w.begin(WorkspacePart(first));
    if (bytes == 0) continue;
    text.append(separator).append(kPartNames[first]).append(" ").append(megabytes(bytes));
    separator = ", ";
  }
  return text;
}

bool is_main(const KernelConfig& c) {
  return !c.only_flagged && (c.kernel == Kernel::forward || c.kernel == Kernel::backward ||
                             (c.family == Family::simt && has_product_tiles(c)));
}

}  // namespace

std::string cuda_kernel_line(const CudaPlan& plan) {
  for (const CudaLaunch& launch : plan.launches) {
    if (is_main(launch.config)) return config_line(launch.config);
  }
  return "none";
}

std::string cuda_explanation(const Problem& p, const Chip& chip, const CudaPlan& plan) {
  std::string text = row("problem", to_string(p) + (p.backward ? ", backward" : ", forward"));
  text += row("chip", chip_text(chip));
  if (!plan.supported()) return text + row("backend", "none: " + plan.refusal);
  text += row("backend", plan.name());
  for (const std::string& reason : plan.reasons) text += row("  because", reason);
  if (plan.launches.empty()) text += row("kernel", "none: nothing is to be written");
  for (const CudaLaunch& launch : plan.launches) text += row("kernel", launch_line(launch));
  if (p.features.interval) text += row("mask", visible_text(p));
  return text + row("workspace", workspace_text(plan.workspace));
}

}  // namespace regard
