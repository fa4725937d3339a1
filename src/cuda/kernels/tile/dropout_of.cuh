// The dropout of a call as its kernels use it.
#pragma once

#include "cuda/kernels/params.h"
#include "cuda/kernels/ptx.cuh"
#include "plan/cuda/kernel/kernel_config.h"

namespace regard {

// The problem's parameters; of a seed in memory, with the key that it makes. Kernels of tensor
// cores call this before their main loops, because reading and mixing take hundreds of cycles.
template <KernelConfig kConfig>
REGARD_DEVICE decltype(auto) dropout_of(const Problem& p) {
  if constexpr (kConfig.seed_in_memory) {
    const auto* const words = reinterpret_cast<const uint32*>(seed_address(p.dropout));
    return keyed_dropout(p.dropout.threshold, seed_in(words), p.dropout.offset);
  } else {
    return (p.dropout);
  }
}

template <KernelConfig kConfig>
using DropoutOf = decltype(dropout_of<kConfig>(*static_cast<const Problem*>(nullptr)));

// The same for one tile; the whole warp takes part. The shuffle tells the compiler that the lanes
// share the key, and hides that tiles do: it would keep the keys of all rounds in registers.
template <KernelConfig kConfig>
REGARD_DEVICE decltype(auto) dropout_of_tile(const DropoutParams& x) {
  if constexpr (kConfig.seed_in_memory) {
    return DropoutParams{x.threshold, shuffle(x.key_low, 0), shuffle(x.key_high, 0), 0};
  } else {
    return (x);
  }
}

}  // namespace regard
