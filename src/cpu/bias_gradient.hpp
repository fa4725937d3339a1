// The sums of the bias gradient: in the result itself where that rounds no more, else in the
// workspace.
#pragma once

#include "problem/problem.h"
#include "regard/regard.hpp"

namespace regard::cpu_backend {

class BiasGradient {
 public:
  // Clears the sums, unless the result is accumulated in place.
  BiasGradient(const Problem&, void* workspace, int workers, const Run&);

  const View& sums() const { return sums_; }  // not given: not wanted

  // Writes the result, unless the sums are the result.
  void finish(int workers, const Run&) const;

 private:
  const Problem& problem_;
  bool in_place_ = true;
  View sums_;
};

}  // namespace regard::cpu_backend
