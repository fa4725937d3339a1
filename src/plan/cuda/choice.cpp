// What Run::backend and REGARD_BACKEND may say of a GPU:
//   cuda[:simt | :mma | :mma75 | :mma80 | :mma90 | :wgmma][/KB][@member=number,...]
#include "plan/cuda/choice.hpp"

#include <charconv>
#include <string_view>

#include "plan/cuda/config_members.hpp"

namespace regard {
namespace {

constexpr const char* kUnknownName = "no backend has this name; \"regard info\" lists them";

// What stands before the separator; `text` keeps what stands after it.
std::string_view before(std::string_view& text, char separator) {
  const size_t at = text.find(separator);
  const std::string_view head = text.substr(0, at);
  text = at == text.npos ? std::string_view() : text.substr(at + 1);
  return head;
}

bool parse_number(std::string_view text, int& number) {
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  return error == std::errc() && stop == end && number >= 1 && number <= 4096;
}

bool parse_family(std::string_view name, CudaChoice& choice) {
  choice.any_family = false;
  choice.family = name == "simt" ? Family::simt : name == "wgmma" ? Family::wgmma : Family::mma;
  if (name == "simt" || name == "mma" || name == "wgmma") return true;
  for (const int level : {75, 80, 90}) {
    if (name == "mma" + std::to_string(level)) {
      choice.level = level;
      return true;
    }
  }
  return false;
}

// Members that are not named become 0: they stay as the planner would have them.
bool parse_tiling(std::string_view list, CudaChoice& choice, std::string& why_not) {
  choice.has_tiling = true;
  for_each_member(choice.tiling, [](const char*, int& value) { value = 0; });
  while (!list.empty()) {
    std::string_view number = before(list, ',');
    const std::string_view name = before(number, '=');
    bool known = false;
    for_each_member(choice.tiling, [&](const char* member, int& value) {
      if (name == member) known = parse_number(number, value);
    });
    if (!known) {
      std::string members;
      for_each_member(choice.tiling, [&](const char* member, int) {
        members.append(members.empty() ? "" : ", ").append(member);
      });
      why_not = "\"" + std::string(name) + "\" is no part of a tiling: " + members +
                " may be numbers from 1 to 4096";
      return false;
    }
  }
  return true;
}

}  // namespace

bool parse_cuda_choice(const std::string& name, CudaChoice& choice, std::string& why_not) {
  choice = {};
  const auto refused = [&](const char* why) {
    why_not = why;
    return false;
  };
  std::string_view tiling = name;
  std::string_view shared = before(tiling, '@');
  const bool names_tiling = name.find('@') != name.npos;
  const bool names_shared = shared.find('/') != shared.npos;
  std::string_view family = before(shared, '/');
  const bool names_family = family.find(':') != family.npos;
  const std::string_view backend = before(family, ':');
  if (backend != "cuda" && !name.empty()) return refused(kUnknownName);
  if (names_family && !parse_family(family, choice)) return refused(kUnknownName);
  if (names_shared) {
    int kilobytes = 0;
    if (!parse_number(shared, kilobytes)) {
      return refused("what follows the / must be the kilobytes of shared memory of a block");
    }
    choice.shared = kilobytes * int64(1024);
  }
  if (names_tiling && tiling.empty()) return refused("a tiling must follow the @: rows=64,keys=64");
  return !names_tiling || parse_tiling(tiling, choice, why_not);
}

}  // namespace regard
