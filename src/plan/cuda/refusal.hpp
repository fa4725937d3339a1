// Refusal: why something cannot, or should not, be done.
#pragma once

#include "plan/count.h"

namespace regard {

struct Refusal {
  const char* why = nullptr;  // null: nothing speaks against it
  bool too_large = false;     // no chip could do it: strides of 0 make such problems

  constexpr Refusal() = default;
  constexpr Refusal(const char* reason, bool is_too_large = false)
      : why(reason), too_large(is_too_large) {}

  explicit constexpr operator bool() const { return why != nullptr; }
};

inline constexpr Refusal kRefusedAsTooLarge{kTooLarge, true};
inline constexpr Refusal kTooManyBlocks{"the problem needs more blocks than a grid can have"};

}  // namespace regard
