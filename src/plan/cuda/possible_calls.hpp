// The calls that may follow a question about a problem's workspace.
#pragma once

#include <vector>

#include "problem/problem.h"

namespace regard {

// Variants of the problem that differ in what is not known yet. An address that is null may turn
// out not to be aligned, so that other kernels run, or other tiles. Where no gradients are named, a
// call may leave out that of the bias. There are none where all is known.
std::vector<Problem> possible_calls(const Problem&);

}  // namespace regard
