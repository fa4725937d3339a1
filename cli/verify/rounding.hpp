// The unit of each result's tolerance: the rounding error that a computation may have, to first
// order.
#pragma once

#include "verify/unfused.hpp"

namespace regard::cli {

// For every result element, the error that rounding each operation once (its operands to the
// inputs' type, its arithmetic to f32, or f64 for f64) can cause to first order, terms taken by
// their absolute values. A row that cancels to nothing therefore still has the unit of its terms;
// an element that nothing reaches has unit 0 and must be exact.
Results rounding_units(const Attention& attention, const Tensor& dout, const Tensor& dlse,
                       const WantedTypes& wanted);

}  // namespace regard::cli
