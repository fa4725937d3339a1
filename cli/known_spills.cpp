// Reads the list strictly: a line that is misread would let a spill pass.
#include "known_spills.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <sstream>

#include "command_line/parse.hpp"
#include "files/input_file.hpp"
#include "kernel_words.hpp"

namespace regard::cli {

namespace {

constexpr Index kMostBytes = 1 << 20;

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

[[noreturn]] void refuse_line(const std::string& path, int number, const std::string& what) {
  throw UsageError(fmt::format(
      "{}:{}: {}; a line is \"chips: words, spill N, stack N: reason\", for example \"sm_80 sm_90: "
      "forward mma dim=512, spill 64, stack 32: no tiling of this size needs less\"",
      path, number, what));
}

KnownSpill read_line(const std::string& path, int number, const std::string& line) {
  const std::size_t first = line.find(':'), last = line.find(':', first + 1);
  if (first == line.npos || last == line.npos) refuse_line(path, number, "has no two colons");
  const std::vector<std::string> parts = split(line.substr(first + 1, last - first - 1), ',');
  KnownSpill known{.line = number, .chips = words_of(line.substr(0, first))};
  if (known.chips.empty()) refuse_line(path, number, "names no chip (\"all\" is for all)");
  for (const std::string& chip : known.chips) {
    if (chip != "all" && !chip.starts_with("sm_")) refuse_line(path, number, chip + " is no chip");
  }
  if (known.chips == std::vector<std::string>{"all"}) known.chips.clear();
  known.words = words_of(parts[0]);
  if (known.words.empty()) refuse_line(path, number, "names no kernel");
  for (std::size_t n = 1; n < parts.size(); ++n) {
    const std::vector<std::string> bound = words_of(parts[n]);
    if (bound.size() != 2 || (bound[0] != "spill" && bound[0] != "stack")) {
      refuse_line(path, number, "\"" + parts[n] + "\" is no bound");
    }
    const Index bytes = parse_integer(bound[1], fmt::format("{}:{}", path, number), 0);
    (bound[0] == "spill" ? known.spill_bytes : known.stack_bytes) =
        static_cast<int>(std::min<Index>(bytes, kMostBytes));
  }
  known.reason = joined(words_of(line.substr(last + 1)));
  if (known.reason.empty()) refuse_line(path, number, "gives no reason");
  return known;
}

bool holds(const std::vector<std::string>& all, const std::string& word) {
  return std::find(all.begin(), all.end(), word) != all.end();
}

}  // namespace

std::vector<KnownSpill> read_known_spills(const std::string& path) {
  std::vector<KnownSpill> list;
  const InputFile file(path);
  if (file.size() > std::uint64_t{kMostBytes})
    file.refuse("size", "is more than a list of spills can be");
  std::string text(file.size(), '\0');
  file.read(0, text.data(), text.size(), "text");
  std::istringstream lines(text);
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    line.erase(std::min(line.find('#'), line.size()));
    if (!words_of(line).empty()) list.push_back(read_line(path, number, line));
  }
  return list;
}

const KnownSpill* known_spill(const std::vector<KnownSpill>& list, const CompiledKernel& k) {
  const std::vector<std::string> words = kernel_words(k.config);
  const auto covers = [&](const KnownSpill& known) {
    return (known.chips.empty() || holds(known.chips, k.chip)) &&
           std::all_of(known.words.begin(), known.words.end(),
                       [&](const std::string& word) { return holds(words, word); }) &&
           k.spill_bytes <= known.spill_bytes && k.stack_bytes <= known.stack_bytes;
  };
  const auto found = std::find_if(list.begin(), list.end(), covers);
  if (found == list.end()) return nullptr;
  found->used = true;
  return &*found;
}

std::string spill_line(const CompiledKernel& k) {
  return fmt::format("{}: {}, spill {}, stack {}: ", k.chip, joined(kernel_words(k.config)),
                     k.spill_bytes, k.stack_bytes);
}

}  // namespace regard::cli
