// POSIX writes, and the rename that ends them.
#include "files/output_file.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "command_line/parse.hpp"

namespace regard::cli {

namespace {

constexpr std::size_t kPiece = std::size_t{1} << 24;  // bytes of one write, which delays signals

// The path at the end of a chain of symbolic links, whether it exists or not. Returns "" and sets
// errno if the chain is circular.
std::string followed(const std::string& path) {
  namespace fs = std::filesystem;
  constexpr int kMostLinks = 40;  // as Linux itself follows
  fs::path target = path;
  std::error_code failure;
  for (int n = 0; n <= kMostLinks; ++n) {
    const fs::path next = fs::read_symlink(target, failure);
    if (failure) return target;  // no link
    target = target.parent_path() / next;
  }
  errno = ELOOP;
  return {};
}

// In the target's own folder, so that it can be renamed.
std::string temporary_name(const std::string& target) {
  return fmt::format("{}.{}.part", target, getpid());
}

}  // namespace

std::string write_fault(const std::string& path) {
  if (is_stdout(path)) return {};
  if (is_stream(path)) return access(path.c_str(), W_OK) == 0 ? "" : std::strerror(errno);
  const std::string target = followed(path);
  if (target.empty()) return std::strerror(errno);
  struct stat status {};
  if (stat(target.c_str(), &status) == 0 && S_ISDIR(status.st_mode)) return std::strerror(EISDIR);
  const std::string folder = std::filesystem::path(target).parent_path();
  if (access(((folder.empty() ? "." : folder) + "/.").c_str(), W_OK | X_OK) != 0) {
    return std::strerror(errno);
  }
  if (lstat(temporary_name(target).c_str(), &status) == 0) return std::strerror(EEXIST);
  return errno == ENOENT ? "" : std::strerror(errno);
}

bool is_same_file(const std::string& one, const std::string& other) {
  struct stat first {
  }, second{};
  return stat(one.c_str(), &first) == 0 && stat(other.c_str(), &second) == 0 &&
         first.st_dev == second.st_dev && first.st_ino == second.st_ino;
}

bool is_stdout(const std::string& path) {
  struct stat there {
  }, ours{};
  return stat(path.c_str(), &there) == 0 && fstat(STDOUT_FILENO, &ours) == 0 &&
         there.st_dev == ours.st_dev && there.st_ino == ours.st_ino;
}

bool is_stream(const std::string& path) {
  struct stat status {};
  if (stat(path.c_str(), &status) != 0) return false;
  return !S_ISDIR(status.st_mode) && (!S_ISREG(status.st_mode) || is_stdout(path));
}

OutputFile::OutputFile(const std::string& path) : path_(path) {
  if (is_stdout(path)) {
    descriptor_ = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 0);
  } else if (is_stream(path)) {
    descriptor_ = open(path.c_str(), O_WRONLY | O_CLOEXEC);
  } else {
    open_temporary();
  }
  if (descriptor_ < 0) fail("written");
}

void OutputFile::open_temporary() {
  target_ = followed(path_);
  if (target_.empty()) return;
  temporary_ = temporary_name(target_);
  struct stat before {};
  const bool exists = stat(target_.c_str(), &before) == 0;
  unfinished_.emplace(temporary_.c_str());
  descriptor_ = open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC,
                     exists ? 0600 : 0666);  // never wider than the file that it replaces
  if (descriptor_ < 0 || !exists) return;
  if (fchmod(descriptor_, before.st_mode & 0777) != 0) {
    const int code = errno;
    close(descriptor_);
    unlink(temporary_.c_str());
    descriptor_ = -1;
    errno = code;
  }
}

OutputFile::~OutputFile() {
  if (descriptor_ < 0) return;
  close(descriptor_);
  if (unfinished_) unlink(temporary_.c_str());
}

void OutputFile::fail(const char* action) {
  throw UsageError(fmt::format("{}: cannot be {}: {}", path_, action, std::strerror(errno)));
}

void OutputFile::write(const void* data, std::size_t bytes) {
  const auto* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t count = ::write(descriptor_, next, std::min(bytes, kPiece));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail("written");
    next += count;
    bytes -= static_cast<std::size_t>(count);
  }
}

void OutputFile::commit() {
  const int descriptor = descriptor_;
  descriptor_ = -1;
  const bool closed = close(descriptor) == 0;
  if (!unfinished_) {
    if (!closed) fail("written");
    return;
  }
  if (!closed || std::rename(temporary_.c_str(), target_.c_str()) != 0) {
    const int code = errno;
    unlink(temporary_.c_str());
    errno = code;
    fail("renamed into place");
  }
}

}  // namespace regard::cli
