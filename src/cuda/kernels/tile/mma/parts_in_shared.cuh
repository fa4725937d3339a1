// The parts of a row in shared memory, and their merge.
#pragma once

#include "cuda/kernels/tile/merged_row.cuh"
#include "plan/cuda/kernel/mma_layout.h"

namespace regard {

// Each part has f32 sums of dim_v columns, and then a RowPart. A part that saw no key is 0,
// except its m, and NaN that hidden values make. The parts lie `stride` bytes apart, or
// (kOfCluster) at the same place in each block of the cluster.
template <KernelConfig kConfig, bool kOfCluster = false>
struct PartsInShared {
  static constexpr int kElements = MergedRow<kConfig>::kElements;
  static constexpr int kPart = kConfig.dim_v * 4;  // where it begins

  SharedAddress first;
  int stride;
  int count;

  REGARD_DEVICE SharedAddress at(int k) const {
    if constexpr (kOfCluster) return address_in_cluster(first, k);
    return first + k * stride;
  }
  REGARD_DEVICE Bits128 columns_of(int k, int d) const {
    if constexpr (kOfCluster) return load_cluster_128(at(k) + d * 4);
    return load_shared_128(at(k) + d * 4);
  }
  REGARD_DEVICE RowPart part_of(int k) const {
    if constexpr (kOfCluster) {
      uint32 reference, sum;
      load_cluster_64(at(k) + kPart, reference, sum);
      return {float_of(reference), float_of(sum)};
    }
    return {float_of(load_shared_32(at(k) + kPart)), float_of(load_shared_32(at(k) + kPart + 4))};
  }

  // Sets the row's m and total, and calls write(d, sums) for each group of columns. kWhole: these
  // are all parts of the row, and the sink joins them.
  template <bool kWhole, class Write>
  REGARD_DEVICE void merge(MergedRow<kConfig>& row, Write write) const {
    if constexpr (kWhole) row.see_sink();
#pragma unroll 8
    for (int k = 0; k < count; ++k) row.see(part_of(k).reference);
    const int dim = int(row.p.sizes.dim_v);
    for (int d = row.lane * kElements; d < dim; d += MergedRow<kConfig>::kLanes * kElements) {
      float sums[kElements] = {};
      row.total = 0;
#pragma unroll 8
      for (int k = 0; k < count; ++k) {
        const Bits128 x = columns_of(k, d);
        const RowPart part = part_of(k);
        const float weight = row.weight_of(part.reference);
        row.total = fma_of(part.sum, weight, row.total);
#pragma unroll
        for (int e = 0; e < kElements; ++e) sums[e] = fma_of(float_of(x.word[e]), weight, sums[e]);
      }
      if constexpr (kWhole) row.add_sink();
      write(d, sums);
    }
  }
};

}  // namespace regard
