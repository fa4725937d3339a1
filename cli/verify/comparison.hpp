// Compares one result with float64, in units of the rounding error that a computation may have.
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
  double ratio = 0;       // worst error / tolerance; above 1 fails; infinity: NaN or not untouched
  std::string complaint;  // empty if fine
  bool failed() const { return !complaint.empty(); }
};

// got: any strides. before: the elements to which an accumulating call added (null: it did not
// add).
Comparison compare(const Tensor& got, const Reference& reference, const Array* before);

// ||got - want|| / ||want|| over finite elements, and the worst row's max |error| over the larger
// of the row's max |want| and the tensor's root mean square.
struct PlainError {
  double relative_norm = 0, worst_row = 0;
};
PlainError plain_error(const Tensor& got, const Array& want, Index row);

}  // namespace regard::cli
