// What both examples of distributed calls need: the tensors of a sequence, or of some of its rows.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <random>
#include <regard/regard.hpp>
#include <vector>

constexpr std::int64_t kLength = 1000, kHeads = 4, kHeadsOfKeys = 2, kSize = 64;

// (1, H, rows, 64) floats: q, k, v, dout, and the results of both passes.
class Sequence {
 public:
  explicit Sequence(std::int64_t rows) : rows_(rows), lse_(std::size_t(kHeads * rows)) {
    for (int n = 0; n < kCount; ++n) values_[n].resize(std::size_t(heads(n) * rows * kSize));
  }

  void draw() {
    std::mt19937 bits(1);
    for (int n = 0; n < kInputs; ++n) {
      for (float& x : values_[n]) x = float(bits() % 2001) / 1000 - 1;
    }
  }

  Sequence rows_of(const std::vector<std::int64_t>& positions) const {
    Sequence part(std::int64_t(positions.size()));
    for (int n = 0; n < kCount; ++n) {
      for (std::int64_t h = 0; h < heads(n); ++h) {
        for (std::int64_t i = 0; i < part.rows_; ++i) {
          const float* const row = &values_[n][(h * rows_ + positions[i]) * kSize];
          std::copy_n(row, kSize, &part.values_[n][(h * part.rows_ + i) * kSize]);
        }
      }
    }
    return part;
  }

  regard::Tensor q() { return tensor(0); }
  regard::Tensor k() { return tensor(1); }
  regard::Tensor v() { return tensor(2); }
  regard::Tensor dout() { return tensor(3); }
  regard::Tensor out() { return tensor(4); }
  regard::Tensor dq() { return tensor(5); }
  regard::Tensor dk() { return tensor(6); }
  regard::Tensor dv() { return tensor(7); }
  regard::Tensor lse() { return {lse_.data(), regard::f32, {1, kHeads, rows_}}; }

  double largest_difference_of_results(const Sequence& other) const {
    double largest = 0;
    for (int n = kInputs; n < kCount; ++n) {
      for (std::size_t at = 0; at < values_[n].size(); ++at) {
        largest = std::max(largest, std::abs(double(values_[n][at]) - other.values_[n][at]));
      }
    }
    return largest;
  }

 private:
  static constexpr int kInputs = 4, kCount = 8;

  static std::int64_t heads(int n) {
    return n == 1 || n == 2 || n == 6 || n == 7 ? kHeadsOfKeys : kHeads;
  }
  regard::Tensor tensor(int n) {
    return {values_[n].data(), regard::f32, {1, heads(n), rows_, kSize}};
  }

  std::int64_t rows_;
  std::array<std::vector<float>, kCount> values_;
  std::vector<float> lse_;
};

// Between a part's results and those rows of one causal call over the whole, on the CPU.
inline double largest_difference(Sequence& whole, const Sequence& part,
                                 const std::vector<std::int64_t>& positions) {
  const regard::Attention attention{
      .q = whole.q(), .k = whole.k(), .v = whole.v(), .causal = regard::Causal::top_left};
  regard::forward(attention, {.out = whole.out(), .lse = whole.lse()});
  regard::backward(attention, {.out = whole.out(), .lse = whole.lse(), .dout = whole.dout()},
                   {.dq = whole.dq(), .dk = whole.dk(), .dv = whole.dv()});
  return part.largest_difference_of_results(whole.rows_of(positions));
}
