// Linux, with glibc or musl.
#include <link.h>
#include <sched.h>
#include <sys/syscall.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "system/system.hpp"
#include "system/system_posix.hpp"

namespace regard::system {

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

void become_helper() {
  leave_signals();
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(getpid(), sizeof set, &set) == 0) sched_setaffinity(0, sizeof set, &set);
}

std::size_t cache_size([[maybe_unused]] int level) {
#if defined(_SC_LEVEL1_DCACHE_SIZE)  // musl does not say
  const int names[] = {_SC_LEVEL1_DCACHE_SIZE, _SC_LEVEL2_CACHE_SIZE, _SC_LEVEL3_CACHE_SIZE};
  const long size = level >= 1 && level <= 3 ? sysconf(names[level - 1]) : 0;
  return size > 0 ? static_cast<std::size_t>(size) : 0;
#else
  return 0;
#endif
}

std::string variable(const char* name) {
  const char* const value = secure_getenv(name);
  return value ? value : "";
}

std::vector<std::string> loaded_libraries() {
  std::vector<std::string> files;
  const auto add = [](dl_phdr_info* info, std::size_t, void* list) {
    static_cast<std::vector<std::string>*>(list)->emplace_back(info->dlpi_name);
    return 0;
  };
  dl_iterate_phdr(add, &files);
  return files;
}

std::string allow_tiles() {
#if defined(SYS_arch_prctl)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0) return "";
  return std::string("the operating system refuses the tile registers: ") + std::strerror(errno);
#else
  return "not offered by this operating system";
#endif
}

std::string program_file() {
  char path[4096];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof path);
  return length > 0 ? std::string(path, static_cast<std::size_t>(length)) : "";
}

bool has_access_list(const char* path) {
  if (getxattr(path, "system.posix_acl_access", nullptr, 0) >= 0) return true;
  return errno != ENODATA && errno != ENOTSUP;
}

}  // namespace regard::system
