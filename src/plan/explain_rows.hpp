// Lines of an explanation: a name, and what is to say of it.
#pragma once

#include <cstdio>
#include <string>

#include "semantics/portable.h"

namespace regard {

inline std::string megabytes(int64 bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f MB", double(bytes) / 1e6);
  return text;
}

inline std::string row(const char* name, const std::string& value) {
  char text[16];
  std::snprintf(text, sizeof text, "%-11s", name);
  return text + value + "\n";
}

}  // namespace regard
