// Regular files, read within their bounds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace regard::cli {

// Every failure is a UsageError that names the file.
class InputFile {
 public:
  explicit InputFile(const std::string& path);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  const std::string& path() const { return path_; }
  std::uint64_t size() const { return size_; }
  // The range must lie within size().
  void read(std::uint64_t offset, void* to, std::size_t bytes, const char* what) const;
  [[noreturn]] void refuse(const std::string& field, const std::string& reason) const;

 private:
  std::string path_;
  int descriptor_ = -1;
  std::uint64_t size_ = 0;
};

}  // namespace regard::cli
