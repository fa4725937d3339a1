// The order of the sums of dq: that of the fragments in which matrix products leave them.
#pragma once

#include "cuda/kernels/ptx.cuh"
#include "plan/cuda/kernel/kernel_config.h"

namespace regard {

// Rows come in units of 16, columns in blocks of 8. Lane l holds four elements of a 16 x 8
// fragment: element e is row l / 4 + 8 (e / 2), column 2 (l % 4) + e % 2. They lie side by side
// where four can be added at once, else each among the same elements of the other lanes. The offset
// within the sums of one head; config.dim is their number of columns.
REGARD_DEVICE int64 dq_offset(const KernelConfig& config, int64 unit, int column_block, int lane,
                              int e) {
  const int64 fragment = (unit * (config.dim / 8) + column_block) * 128;
  return fragment + (config.level >= 90 ? lane * 4 + e : e * 32 + lane);
}

}  // namespace regard
