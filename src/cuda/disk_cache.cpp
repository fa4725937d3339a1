// The folder of compiled kernels.
#include "cuda/disk_cache.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <ctime>

#include "cuda/environment.hpp"
#include "cuda/hash.hpp"
#include "cuda/trust.hpp"
#include "plan/cuda/config_text.hpp"

namespace regard::cuda_backend {
namespace {

constexpr const char* kNowhere = "neither REGARD_CACHE_DIR nor HOME says where kernels may be kept";
constexpr std::time_t kHour = 3600, kDay = 24 * kHour;

bool is_folder(const std::string& path) {
  struct stat s {};
  return stat(path.c_str(), &s) == 0 && S_ISDIR(s.st_mode);
}

// What is wrong with a path that exists; "" where kernels may be read there.
std::string fault_of(const std::string& folder, const TrustedPath& found) {
  if (!found.fault.empty()) return folder + " " + found.fault;
  return is_folder(found.path) ? "" : folder + " is no folder";
}

// "" where the folder is there and may be read.
std::string folder_fault(const std::string& folder) {
  if (folder.empty()) return kNowhere;
  const TrustedPath found = trusted_path(folder);
  return found.exists ? fault_of(folder, found) : folder + " does not exist";
}

std::string not_written(const std::string& folder, const std::string& reason) {
  return "in " + folder + " no file can be written: " + reason;
}

// A folder that Regard has chosen is made private (0700); a folder that the user has named stays as
// it is. Nothing is changed where others could exchange the folder meanwhile.
bool narrow(const std::string& folder) {
  if (cache_folder_is_named() || !trusted_path(folder_of(folder)).fault.empty()) return false;
  struct stat s {};
  if (lstat(folder.c_str(), &s) != 0 || !S_ISDIR(s.st_mode) || s.st_uid != geteuid()) return false;
  if (chmod(folder.c_str(), 0700) != 0) return false;
  log_line("cache: " + folder + " had a mode that let others write; it is 0700 now");
  return true;
}

bool is_kernel(const std::string& name) {
  return name.ends_with(kKernelEnding) && name.front() != '.';
}
// What write_entry was writing when the process ended, or is writing now.
bool is_partial(const std::string& name) {
  return name.front() == '.' && name.ends_with(".part") &&
         name.find(kKernelEnding) != std::string::npos;
}

std::vector<std::string> kernels_in(const std::string& folder, const std::string& prefix) {
  std::vector<std::string> paths;
  for (const std::string& name : names_in(folder)) {
    if (is_kernel(name) && name.starts_with(prefix)) paths.push_back(folder + "/" + name);
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

// A file's time of modification says when it was last used, to a day; shrink_cache goes by it.
void note_use(const std::string& path) {
  struct stat s {};
  if (lstat(path.c_str(), &s) != 0 || s.st_mtime + kDay > std::time(nullptr)) return;
  utimensat(AT_FDCWD, path.c_str(), nullptr, AT_SYMLINK_NOFOLLOW);  // a cache of root's stays as is
}

bool load_from(const std::string& path, const KernelKey& key, KernelBinary& binary) {
  std::string image;
  const CacheEntry entry = read_entry(path, &image);
  if (!entry.fault.empty()) {
    log_line("cache: " + path + " " + entry.fault);
    return false;
  }
  if (entry.key.subject != key.subject) return false;  // another key of the same hash
  note_use(path);
  binary = {.image = std::move(image), .resources = entry.resources, .not_kept = ""};
  return true;
}

struct Candidate {
  std::string path;
  std::uint64_t bytes = 0;
  std::time_t used = 0;
};

}  // namespace

KernelKey kernel_key(const KernelConfig& config, const KernelUnit& unit,
                     const std::string& architecture, const std::string& compiler) {
  std::string texts = unit.text;
  for (const SourceText& header : unit.headers) {
    texts += '\0';
    texts += header.name;
    texts += '\0';
    texts += header.text;
  }
  KernelKey key{.subject = to_text(config) + "\n" + architecture, .compiler = compiler};
  for (const std::string& option : Compiler::options()) key.subject += " " + option;
  key.subject += "\ntexts " + hash_of(texts).text() + "\n";
  return key;
}

bool load_kernel(const KernelKey& key, KernelBinary& binary) {
  const std::string folder = cache_folder();
  if (const std::string fault = folder_fault(folder); !fault.empty()) {
    log_line("cache: " + fault);
    return false;
  }
  if (!key.compiler.empty()) {
    const std::string path = folder + "/" + file_name(key);
    return access(path.c_str(), F_OK) == 0 && load_from(path, key, binary);
  }
  for (const std::string& path : kernels_in(folder, hash_of(key.subject).text() + "-")) {
    if (load_from(path, key, binary)) return true;
  }
  return false;
}

std::string make_cache_folder() {
  const std::string folder = cache_folder();
  if (folder.empty()) return kNowhere;
  int error = 0;
  for (std::size_t slash = 1; slash != std::string::npos;) {
    slash = folder.find('/', slash + 1);
    const bool made = mkdir(folder.substr(0, slash).c_str(), 0700) == 0;
    if (!made && errno != EEXIST && error == 0) error = errno;
  }
  TrustedPath found = trusted_path(folder);
  if (!found.exists) {
    const std::string fault = cache_fault();
    return fault.empty() ? folder + " cannot be made: " + std::strerror(error) : fault;
  }
  if (!found.fault.empty() && narrow(folder)) found = trusted_path(folder);
  std::string fault = fault_of(folder, found);
  if (fault.empty() && access(found.path.c_str(), W_OK | X_OK) != 0) {
    fault = not_written(folder, std::strerror(errno));
  }
  return fault;
}

std::string cache_fault() {
  const std::string folder = cache_folder();
  if (folder.empty()) return kNowhere;
  if (!folder.starts_with('/')) return folder + " cannot be made: there is no working directory";
  if (const TrustedPath found = trusted_path(folder); found.exists) return fault_of(folder, found);
  std::string above = folder;
  struct stat s {};
  while (lstat(above.c_str(), &s) != 0 && above.size() > 1) {
    above = above.rfind('/') == 0 ? "/" : folder_of(above);
  }
  if (!is_folder(above)) return folder + " cannot be made: " + above + " is no folder";
  if (access(above.c_str(), W_OK | X_OK) == 0) return "";
  return folder + " cannot be made: " + above + ": " + std::strerror(errno);
}

std::string store_kernel(const KernelKey& key, const KernelBinary& binary) {
  static std::atomic<unsigned> counter{0};
  if (std::string fault = make_cache_folder(); !fault.empty()) return fault;
  shrink_cache(kMostCacheBytes);
  const std::string folder = cache_folder(), name = file_name(key);
  const std::string partial = folder + "/." + name + "." + std::to_string(getpid()) + "." +
                              std::to_string(counter.fetch_add(1)) + ".part";
  const std::string kept = folder + "/" + name;  // made before there is a file to lose
  std::string reason = write_entry(partial, key, binary);
  if (reason.empty() && rename(partial.c_str(), kept.c_str()) != 0) {
    reason = std::strerror(errno);
    unlink(partial.c_str());
  }
  return reason.empty() ? "" : not_written(folder, reason);
}

std::vector<CacheEntry> cache_entries() {
  std::vector<CacheEntry> entries;
  const std::string folder = cache_folder(), fault = folder_fault(folder);
  for (const std::string& path : kernels_in(folder, "")) {
    entries.push_back(read_entry(path));
    if (entries.back().fault.empty()) entries.back().fault = fault;
  }
  return entries;
}

int clear_cache() {
  const std::string folder = cache_folder();
  int count = 0;
  for (const std::string& name : names_in(folder)) {
    const bool is_ours = name.ends_with(kKernelEnding) || is_partial(name);
    if (is_ours || name == kLockName) {
      const bool went = unlink((folder + "/" + name).c_str()) == 0;
      count += is_ours && went;
    }
  }
  return count;
}

int shrink_cache(std::uint64_t most_bytes) {
  const std::string folder = cache_folder();
  std::vector<Candidate> files;
  std::uint64_t bytes = 0;
  int count = 0;
  for (const std::string& name : names_in(folder)) {
    const std::string path = folder + "/" + name;
    struct stat s {};
    if (!(is_kernel(name) || is_partial(name)) || lstat(path.c_str(), &s) != 0) continue;
    if (!S_ISREG(s.st_mode)) continue;
    if (is_partial(name) && s.st_mtime + kHour < std::time(nullptr)) {
      count += unlink(path.c_str()) == 0;  // the process that wrote it has been killed
    } else if (is_kernel(name)) {
      const auto size = std::uint64_t(s.st_size);
      files.push_back({path, size, size > kMostFileBytes ? 0 : s.st_mtime});  // useless ones first
      bytes += size;
    }
  }
  if (bytes <= most_bytes) return count;
  std::sort(files.begin(), files.end(),
            [](const Candidate& a, const Candidate& b) { return a.used < b.used; });
  for (const Candidate& file : files) {
    if (bytes <= most_bytes / 4 * 3) break;
    if (unlink(file.path.c_str()) != 0) continue;
    bytes -= file.bytes;
    ++count;
  }
  log_line("cache: " + std::to_string(count) + " files deleted, unused for the longest time");
  return count;
}

}  // namespace regard::cuda_backend
