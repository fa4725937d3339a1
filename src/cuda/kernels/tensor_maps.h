// Tensor maps (descriptions of tensors for TMA), as the driver encodes them; they reach a kernel
// as its second parameter.
#pragma once

#include "semantics/portable.h"

namespace regard {

struct alignas(64) TensorMap {
  uint64 word[16];
};

// Each map has four dimensions: column, row, head, batch (1 if packed; f32: hi and lo parts).
struct ForwardMaps {
  TensorMap q, k, v, out, bias;
};

struct BackwardMaps {
  TensorMap q, k, v, dout, dk, dv;
};

// The tensor maps of one launch.
union LaunchMaps {
  ForwardMaps forward;
  BackwardMaps backward;
};

}  // namespace regard
