// Chip: what a GPU offers, as a value: plans for any GPU can be made anywhere.
#pragma once

#include <string>
#include <vector>

#include "semantics/portable.h"

namespace regard {

struct Chip {
  int major = 0;  // compute capability
  int minor = 0;
  int multiprocessors = 0;
  int64 shared_per_block = 0;           // bytes a block may ask for (opt in)
  int64 shared_per_multiprocessor = 0;  // bytes
  int registers_per_multiprocessor = 65536;
  int64 l2 = 0;      // bytes of the second-level cache
  std::string name;  // "sm_90"; of a device at hand: its own name

  int capability() const { return 10 * major + minor; }
};

// The representative chip of each compute capability, for "sm_80" and the like; nullptr if unknown.
const Chip* chip_named(const std::string& name);
const std::vector<Chip>& known_chips();

}  // namespace regard
