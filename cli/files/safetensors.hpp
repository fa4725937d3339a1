// The .safetensors format: an 8-byte header length, a JSON header, then the tensors' bytes.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tensors/array.hpp"

namespace regard::cli {

// Reads the tensors whose names are wanted; the names of the others go to `ignored`.
std::map<std::string, Array> read_safetensors(const std::string& path,
                                              const std::vector<std::string>& wanted,
                                              std::vector<std::string>& ignored);

void write_safetensors(const std::string& path,
                       const std::vector<std::pair<std::string, Tensor>>& tensors);

}  // namespace regard::cli
