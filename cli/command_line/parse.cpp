// Parses option values. An error shows an example of a right value.
#include "command_line/parse.hpp"

#include <fmt/core.h>

#include <charconv>

namespace regard::cli {

namespace {

// Whether the whole text is a number of at least `least`.
bool read_integer(std::string_view text, Index least, Index& value) {
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
  return code == std::errc{} && end == text.data() + text.size() && value >= least;
}

}  // namespace

Index parse_integer(std::string_view text, const std::string& option, Index least) {
  Index value = 0;
  if (!read_integer(text, least, value)) {
    throw UsageError(
        fmt::format("{} = \"{}\": must be a whole number, {} or more", option, text, least));
  }
  return value;
}

std::string printable(std::string_view text, std::size_t most) {
  std::string kept;
  for (const char c : text.substr(0, most)) kept += c >= ' ' && c <= '~' ? c : '?';
  return kept;
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  for (;;) {
    const std::size_t at = text.find(separator);
    parts.emplace_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

Sizes parse_shape(std::string_view text, const std::string& option) {
  Sizes sizes;
  for (const std::string& part : split(text, 'x')) {
    if (!read_integer(part, 0, sizes.emplace_back())) {
      throw UsageError(fmt::format("{} = \"{}\": must be sizes joined by x, for example 2x8x128x64",
                                   option, text));
    }
  }
  if (sizes.size() > Tensor::kMaxRank) {
    throw UsageError(
        fmt::format("{} = \"{}\": has {} sizes; at most 4", option, text, sizes.size()));
  }
  count_of(sizes, option);
  return sizes;
}

Type parse_type(std::string_view text, const std::string& option) {
  for (Type type : {f64, f32, f16, bf16}) {
    if (text == name_of(type)) return type;
  }
  throw UsageError(fmt::format("{} = \"{}\": must be f64, f32, f16 or bf16", option, text));
}

Causal parse_causal(const std::string& text) {
  if (text.empty()) return Causal::none;
  if (text == "bottom-right") return Causal::bottom_right;
  if (text == "top-left") return Causal::top_left;
  throw UsageError(fmt::format(
      "--causal = \"{}\": must be bottom-right (also what --causal alone means) or top-left",
      text));
}

Window parse_window(const std::string& text) {
  if (text.empty()) return {};
  const auto sides = split(text, ',');
  if (sides.size() != 2) {
    throw UsageError(fmt::format(
        "--window = \"{}\": must be LEFT,RIGHT keys around the diagonal; -1 = unbounded; for "
        "example 128,0",
        text));
  }
  return {.left = parse_integer(sides[0], "--window", -1),
          .right = parse_integer(sides[1], "--window", -1)};
}

Device parse_device(const std::string& text) {
  if (text == "cpu") return cpu();
  if (text.starts_with("cuda:")) {
    const Index index = parse_integer(std::string_view(text).substr(5), "--device cuda:", 0);
    if (index < 4096) return cuda(static_cast<int>(index));
  }
  if (text.starts_with("sm_") && text.size() > 3) return chip(text);
  throw UsageError(fmt::format(
      "--device = \"{}\": must be cpu, cuda:N, or a chip such as sm_90 (to explain only)", text));
}

Tensor parse_tensor(const std::string& text, const std::string& option, Type type) {
  if (text.empty()) return {};
  const auto parts = split(text, ':');
  if (parts.size() > 2 || (parts.size() == 2 && type == boolean)) {
    throw UsageError(fmt::format("{} = \"{}\": must be {}", option, text,
                                 type == boolean ? "a shape such as 1x1x128x128"
                                                 : "SHAPE[:type], for example 1x1x128x128:f32"));
  }
  return dense_tensor(parts.size() == 2 ? parse_type(parts[1], option) : type,
                      parse_shape(parts[0], option));
}

}  // namespace regard::cli
