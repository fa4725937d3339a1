// The written list of kernels that may use memory where registers ran out.
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

// Lines "chips: words, spill N, stack N: reason"; # begins a comment. UsageError where one is not
// like that.
std::vector<KnownSpill> read_known_spills(const std::string& path);

// The first that covers what the kernel takes, or null.
const KnownSpill* known_spill(const std::vector<KnownSpill>&, const CompiledKernel&);

// A line for the list, with a reason yet to be written.
std::string spill_line(const CompiledKernel&);

}  // namespace regard::cli
