// The list of kernels that may spill registers or use a stack, each with a reason.
#pragma once

#include <string>
#include <vector>

#include "regard/cuda.hpp"

namespace regard::cli {

struct KnownSpill {
  int line = 0;
  std::vector<std::string> chips;  // empty = all
  std::vector<std::string> words;  // each must be a word of the kernel
  int spill_bytes = 0, stack_bytes = 0;
  std::string reason;
  mutable bool used = false;
};

// Reads lines "chips: words, spill N, stack N: reason"; # begins a comment. Any other line is a
// UsageError.
std::vector<KnownSpill> read_known_spills(const std::string& path);

// The first entry that allows the kernel's spills and stack, or null.
const KnownSpill* known_spill(const std::vector<KnownSpill>&, const CompiledKernel&);

// The line that would allow the kernel, without a reason.
std::string spill_line(const CompiledKernel&);

}  // namespace regard::cli
