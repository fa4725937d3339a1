// Memory that ends at a page nobody may touch, and arrays in it with known values between elements.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "regard/tensor.hpp"

namespace regard::tests {

// `size` bytes: the page behind them is inaccessible, and the bytes before them are watched.
class Guarded {
 public:
  explicit Guarded(std::size_t size);
  ~Guarded();
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  Guarded(Guarded&& other) noexcept;
  Guarded& operator=(Guarded&& other) noexcept;

  char* data() const { return data_; }
  std::size_t size() const { return size_; }
  bool lead_intact() const;  // nobody wrote before the memory

 private:
  void release();

  char* mapping_ = nullptr;
  std::size_t mapped_ = 0;
  char* data_ = nullptr;
  std::size_t size_ = 0;
};

// The value of x after rounding to the type.
double rounded(Type type, double x);

// A tensor that owns guarded memory. With gaps, rows lie apart and axis 1 inside axis 2; all bytes
// between elements are 0xff, which is a NaN in every type.
class Array {
 public:
  Array() = default;
  Array(Type type, std::vector<std::int64_t> sizes, bool gaps = false);

  const Tensor& tensor() const { return tensor_; }
  operator const Tensor&() const { return tensor_; }
  bool given() const { return tensor_.given(); }

  std::int64_t count() const;                 // of elements
  std::int64_t row_size() const;              // of the last axis
  std::int64_t offset(std::int64_t n) const;  // of the n-th element in row-major order
  double get(std::int64_t n) const;
  void set(std::int64_t n, double x) const;
  void fill(double x) const;
  std::int64_t index(std::array<std::int64_t, 4> at) const;  // row-major number of an element

  std::string bytes() const;  // everything, gaps too
  bool gaps_intact() const;   // nothing but elements was written

 private:
  Tensor tensor_;
  Guarded memory_{0};
};

// The worst row's error in the 2-norm, relative to that row's norm, the typical row's, or that of a
// row of `natural`, whichever is largest. NaN and infinities must agree, else it is infinite.
double row_error(const Array& got, const Array& want, double natural = 0);

}  // namespace regard::tests
