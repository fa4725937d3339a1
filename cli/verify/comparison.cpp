// The rule of docs/numerics.md ("How results are judged"), row by row and in norm.
#include "verify/comparison.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace regard::cli {

namespace {

std::string place_of(const Array& array, Index index) {
  std::string text = "]";
  for (auto size = array.sizes.rbegin(); size != array.sizes.rend(); ++size) {
    text = (size + 1 == array.sizes.rend() ? "[" : ", ") + std::to_string(index % *size) + text;
    index /= *size;
  }
  return text;
}

struct Worst {
  double value = 0;
  Index at = 0;
};

Comparison wrong(const Array& array, Index at, double got, double want, const char* why) {
  return {.ratio = std::numeric_limits<double>::infinity(),
          .complaint =
              fmt::format("{} is {:.9g}, must be {:.9g}: {}", place_of(array, at), got, want, why)};
}

}  // namespace

Comparison compare(const Tensor& got, const Reference& reference, const Tolerance& tolerance,
                   const Array* before) {
  const Array& want_array = reference.want;
  const Index count = want_array.count();
  const double roundoff = unit_roundoff(got.type), step = smallest_step(got.type);
  const double largest = largest_finite(got.type);
  std::vector<double> values;
  values.reserve(static_cast<std::size_t>(count));
  for_each_offset(got, [&](Index offset) { values.push_back(load(got.data, got.type, offset)); });

  Worst ours, unfused;
  double squares_ours = 0, squares_unfused = 0, squares_unit = 0;
  for (Index begin = 0; begin < count; begin += reference.row) {
    double unit = 0, size = 0, error = 0, unfused_error = 0;
    bool bounded = true;  // false: the unit itself overflows, and any finite value will do
    Index error_at = begin;
    for (Index n = begin; n < begin + reference.row; ++n) {
      const double held = before ? before->get(n) : 0;
      const double want = want_array.get(n) + held;
      const double value = values[static_cast<std::size_t>(n)];
      if (reference.unit.get(n) == kUntouched) {
        if (before ? value != held : !std::isnan(value)) {
          return wrong(want_array, n, value, held, "the row lies past its sequence's end");
        }
        continue;
      }
      if (!std::isfinite(want)) {
        if (want == -std::numeric_limits<double>::infinity() && value != want &&
            reference.unit.get(n) == 0) {
          return wrong(want_array, n, value, want, "nothing is visible there");
        }
        if (std::isfinite(value)) {
          return wrong(want_array, n, value, want, "float64 is not finite there");
        }
        continue;
      }
      if (std::fabs(want) > 0.98 * largest) continue;  // may or may not overflow
      if (!std::isfinite(value)) return wrong(want_array, n, value, want, "not finite");
      const double element_unit = reference.unit.get(n);
      bounded = bounded && std::isfinite(element_unit);
      unit = std::max(unit, element_unit);
      size = std::max({size, std::fabs(want), std::fabs(held)});
      if (std::fabs(value - want) > error) {
        error = std::fabs(value - want);
        error_at = n;
      }
      const double unfused_value = reference.unfused.get(n) + held;
      if (std::isfinite(unfused_value)) {
        unfused_error = std::max(unfused_error, std::fabs(unfused_value - want));
      }
    }
    if (!bounded) continue;
    if (unit == 0) {
      if (error > std::numeric_limits<double>::min()) {  // float64 itself may underflow
        return wrong(want_array, error_at, values[static_cast<std::size_t>(error_at)],
                     want_array.get(error_at) + (before ? before->get(error_at) : 0),
                     "nothing is added there, so it must be exact");
      }
      continue;
    }
    unit += roundoff * size + step;
    if (error / unit > ours.value) ours = {error / unit, error_at};
    unfused.value = std::max(unfused.value, unfused_error / unit);
    squares_ours += error * error;
    squares_unfused += unfused_error * unfused_error;
    squares_unit += unit * unit;
  }
  const double allowed = tolerance.factor * unfused.value + tolerance.slack;
  Comparison result{.ratio = ours.value / allowed, .complaint = {}};
  if (result.ratio > 1) {
    const double value = values[static_cast<std::size_t>(ours.at)];
    const double want = want_array.get(ours.at) + (before ? before->get(ours.at) : 0);
    result.complaint = fmt::format(
        "{} is {:.9g}, float64 says {:.9g}: error {:.3g} is {:.1f} rounding units, {:.1f} are "
        "allowed (unfused: {:.1f})",
        place_of(want_array, ours.at), value, want, std::fabs(value - want), ours.value, allowed,
        unfused.value);
  } else if (squares_unit > 0) {
    const double norm = std::sqrt(squares_ours / squares_unit);
    const double norm_allowed =
        tolerance.factor * std::sqrt(squares_unfused / squares_unit) + tolerance.slack / 2;
    result.ratio = std::max(result.ratio, norm / norm_allowed);
    if (norm > norm_allowed) {
      result.complaint = fmt::format("in norm the error is {:.2f} rounding units, {:.2f} allowed",
                                     norm, norm_allowed);
    }
  }
  return result;
}

PlainError plain_error(const Tensor& got, const Array& want, Index row) {
  double squares = 0, error_squares = 0;
  for (Index n = 0; n < want.count(); ++n) {
    if (std::isfinite(want.get(n))) squares += want.get(n) * want.get(n);
  }
  const double typical = std::sqrt(squares / std::max<double>(1, double(want.count())));
  PlainError result;
  double row_size = 0, row_error = 0;
  Index n = 0;
  for_each_offset(got, [&](Index offset) {
    const double value = load(got.data, got.type, offset), wanted = want.get(n++);
    if (std::isfinite(value) && std::isfinite(wanted)) {
      error_squares += (value - wanted) * (value - wanted);
      row_size = std::max(row_size, std::fabs(wanted));
      row_error = std::max(row_error, std::fabs(value - wanted));
    } else if (value != wanted && !(std::isnan(value) && std::isnan(wanted))) {
      error_squares = row_error = std::numeric_limits<double>::infinity();
    }
    if (n % row == 0) {
      const double size = std::max(row_size, typical);
      if (row_error > 0) result.worst_row = std::max(result.worst_row, row_error / size);
      row_size = row_error = 0;
    }
  });
  result.relative_norm = error_squares == 0 ? 0 : std::sqrt(error_squares / squares);
  return result;
}

}  // namespace regard::cli
