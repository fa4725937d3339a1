// A kernel's configuration as words: what the compiler reads, without the C++ around it.
#pragma once

#include <string>
#include <vector>

namespace regard::cli {

// {"forward", "mma", "level=80", "bf16", "dim=64", "exact", ...}. Text that is no configuration
// gives whatever words it has; none holds a control character.
std::vector<std::string> kernel_words(const std::string& config);
std::string joined(const std::vector<std::string>& words);

}  // namespace regard::cli
