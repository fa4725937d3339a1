// The reference backend's answer in float64 to the same, already rounded, inputs.
#pragma once

#include "verify/unfused.hpp"

namespace regard::cli {

// dout may be not given: then only out and lse. Shapes as empty_results.
Results float64_reference(const Attention& attention, const Tensor& dout, const Tensor& dlse,
                          const WantedTypes& wanted, int threads);

}  // namespace regard::cli
