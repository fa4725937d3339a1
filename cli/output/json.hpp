// JSON objects on one line, fields in the order they were added.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace regard::cli {

class JsonLine {
 public:
  JsonLine();
  ~JsonLine();
  JsonLine(JsonLine&&) noexcept;

  void text(const char* name, const std::string& value);
  void number(const char* name, double value);
  void integer(const char* name, std::int64_t value);
  void count(const char* name, std::uint64_t value);
  void boolean(const char* name, bool value);
  void object(const char* name, const JsonLine& value);
  void list(const char* name, const std::vector<std::int64_t>& values);
  void list(const char* name, const std::vector<std::string>& values);
  void list(const char* name, const std::vector<JsonLine>& values);
  std::string str() const;  // NaN and infinities become null

 private:
  struct Data;
  std::unique_ptr<Data> data_;
};

}  // namespace regard::cli
