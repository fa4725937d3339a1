// A plan as text: a table with a line for each rank, and the reasons.
#include <algorithm>
#include <array>

#include "distributed/plan_contents.hpp"
#include "distributed/views.hpp"
#include "problem/refuse.hpp"

namespace regard::distributed {
namespace {

constexpr std::size_t kMostRuns = 4;  // of blocks that a line shows

std::string bytes_text(std::int64_t count) {
  constexpr std::array<std::pair<const char*, double>, 3> units = {
      {{" GB", 1e9}, {" MB", 1e6}, {" kB", 1e3}}};
  for (const auto& [unit, size] : units) {
    if (double(count) >= size) return decimal(double(count) / size, 2) + unit;
  }
  return std::to_string(count) + " B";
}

// "0-3, 9" for the blocks 0, 1, 2, 3, 9.
std::string blocks_text(const std::vector<std::int64_t>& blocks) {
  std::vector<Rows> runs;
  for (const std::int64_t block : blocks) {
    if (!runs.empty() && runs.back().end == block) {
      ++runs.back().end;
    } else {
      runs.push_back({block, block + 1});
    }
  }
  std::string text;
  for (std::size_t n = 0; n < std::min(runs.size(), kMostRuns); ++n) {
    if (n > 0) text += ", ";
    text += std::to_string(runs[n].begin);
    if (size_of_range(runs[n]) > 1) text += "-" + std::to_string(runs[n].end - 1);
  }
  if (runs.size() > kMostRuns) text += ", ... (" + std::to_string(blocks.size()) + " blocks)";
  return text.empty() ? "none" : text;
}

using Line = std::array<std::string, 6>;

std::string table_text(const std::vector<Line>& lines) {
  std::array<std::size_t, 5> widths{};  // the last column is not padded
  for (const Line& line : lines) {
    for (std::size_t n = 0; n < widths.size(); ++n) widths[n] = std::max(widths[n], line[n].size());
  }
  std::string text;
  for (const Line& line : lines) {
    for (std::size_t n = 0; n < widths.size(); ++n) {
      text += std::string(widths[n] - line[n].size(), ' ') + line[n] + "  ";
    }
    text += line.back() + "\n";
  }
  return text;
}

}  // namespace

const char* name_of(Scheme scheme) {
  switch (scheme) {
    case Scheme::gather:
      return "gather";
    case Scheme::halo:
      return "halo";
    case Scheme::ulysses:
      return "ulysses";
    case Scheme::ring:
      return "ring";
    case Scheme::automatic:
      break;
  }
  return "automatic";
}

const char* name_of(Dealing dealing) {
  switch (dealing) {
    case Dealing::zigzag:
      return "zigzag";
    case Dealing::greedy:
      return "greedy";
    case Dealing::documents:
      return "documents";
    case Dealing::contiguous_by_area:
      return "contiguous by area";
    case Dealing::contiguous:
      break;
  }
  return "contiguous";
}

std::string PlanContents::title() const {
  return std::string(name_of(scheme)) + " over " + std::to_string(ranks) + " ranks, " +
         std::to_string(whole.length) + " rows dealt " + name_of(dealing) + ", balance " +
         decimal(balance(), 3) +
         (overlap() == Overlap::heads ? ", some heads computed while keys of others move" : "");
}

std::string PlanContents::explain() const {
  std::vector<Line> lines = {
      {"rank", "rows", "visible pairs", "receives forward", "receives backward", "blocks"}};
  for (int rank = 0; rank < ranks; ++rank) {
    const auto n = std::size_t(rank);
    lines.push_back({std::to_string(rank), std::to_string(rows(rank)), decimal(areas[n], 0),
                     bytes_text(moved[n].forward), bytes_text(moved[n].backward),
                     blocks_text(blocks[n])});
  }
  std::string text = title() + "\nbatch " + std::to_string(whole.batch) + ", heads " +
                     std::to_string(whole.heads_q) + "/" + std::to_string(whole.heads_kv) +
                     ", head sizes " + std::to_string(whole.head_size) + " and " +
                     std::to_string(whole.head_size_v) + ", " + regard::name_of(whole.type) + "\n" +
                     table_text(lines);
  for (const std::string& reason : reasons) text += "- " + reason + "\n";
  return text;
}

}  // namespace regard::distributed
