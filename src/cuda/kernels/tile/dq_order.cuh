// The order of the sums of dq: the fragment order of matrix products.
#pragma once

#include "cuda/kernels/ptx.cuh"
#include "plan/cuda/kernel/kernel_config.h"

namespace regard {

// The offset within the sums of one head, which have config.dim columns. Rows come in units of 16,
// columns in blocks of 8. Lane l holds four elements of a 16 x 8 fragment: element e is row l / 4 +
// 8 (e / 2), column 2 (l % 4) + e % 2. They are contiguous where one instruction adds four (level
// 90); else element e of all lanes is contiguous.
REGARD_DEVICE int64 dq_offset(const KernelConfig& config, int64 unit, int column_block, int lane,
                              int e) {
  const int64 fragment = (unit * (config.dim / 8) + column_block) * 128;
  return fragment + (config.level >= 90 ? lane * 4 + e : e * 32 + lane);
}

}  // namespace regard
