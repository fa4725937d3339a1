// Column widths and units.
#include "output/table.hpp"

#include <fmt/core.h>

#include <algorithm>

namespace regard::cli {

Table::Table(std::vector<std::string> headers) {
  for (std::string& header : headers) {
    left_.push_back(!header.empty() && header[0] == '<');
    if (left_.back()) header.erase(0, 1);
  }
  rows_.push_back(std::move(headers));
}

void Table::add(std::vector<std::string> cells) {
  cells.resize(left_.size());
  rows_.push_back(std::move(cells));
}

std::string Table::text() const {
  std::vector<std::size_t> widths(left_.size());
  for (const auto& row : rows_) {
    for (std::size_t n = 0; n < row.size(); ++n) widths[n] = std::max(widths[n], row[n].size());
  }
  std::string text;
  for (const auto& row : rows_) {
    std::string line;
    for (std::size_t n = 0; n < row.size(); ++n) {
      if (n > 0) line += "  ";
      line += left_[n] ? fmt::format("{:<{}}", row[n], widths[n])
                       : fmt::format("{:>{}}", row[n], widths[n]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

std::string bytes_text(double bytes) {
  if (bytes < 1e3) return fmt::format("{:.0f} B", bytes);
  if (bytes < 1e6) return fmt::format("{:.1f} kB", bytes / 1e3);
  if (bytes < 1e9) return fmt::format("{:.1f} MB", bytes / 1e6);
  return fmt::format("{:.2f} GB", bytes / 1e9);
}

std::string duration_text(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.1f} us", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.2f} ms", seconds * 1e3);
  return fmt::format("{:.2f} s", seconds);
}

}  // namespace regard::cli
