// The forward pass by products of warpgroups (Hopper): whether it can be, and with which tiles.
#pragma once

#include "plan/count.h"
#include "plan/cuda/chip.hpp"
#include "plan/cuda/plan.hpp"
#include "plan/cuda/tiling.hpp"
#include "problem/problem.h"

namespace regard {

// Null where kernels of family wgmma can compute the problem.
const char* why_not_wgmma(const Problem&, const Chip&, int level);

// Null where they are also the better choice; of a problem that they can compute.
const char* why_rather_mma(const Problem&, const Chip&);

// Heads whose tiles are under way together. Where rows are short, the longest tiles of as many as
// the cache holds would ask memory for all their keys at once, and the other tiles for none.
int64 heads_of_wgmma_group(const Problem&, const Chip&);

// Without tiling and head sizes.
KernelConfig wgmma_config(const Problem&, int level);

// Sets tiling, dim, dim_v and what depends on them.
Fit take_wgmma_tiling(KernelConfig&, const TilingWish&);

// What a main kernel of f32 needs before it: planes of q, k and v, in so much of the workspace.
void add_split_launch(CudaPlan&, const Problem&, const KernelConfig& main);
Count hi_lo_bytes(const Problem&, const KernelConfig& main);

}  // namespace regard
