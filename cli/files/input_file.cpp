// POSIX reads with checked ranges and errors in words.
#include "files/input_file.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "command_line/parse.hpp"

namespace regard::cli {

InputFile::InputFile(const std::string& path) : path_(path) {
  descriptor_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor_ < 0) {
    throw UsageError(fmt::format("{}: cannot be opened: {}", path, std::strerror(errno)));
  }
  struct stat status {};
  if (fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode)) {
    close(descriptor_);
    throw UsageError(fmt::format("{}: is not a regular file", path));
  }
  size_ = static_cast<std::uint64_t>(status.st_size);
}

InputFile::~InputFile() { close(descriptor_); }

void InputFile::refuse(const std::string& field, const std::string& reason) const {
  throw UsageError(fmt::format("{}: {}: {}", path_, field, reason));
}

void InputFile::read(std::uint64_t offset, void* to, std::size_t bytes, const char* what) const {
  if (offset > size_ || bytes > size_ - offset) {
    refuse(what, fmt::format("the file ends at byte {}, {} more are needed from byte {}", size_,
                             bytes, offset));
  }
  auto* next = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t count = pread(descriptor_, next, bytes, static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) refuse(what, std::string("cannot be read: ") + std::strerror(errno));
    if (count == 0) refuse(what, "the file became shorter while it was read");
    next += count;
    offset += static_cast<std::uint64_t>(count);
    bytes -= static_cast<std::size_t>(count);
  }
}

}  // namespace regard::cli
