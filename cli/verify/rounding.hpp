// The unit of each result's tolerance: the rounding error that a computation may have, to first
// order.
#pragma once

#include <limits>

#include "verify/float64.hpp"

namespace regard::cli {

// As a unit: the element must stay as it was (NaN, or what an accumulating output held).
inline constexpr double kUntouched = -std::numeric_limits<double>::infinity();

// For every result element, the error that rounding each operation of a plain computation once (its
// operands to the inputs' type, its arithmetic to f32, or f64 for f64) can cause to first order,
// terms taken by their absolute values. A row that cancels to nothing therefore still has the unit
// of its terms; an element that nothing reaches has unit 0 and must be exact. threads 0: every
// core.
Results rounding_units(const Attention& attention, const Tensor& dout, const Tensor& dlse,
                       const WantedTypes& wanted, int threads);

}  // namespace regard::cli
