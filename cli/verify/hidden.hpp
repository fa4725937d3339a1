// Poisons the elements that no visible pair reads.
#pragma once

#include "verify/random_problem.hpp"

namespace regard::cli {

struct PoisonTargets {
  Slab* q = nullptr;
  Slab* k = nullptr;
  Slab* v = nullptr;
  Slab* bias = nullptr;  // may be null
};

// Writes NaN and infinities into the rows of q and dout that see nothing, the rows of k and v that
// nothing sees, rows past the sequences' ends, and the bias of hidden pairs. No result may change.
void poison_hidden(Random& random, RandomProblem& problem, const PoisonTargets& targets);

}  // namespace regard::cli
