// Aligned tables: text columns to the left, number columns to the right.
#pragma once

#include <string>
#include <vector>

namespace regard::cli {

class Table {
 public:
  // A header that begins with '<' names a left-aligned column.
  explicit Table(std::vector<std::string> headers);
  void add(std::vector<std::string> cells);
  std::string text() const;  // ends with a newline

 private:
  std::vector<std::vector<std::string>> rows_;
  std::vector<bool> left_;
};

std::string bytes_text(double bytes);       // "12.5 MB"
std::string duration_text(double seconds);  // "3.21 ms"

}  // namespace regard::cli
