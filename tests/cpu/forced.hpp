// The instruction set that REGARD_BACKEND forces upon a test; the program ends where it is missing.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

#include "regard/regard.hpp"

namespace regard::tests {

// "cpu:avx2"; "" where nothing is forced. Status 77 tells ctest that the test was skipped.
inline std::string forced_backend() {
  const char* const forced = std::getenv("REGARD_BACKEND");
  const std::string name = forced ? forced : "";
  for (const BackendInfo& backend : backends()) {
    if (backend.name == name && !backend.available) {
      std::printf("%s: %s\n", name.c_str(), backend.note.c_str());
      std::fflush(stdout);
      std::_Exit(77);
    }
  }
  return name;
}

}  // namespace regard::tests
