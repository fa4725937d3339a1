// ".member = value" pairs; a member of a group has the group's name before it: bias.type=f16.
#include "kernel_words.hpp"

#include <string_view>

#include "command_line/parse.hpp"

namespace regard::cli {

namespace {

constexpr std::string_view kName = "abcdefghijklmnopqrstuvwxyz_";

bool is_plain(std::string_view member) {
  return member == "kernel" || member == "family" || member == "type" || member == "products";
}

std::string word_of(std::string_view member, std::string_view value) {
  if (value == "true") return printable(member);
  if (value == "false") return "no_" + printable(member);
  value.remove_prefix(value.rfind(':') == value.npos ? 0 : value.rfind(':') + 1);
  return is_plain(member) ? printable(value) : printable(member) + "=" + printable(value);
}

}  // namespace

std::vector<std::string> kernel_words(const std::string& config) {
  std::vector<std::string> words;
  std::string group;  // the member whose members are read
  std::string_view text = config;
  for (;;) {
    const std::size_t at = text.find_first_of(".}");
    if (at == text.npos) return words;
    if (text[at] == '}') group.clear();
    const bool is_member = text[at] == '.';
    text.remove_prefix(at + 1);
    const std::string_view member = text.substr(0, text.find_first_not_of(kName));
    constexpr std::string_view kEquals = " = ";
    if (!is_member || member.empty() || !text.substr(member.size()).starts_with(kEquals)) continue;
    text.remove_prefix(member.size() + kEquals.size());
    const std::size_t end = text.find_first_of(",{}");
    if (end != text.npos && text[end] == '{') {
      group = member == "features" || member == "tiling" ? "" : std::string(member) + ".";
    } else {
      words.push_back(word_of(group + std::string(member), text.substr(0, end)));
    }
  }
}

std::string joined(const std::vector<std::string>& words) {
  std::string line;
  for (const std::string& word : words) line += (line.empty() ? "" : " ") + word;
  return line;
}

}  // namespace regard::cli
