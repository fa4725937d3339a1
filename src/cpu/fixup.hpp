// The fix-up pass: rows that a NaN in a hidden place may have reached, one at a time in float64.
//
// A tile multiplies hidden pairs by zero, and 0 * NaN is NaN. The kernels only check what they
// write. A row whose result is not finite is flagged, and computed again here from its visible
// pairs alone.
#pragma once

#include "cpu/batch.hpp"
#include "regard/regard.hpp"

namespace regard::cpu_backend {

void fix_up_forward(const Problem&, const Batch&, const std::uint8_t* nonfinite, int workers,
                    const Run&);
void fix_up_backward(const Problem&, const Batch&, const std::uint8_t* nonfinite_q,
                     const std::uint8_t* nonfinite_k, int workers, const Run&);

}  // namespace regard::cpu_backend
