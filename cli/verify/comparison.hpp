// Compares one result with float64 under a tolerance that plain rounding justifies.
#pragma once

#include "verify/rounding.hpp"

namespace regard::cli {

struct Reference {
  const Array& want;  // f64
  const Array& unit;  // f64, of rounding.hpp
  Index row = 1;      // elements that form one row of the dense arrays
  double allowed;     // units, of a row's largest error; half of them in norm over all rows
};

struct Comparison {
  double ratio = 0;       // worst error / tolerance; above 1 fails; infinity: wrong in kind
  std::string complaint;  // empty if fine
  bool failed() const { return !complaint.empty(); }
};

// got: any strides. before: element by element what an accumulating output held (null: nothing).
Comparison compare(const Tensor& got, const Reference& reference, const Array* before);

// ||got - want|| / ||want|| over finite elements, and the worst row's max |error| over the larger
// of the row's max |want| and the tensor's root mean square.
struct PlainError {
  double relative_norm = 0, worst_row = 0;
};
PlainError plain_error(const Tensor& got, const Array& want, Index row);

}  // namespace regard::cli
