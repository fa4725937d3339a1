// The reference backend's answer in float64 to the same, already rounded, inputs.
#pragma once

#include "tensors/array.hpp"

namespace regard::cli {

// What is wanted and in which type; none = not wanted.
struct WantedTypes {
  Type out = Type::none, dq = Type::none, dk = Type::none, dv = Type::none;
  Type dbias = Type::none, dsink = Type::none;

  bool backward() const {
    return dq != Type::none || dk != Type::none || dv != Type::none || dbias != Type::none ||
           dsink != Type::none;
  }
};

// All f64 and dense, in the API's shapes.
struct Results {
  Array out, lse, dq, dk, dv, dbias, dsink;
};

// f64 zeros in the shapes of the wanted results.
Results empty_results(const Attention& attention, const WantedTypes& wanted);

// dout may be not given: then only out and lse. Shapes as empty_results; rows past the sequences'
// ends hold `untouched`.
Results float64_reference(const Attention& attention, const Tensor& dout, const Tensor& dlse,
                          const WantedTypes& wanted, int threads, double untouched = 0);

}  // namespace regard::cli
