// Which inputs are copied for kernels that load by TMA, and the problem as these kernels see it.
#pragma once

#include "plan/count.h"
#include "plan/cuda/kernel/copy_layout.h"
#include "plan/cuda/plan.hpp"
#include "plan/cuda/refusal.hpp"
#include "problem/problem.h"

namespace regard {

// The f16 and bf16 inputs that TMA cannot load, because of strides or type. The address of the data
// does not count: a workspace is asked for before there is any.
InputSet inputs_to_copy(const Problem&);

// Those whose rows do not begin at multiples of 16 bytes: mma would read all inputs one element at
// a time. None where copies are not worth their time or some input stays as it is, such as a dout
// of another type; and if q, k and v have none, because dout may not be known yet. With copies of
// them, all rows do.
InputSet inputs_to_align(const Problem&);

// Where copies are not worth their time and memory.
Refusal why_not_copies(const Problem&, InputSet);

// The problem with its copies in place of the inputs; memory: where they begin, or null in a plan.
Problem with_copies(const Problem&, InputSet, uint8* memory);
Count copies_bytes(const Problem&, InputSet);
// The inputs that a call may copy. A dout that is not given yet is one of them, because it may have
// any strides.
InputSet copies_at_most(const CudaPlan&, const Problem&);

// Whether a kernel is given the problem with copies. Delta reads an f32 dout where it is.
inline bool reads_copies(const KernelConfig& c, const Problem& p) {
  return c.family != Family::simt || (c.kernel == Kernel::delta && p.dout.type == p.type);
}

}  // namespace regard
