// What a person is told of a plan's decisions; costs nothing where nobody asks.
#pragma once

#include <string>
#include <vector>

#include "plan/cuda/choice.hpp"
#include "problem/problem.h"

namespace regard {

class Because {
 public:
  Because(std::vector<std::string>& reasons, bool asked) : reasons_(reasons), asked_(asked) {}

  template <class... Parts>
  void operator()(const Parts&... parts) const {
    if (!asked_) return;
    std::string& text = reasons_.emplace_back();
    (add(text, parts), ...);
  }
  bool asked() const { return asked_; }

 private:
  static void add(std::string& text, const char* part) { text += part; }
  static void add(std::string& text, const std::string& part) { text += part; }
  static void add(std::string& text, int64 part) { text += std::to_string(part); }

  std::vector<std::string>& reasons_;
  bool asked_;
};

// Why the main kernel is of its family, and what of it is slower than it might be.
void explain_family(const Because&, const Problem&, const CudaChoice&, const KernelConfig& main);

// What of reading the mask is slower than it might be. The first reason is of the launch that makes
// a tile map, and leaves a plan together with it.
inline constexpr const char* kMapOfSingleBytes =
    "slow path: the tile map is made of the mask's bytes one by one: its rows do not begin at "
    "multiples of 4 bytes, or keys do not follow one another";
void explain_mask(const Because&, const Problem&, const KernelConfig& main);

// How dq and dbias are summed.
void explain_gradients(const Because&, const Problem&, const KernelConfig& main,
                       bool sums_dbias_in_place);

}  // namespace regard
