// The ranks of a call, and what they send each other.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "regard/distributed.hpp"

namespace regard::distributed {

struct Messages {
  std::vector<Send> sends;
  std::vector<Receive> receives;
};

// Calls the exchange of the caller, unless there is nothing to move. A failure becomes an Error.
void exchange(const Collectives&, const Messages&, void* stream);

// An Error unless the table is whole and for so many ranks. A rank whose table is not cannot tell
// the others.
void check_collectives(const Collectives&, int ranks);
// An Error unless it moves memory of the call's device.
void check_memory(const Collectives&, const Run&);

// Calls `check`, which returns what has to be equal on all ranks, or throws. Then the ranks tell
// each other: if one has thrown, all do, the others with its text; and where facts differ. On GPUs
// each rank is alone with its check, because hearing of the others would wait for the stream.
void agree(const Collectives&, const std::function<std::string()>& check);

}  // namespace regard::distributed
