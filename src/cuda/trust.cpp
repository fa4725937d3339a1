// Walks a path name by name, and asks of each file and folder who may have changed it.
#include "cuda/trust.hpp"

#include <grp.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <vector>

#include "system/system.hpp"

namespace regard::cuda_backend {
namespace {

std::string name_of_user() {
  passwd entry{};
  passwd* found = nullptr;
  std::vector<char> memory(1 << 14);
  const int result = getpwuid_r(geteuid(), &entry, memory.data(), memory.size(), &found);
  return result == 0 && found ? entry.pw_name : "";
}

// Whether a right of this group is one of root or the user alone.
bool is_private_group(gid_t group) {
  ::group entry{};
  ::group* found = nullptr;
  std::vector<char> memory(1 << 14);  // a group with more members than fit is not private
  if (getgrgid_r(group, &entry, memory.data(), memory.size(), &found) != 0 || !found) return false;
  const std::string user = name_of_user();
  for (char** member = entry.gr_mem; *member; ++member) {
    if (user != *member && std::strcmp(*member, "root") != 0) return false;
  }
  return group == 0 || (group == getegid() && user == entry.gr_name);
}

std::string mode_fault(const struct stat& s, const char* path) {
  const bool by_group =
      (s.st_mode & S_IWGRP) && (!is_private_group(s.st_gid) || system::has_access_list(path));
  if (!by_group && !(s.st_mode & S_IWOTH)) return "";
  char text[64];
  std::snprintf(text, sizeof text, "can be written by others (mode %04o)", s.st_mode & 07777u);
  return text;
}

std::string owner_fault(uid_t owner) {
  if (owner == 0 || owner == geteuid()) return "";
  return "belongs to another user (uid " + std::to_string(owner) + ")";
}

// The user that stands for all users outside this user namespace, the host's root among them; -1
// outside of user namespaces.
long overflow_user() {
  long first = -1, outside = -1, count = 0, overflow = -1;
  std::ifstream("/proc/self/uid_map") >> first >> outside >> count;
  if (first == 0 && outside == 0 && count == 0xffffffffL) return -1;
  std::ifstream("/proc/sys/kernel/overflowuid") >> overflow;
  return overflow;
}

class Walk {
 public:
  explicit Walk(const std::string& path) : asked_(path), left_(path) {}

  TrustedPath end() && {
    found_.path = "/";
    found_.exists = true;
    visit("/");
    while (found_.exists && is_left()) step();
    return std::move(found_);
  }

 private:
  bool is_left() const { return left_.find_first_not_of('/') != std::string::npos; }

  std::string next_name() {
    const std::size_t first = left_.find_first_not_of('/');
    const std::size_t end = std::min(left_.find('/', first), left_.size());
    const std::string name = left_.substr(first, end - first);
    left_.erase(0, end);
    return name;
  }

  void step() {
    const std::string name = next_name();
    if (name == ".") return visit(found_.path);
    if (name == "..") return visit(found_.path.substr(0, std::max(found_.path.rfind('/'), kOne)));
    visit((found_.path == "/" ? "" : found_.path) + "/" + name);
  }

  void visit(const std::string& path) {
    struct stat s {};
    if (lstat(path.c_str(), &s) != 0) return stop(path, std::strerror(errno));
    if (S_ISLNK(s.st_mode)) return follow(path, s);
    found_.path = path;
    const bool is_above = is_left();
    if (!is_above || !is_of_host(s.st_uid)) note(path, owner_fault(s.st_uid));
    const std::string mode = mode_fault(s, path.c_str());
    is_shared_ = !mode.empty();
    if (!is_above || !(s.st_mode & S_ISVTX)) note(path, mode);
  }

  void follow(const std::string& path, const struct stat& s) {
    if (!is_of_host(s.st_uid)) note(path, owner_fault(s.st_uid));
    char target[4096];
    const ssize_t length = readlink(path.c_str(), target, sizeof target);
    if (length < 0) return stop(path, std::strerror(errno));
    if (++links_ > kMostLinks) return stop(path, std::strerror(ELOOP));
    left_ = std::string(target, std::size_t(length)) + left_;
    if (target[0] == '/') visit("/");
  }

  // Whether the owner may be the host's root, seen from a user namespace. No other user of the host
  // can have put the folder here, unless the folder above is open to all.
  bool is_of_host(uid_t owner) const {
    return owner != 0 && owner != geteuid() && !is_shared_ && long(owner) == overflow_user();
  }

  void note(const std::string& path, const std::string& fault) {
    if (fault.empty() || !found_.fault.empty()) return;  // the first one is told
    found_.fault = path == asked_ ? fault : "is reached through " + path + ", which " + fault;
  }
  void stop(const std::string& path, const std::string& reason) {
    found_.exists = false;
    note(path, "cannot be looked at: " + reason);
  }

  static constexpr int kMostLinks = 40;
  static constexpr std::size_t kOne = 1;
  const std::string asked_;
  std::string left_;  // still to follow from found_.path on
  TrustedPath found_;
  bool is_shared_ = false;  // others may add entries to the folder found_.path
  int links_ = 0;
};

}  // namespace

TrustedPath trusted_path(const std::string& path) {
  if (path.starts_with('/')) return Walk(path).end();
  return {.path = path, .exists = false, .fault = "is not an absolute path"};
}

std::string trust_fault(int descriptor) {
  struct stat s {};
  if (fstat(descriptor, &s) != 0) return std::strerror(errno);
  if (std::string fault = owner_fault(s.st_uid); !fault.empty()) return fault;
  return mode_fault(s, ("/proc/self/fd/" + std::to_string(descriptor)).c_str());
}

std::string printable(const std::string& text) {
  std::string kept;
  for (const char c : text) kept += c >= ' ' && c != 0x7f ? c : '?';
  return kept;
}

}  // namespace regard::cuda_backend
