// How many bytes a plan moves, and how long both passes take by that.
#pragma once

#include "distributed/plan_contents.hpp"
#include "regard/distributed.hpp"

namespace regard::distributed {

// What the rank receives. Ulysses: without bias, mask and what only some calls have.
Moved moved_of(const PlanContents&, int rank);

// The time of one forward and one backward pass, without overlap.
double seconds(const PlanContents&, const Rates&);

}  // namespace regard::distributed
