// Tensor maps (descriptions of tensors for TMA), as the driver encodes them; they reach a kernel
// as its second parameter.
#pragma once

#include "semantics/portable.h"

namespace regard {

struct alignas(64) TensorMap {
  uint64 word[16];
};

// Of four dimensions each: column, row, head, batch (packed: one).
struct ForwardMaps {
  TensorMap q, k, v, out, bias;
};

struct BackwardMaps {
  TensorMap q, k, v, dout, dk, dv;
};

// Of a launch.
union LaunchMaps {
  ForwardMaps forward;
  BackwardMaps backward;
};

}  // namespace regard
