// The textbook in float64: slow, short, and the judge of every other backend.
#pragma once

#include "problem/problem.h"
#include "regard/regard.hpp"

namespace regard::reference {

void forward(const Problem&, const Run&);
void backward(const Problem&, const Run&);

}  // namespace regard::reference
