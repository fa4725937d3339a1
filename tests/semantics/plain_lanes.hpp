// The Lanes policy of one double by the C library: what the pure functions are tested with.
#pragma once

#include <cmath>

namespace regard::tests {

struct Plain {
  using Real = double;
  using Vec = double;
  static double set(double x) { return x; }
  static double add(double a, double b) { return a + b; }
  static double sub(double a, double b) { return a - b; }
  static double mul(double a, double b) { return a * b; }
  static double div(double a, double b) { return a / b; }
  static double fma(double a, double b, double c) { return a * b + c; }
  static double abs(double x) { return std::fabs(x); }
  static double max(double a, double b) { return a > b ? a : b; }
  static bool equal(double a, double b) { return a == b; }
  static double select(bool which, double yes, double no) { return which ? yes : no; }
  static double exp2(double x) { return std::exp2(x); }
  static double log2(double x) { return std::log2(x); }
  static double tanh(double x) { return std::tanh(x); }
};

}  // namespace regard::tests
