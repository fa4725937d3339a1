// Redoing, one at a time and in float64, the rows that a NaN in a hidden place may have reached.
//
// A tile multiplies hidden pairs by zero, and 0 * NaN is NaN. The kernels only look at what they
// write: a result that is not finite is marked, and computed again here from visible pairs alone.
#pragma once

#include "cpu/batch.hpp"
#include "regard/regard.hpp"

namespace regard::cpu_backend {

void redo_forward(const Problem&, const Batch&, const std::uint8_t* spoiled, int workers,
                  const Run&);
void redo_backward(const Problem&, const Batch&, const std::uint8_t* spoiled_q,
                   const std::uint8_t* spoiled_k, int workers, const Run&);

}  // namespace regard::cpu_backend
