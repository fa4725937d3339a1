// split_kv: where a block writes its part of a row, over its share of the keys. combine.cuh merges
// the parts.
#pragma once

#include "cuda/kernels/params.h"
#include "cuda/kernels/ptx.cuh"

namespace regard {

// A part has a reference m and, relative to it, the sum of its weights and of its weighted values:
// sum = sum over its keys of 2^(x - m), with the logit x times log2(e). A part that saw no key, or
// scores of -inf alone, has m = -inf and a weight of 0, which remains a factor: its values are NaN
// where an infinite or NaN value was among its keys, hidden ones too.
struct RowPart {
  float reference;
  float sum;
};

// The part of a split without keys: its negative sum says that no values were written.
REGARD_DEVICE RowPart part_without_values() { return {-infinity<float>(), -1}; }
REGARD_DEVICE bool has_values(const RowPart& part) { return !(part.sum < 0); }

// The index of a row's part among the parts of all rows, split after split.
REGARD_DEVICE int64 part_index(const KernelParams& params, int split, int64 row_index) {
  const Sizes& s = params.problem.sizes;
  return int64(split) * s.heads_q * s.rows_q + row_index;
}
REGARD_DEVICE float* part_of_out(const KernelParams& params, int64 index) {
  return params.buffers.partial_out + index * params.problem.sizes.dim_v;
}
REGARD_DEVICE RowPart* row_part(const KernelParams& params, int64 index) {
  return reinterpret_cast<RowPart*>(params.buffers.partial_rows) + index;
}

}  // namespace regard
