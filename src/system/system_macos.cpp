// macOS.
#include <mach-o/dyld.h>
#include <sys/sysctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <thread>

#include "system/system.hpp"
#include "system/system_posix.hpp"

namespace regard::system {

int usable_cores() { return std::max(1, static_cast<int>(std::thread::hardware_concurrency())); }

void become_helper() { leave_signals(); }

std::size_t cache_size(int level) {
  const char* const names[] = {"hw.l1dcachesize", "hw.l2cachesize", "hw.l3cachesize"};
  std::int64_t size = 0;
  std::size_t length = sizeof size;
  if (level < 1 || level > 3) return 0;
  if (sysctlbyname(names[level - 1], &size, &length, nullptr, 0) != 0 || size < 0) return 0;
  return static_cast<std::size_t>(size);
}

std::string variable(const char* name) {
  const char* const value = issetugid() ? nullptr : std::getenv(name);
  return value ? value : "";
}

std::vector<std::string> loaded_libraries() {
  std::vector<std::string> files;
  for (std::uint32_t i = 0; i < _dyld_image_count(); ++i) {
    if (const char* const name = _dyld_get_image_name(i)) files.emplace_back(name);
  }
  return files;
}

std::string allow_tiles() { return "not offered by this operating system"; }

std::string program_file() {
  char path[4096];
  std::uint32_t size = sizeof path;
  return _NSGetExecutablePath(path, &size) == 0 ? path : "";
}

bool has_access_list(const char*) { return true; }

}  // namespace regard::system
