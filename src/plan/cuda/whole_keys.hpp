// Backward, few keys: one kernel of mma, whose blocks have all keys of a sequence and take one tile
// of rows after another, or the three launches of wgmma.
#pragma once

#include "plan/cuda/rule.hpp"
#include "plan/cuda/splits.hpp"

namespace regard {

// Whether the kernel of mma is faster, where both may compute the problem.
bool repays_whole_keys(const Facts&);

// The blocks of wgmma.
RowBlocks row_blocks_of_wgmma(const Facts&);

}  // namespace regard
