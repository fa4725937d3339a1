// OutputFile: regular files appear whole or not at all; FIFOs, devices and stdout are written
// through.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "files/unfinished.hpp"

namespace regard::cli {

// Whether the path exists and is neither a regular file nor a folder (a FIFO, a device), or is
// stdout itself (/dev/stdout): OutputFile writes to it directly.
bool is_stream(const std::string& path);
bool is_stdout(const std::string& path);

// Why OutputFile could not write the path; "" where nothing is known to be in the way. Changes
// nothing.
std::string write_fault(const std::string& path);

// Whether both paths exist and lead to the same file.
bool is_same_file(const std::string& one, const std::string& other);

// A regular file is written under a temporary name in its folder, and commit() renames it, so that
// no reader sees half of it; a signal that ends the tool leaves nothing behind. Symbolic links are
// followed. The new file has the mode of the one that it replaces. Every failure is a UsageError
// that names the path. Make one at a time, on the main thread.
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

  std::string path_;                // as the user gave it
  std::string target_, temporary_;  // with links followed; empty if written through
  std::optional<Unfinished> unfinished_;
  int descriptor_ = -1;
};

}  // namespace regard::cli
