// The parts of a row in shared memory, and their merge.
#pragma once

#include "cuda/kernels/tile/merged_row.cuh"
#include "plan/cuda/kernel/mma_layout.h"

namespace regard {

// Each part has f32 sums of dim_v columns, and then a RowPart. A part that saw no key is 0,
// except its m, and NaN that hidden values make.
template <KernelConfig kConfig>
struct PartsInShared {
  static constexpr int kElements = MergedRow<kConfig>::kElements;
  static constexpr int kPart = kConfig.dim_v * 4;  // where it begins

  SharedAddress first;
  int stride;
  int count;

  REGARD_DEVICE SharedAddress at(int k) const { return first + k * stride; }

  // Sets the row's m and total, and calls write(d, sums) for each group of columns. kWhole: these
  // are all parts of the row, and the sink joins them.
  template <bool kWhole, class Write>
  REGARD_DEVICE void merge(MergedRow<kConfig>& row, Write write) const {
    if constexpr (kWhole) row.see_sink();
#pragma unroll 8
    for (int k = 0; k < count; ++k) row.see(float_of(load_shared_32(at(k) + kPart)));
    const int dim = int(row.p.sizes.dim_v);
    for (int d = row.lane * kElements; d < dim; d += MergedRow<kConfig>::kLanes * kElements) {
      float sums[kElements] = {};
      row.total = 0;
#pragma unroll 8
      for (int k = 0; k < count; ++k) {
        const Bits128 x = load_shared_128(at(k) + d * 4);
        const float weight = row.weight_of(float_of(load_shared_32(at(k) + kPart)));
        row.total = fma_of(float_of(load_shared_32(at(k) + kPart + 4)), weight, row.total);
#pragma unroll
        for (int e = 0; e < kElements; ++e) sums[e] = fma_of(float_of(x.word[e]), weight, sums[e]);
      }
      if constexpr (kWhole) row.add_sink();
      write(d, sums);
    }
  }
};

}  // namespace regard
