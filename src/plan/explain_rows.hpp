// Lines of an explanation: a name, and what is to say of it.
#pragma once

#include <cstdio>
#include <string>

#include "problem/describe.hpp"
#include "problem/refuse.hpp"
#include "semantics/portable.h"

namespace regard {

inline std::string megabytes(int64 bytes) { return decimal(double(bytes) / 1e6, 2) + " MB"; }

inline std::string row(const char* name, const std::string& value) {
  char text[16];
  std::snprintf(text, sizeof text, "%-11s", name);
  return text + value + "\n";
}

// share: what causal masks and windows show. of: whose pairs, where it is not the whole problem's.
inline std::string visible_share(const Problem& p, double share, const char* of) {
  return (tests_pairs(p.features) ? "at most " : "") + decimal(100 * share, 1) + " % of the pairs" +
         of + " are visible; tiles without any are skipped";
}

}  // namespace regard
