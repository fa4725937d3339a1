// The sums of the bias gradient: in the result itself where its type allows, else in the workspace.
#pragma once

#include "problem/problem.h"
#include "regard/regard.hpp"

namespace regard::cpu_backend {

class BiasGradient {
 public:
  // Clears the sums, unless the result is accumulated in place.
  BiasGradient(const Problem&, void* workspace, int workers, const Run&);

  void* sums() const { return sums_; }  // null: not wanted
  const Strides& strides() const { return strides_; }

  // Writes the result, unless the sums are the result.
  void finish(int workers, const Run&) const;

 private:
  const Problem& problem_;
  bool in_place_ = true;
  void* sums_ = nullptr;
  Strides strides_;
};

}  // namespace regard::cpu_backend
