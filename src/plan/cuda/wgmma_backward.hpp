// The backward pass by products of warpgroups (Hopper): whether it can be, and with which tiles.
#pragma once

#include "plan/count.h"
#include "plan/cuda/chip.hpp"
#include "plan/cuda/tiling.hpp"
#include "problem/problem.h"

namespace regard {

// Null where the kernel of family wgmma can compute the problem.
const char* why_not_wgmma_backward(const Problem&, const Chip&, int level);

// Null where it is also the better choice; of a problem that it can compute.
const char* why_rather_mma_backward(const Problem&);

// Without tiling and head sizes, and what depends on the plan: marks.
KernelConfig wgmma_backward_config(const Problem&, int level);

// Sets tiling, dim and dim_v.
Fit take_wgmma_backward_tiling(KernelConfig&, const TilingWish&);

// Blocks of a head's keys, of a backward kernel that owns keys; even where blocks are pairs.
int64 key_tiles(const KernelConfig&, int64 len_k);

// Heads whose blocks take turns in the grid. Where tiles of keys wait for each other, those of
// other heads are between them; under a causal mask, so that the long ones of several begin first.
int64 heads_taking_turns(const KernelConfig&, const Chip&, int64 len_k);

// What the delta kernel is to write for the main kernel; the bytes of it.
void ask_for_row_terms(KernelConfig& delta, const KernelConfig& main);
Count row_terms_bytes(const Problem&, const KernelConfig& main);

}  // namespace regard
