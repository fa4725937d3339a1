// Parses option values strictly: shapes, types, devices, windows.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "tensors/array.hpp"

namespace regard::cli {

// Bad usage or input: printed as "regard: <what>", exit status 2.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Each names the option in its message.
Index parse_integer(std::string_view text, const std::string& option, Index least);
Sizes parse_shape(std::string_view text, const std::string& option);  // "2x8x128x64"
Type parse_type(std::string_view text, const std::string& option);
Causal parse_causal(const std::string& text);  // "" = none
Window parse_window(const std::string& text);  // "L,R"; "" = unbounded
Device parse_device(const std::string& text);  // "cpu", "cuda:0", "sm_90"
std::vector<std::string> split(std::string_view text, char separator);

// At most so many characters; those that are not printable ASCII become '?', because names in files
// may hold anything.
std::string printable(std::string_view text, std::size_t most = std::string_view::npos);

// A tensor without data: SHAPE[:type].
Tensor parse_tensor(const std::string& text, const std::string& option, Type type);

}  // namespace regard::cli
