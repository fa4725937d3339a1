// Files written whole or not at all; FIFOs, devices and stdout written through.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "files/unfinished.hpp"

namespace regard::cli {

// Whether writing to the path writes through: it exists and is no regular file or folder (a FIFO, a
// device), or it is what stdout is (/dev/stdout).
bool is_stream(const std::string& path);
bool is_stdout(const std::string& path);

// A regular file is written next to its place and renamed at commit(), so that no reader sees half
// of it; a signal that ends the tool leaves nothing behind. Symbolic links are followed. Every
// failure is a UsageError that names the path. One at a time, on the main thread.
class OutputFile {
 public:
  explicit OutputFile(const std::string& path);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void write(const void* data, std::size_t bytes);
  void commit();

 private:
  void open_temporary();
  [[noreturn]] void fail(const char* action);

  std::string path_, target_, temporary_;  // as given; links followed; empty if written through
  std::optional<Unfinished> unfinished_;
  int descriptor_ = -1;
};

}  // namespace regard::cli
