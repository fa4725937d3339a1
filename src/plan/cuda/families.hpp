// The families of kernels: what the rows of the planner's table of rules are made of.
#pragma once

#include <optional>

#include "plan/cuda/rule.hpp"

namespace regard {

// wgmma: tensor cores of Hopper, fed by TMA.
Refusal why_not_wgmma(const Facts&);  // what both passes have in common
Refusal why_not_wgmma_forward(const Facts&);
Refusal why_rather_mma_forward(const Facts&);
KernelConfig wgmma_forward_config(const Facts&);
Fit choose_wgmma_forward_tiling(KernelConfig&, const TilingRequest&);
// What a model of their time prefers for problems that were measured; none for others.
std::optional<Tiling> cheapest_wgmma_tiling(const KernelConfig&, const TilingRequest&);

// f32: tiles of 16 rows, so few that all of them run at once.
bool has_few_low_tiles_of_f32(const TilingRequest&);
// What models of the time of short f32 problems prefer; none for others. `family`: of it alone.
struct F32Forward {
  Family family;
  Tiling tiling;
};
std::optional<F32Forward> cheapest_f32_forward(const Features&, const TilingRequest&,
                                               std::optional<Family> family = {});
std::optional<Tiling> cheapest_f32_backward(const Features&, const TilingRequest&);

Refusal why_not_wgmma_backward(const Facts&);
Refusal why_rather_mma_backward(const Facts&);
// Whether two blocks of wgmma are a cluster, where dq is wanted.
bool may_have_cta_pairs(const Facts&);
KernelConfig wgmma_backward_config(const Facts&);
Fit choose_wgmma_backward_tiling(KernelConfig&, const TilingRequest&);

// mma: tensor cores from compute capability 7.5 on.
Refusal why_not_mma(const Facts&);
KernelConfig mma_config(const Facts&);
Fit choose_mma_tiling(KernelConfig&, const TilingRequest&);
// What short sequences have instead of the tables' first entry that fits; none for others.
std::optional<Tiling> short_mma_tiling(const KernelConfig&, const TilingRequest&);

// simt: without tensor cores, for any problem and any chip; also the small kernels around the main
// ones. The main kernel is forward, or key_gradient. Head sizes are set before the tiling.
KernelConfig simt_main_config(const Facts&);
Fit choose_simt_tiling(KernelConfig&, const TilingRequest&);

// A simt kernel of products, and one that knows neither head sizes nor features.
KernelConfig simt_config(const Problem&, Kernel);
KernelConfig plain_config(const Problem&, Kernel);

// The grid of a simt kernel: heads (batch times heads), and tiles of each. A kernel of flagged rows
// counts its tiles over all heads.
int64 simt_heads(const Problem&, const KernelConfig&);
int64 simt_tiles(const Problem&, const KernelConfig&);

// How the delta kernel writes row terms for a backward kernel of wgmma; and their bytes.
RowTerms row_terms_of_delta(const KernelConfig& main);
Count row_terms_bytes(const Problem&, const KernelConfig& main);

}  // namespace regard
