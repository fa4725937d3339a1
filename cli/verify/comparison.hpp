// Compares one result with float64, in units of the rounding error that a computation may have.
#pragma once

#include "verify/unfused.hpp"

namespace regard::cli {

// Per row, in rounding units (rounding.hpp): error <= factor * worst unfused error + slack.
// The unfused program rounds the same operands to the same type, so it sets what is reasonable;
// slack covers the rows where it was exact by luck.
struct Tolerance {
  double factor = 2;
  double slack = 4;
};

// As a unit: the element must stay as it was (NaN, or what an accumulating output held).
inline constexpr double kUntouched = -1;

struct Reference {
  const Array& want;     // f64
  const Array& unfused;  // f64
  const Array& unit;     // f64
  Index row = 1;         // elements that form one row of the dense arrays
};

struct Comparison {
  double ratio = 0;       // worst error / tolerance; above 1 fails; infinity: NaN or not untouched
  std::string complaint;  // empty if fine
  bool failed() const { return !complaint.empty(); }
};

// got: any strides. before: element by element what an accumulating output held (null: nothing).
Comparison compare(const Tensor& got, const Reference& reference, const Tolerance& tolerance,
                   const Array* before);

// ||got - want|| / ||want|| over finite elements, and the worst row's max |error| over the larger
// of the row's max |want| and the tensor's root mean square.
struct PlainError {
  double relative_norm = 0, worst_row = 0;
};
PlainError plain_error(const Tensor& got, const Array& want, Index row);

}  // namespace regard::cli
