// A call with all of its tensors, and its part that has some of the heads.
#pragma once

#include "distributed/heads.hpp"
#include "regard/regard.hpp"

namespace regard::distributed {

struct CallOfHeads {
  Attention a{};
  ForwardOutputs outputs{};
  BackwardInputs inputs{};
  Gradients gradients{};

  // Query heads of `run`, which the whole problem counts, and the heads of keys that they read.
  // queries, keys: the same, as they are counted in the call's tensors; sinks, their gradients and
  // slopes are those of the whole problem.
  CallOfHeads of(const Heads& run, const Heads& queries, const Heads& keys) const;
};

}  // namespace regard::distributed
