// The instruction set that REGARD_BACKEND forces upon a test; the program ends where it is missing.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

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

// Those for which the forced instruction set has kernels of its own: for others AVX512-BF16 and AMX
// have AVX-512's, which are tested under that name.
inline const std::vector<Type>& tested_types() {
  static const std::vector<Type> all{f64, f32, f16, bf16}, pairs{bf16}, tiles{f16, bf16};
  const std::string name = forced_backend();
  return name == "cpu:avx512bf16" ? pairs : name == "cpu:amx" ? tiles : all;
}

// Whether elements are sums of two terms. Short sequences have other kernels backward, and rows
// near a NaN are computed again in f32.
inline bool multiplies_by_terms(Type type) { return type == f16 && forced_backend() == "cpu:amx"; }

}  // namespace regard::tests
