// The other calls that a problem may become which is only asked about.
#pragma once

#include <vector>

#include "problem/problem.h"

namespace regard {

// The problem with what is not known yet: each address that is null may turn out not to be aligned,
// so that other kernels run, or other tiles; and where no gradients are named, a call may leave out
// that of the bias. None where all is known.
std::vector<Problem> possible_calls(const Problem&);

}  // namespace regard
