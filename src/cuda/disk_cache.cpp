// The format of a cached kernel, and everything that is checked about it.
#include "cuda/disk_cache.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string_view>

#include "cuda/environment.hpp"
#include "cuda/hash.hpp"
#include "plan/config_text.hpp"

namespace regard::cuda_backend {
namespace {

constexpr char kMagic[8] = {'R', 'e', 'g', 'a', 'r', 'd', 'K', '2'};
constexpr const char* kEnding = ".kernel";
constexpr std::uint64_t kMostBytes = 64 << 20;

// A file: this, then subject, compiler and image. `checksum` is of all that follows it.
struct Header {
  char magic[8];
  Hash checksum;
  std::uint64_t subject_bytes;
  std::uint64_t compiler_bytes;
  std::uint64_t image_bytes;
  KernelResources resources;
};
static_assert(sizeof(Header) == 72 && offsetof(Header, subject_bytes) == 24);

class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int descriptor() const { return descriptor_; }
  bool is_open() const { return descriptor_ >= 0; }

  bool read_all(std::string& text) const {
    std::size_t done = 0;
    while (done < text.size()) {
      const ssize_t got = read(descriptor_, text.data() + done, text.size() - done);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return false;
      done += got;
    }
    return true;
  }
  bool write_all(std::string_view text) const {
    while (!text.empty()) {
      const ssize_t put = write(descriptor_, text.data(), text.size());
      if (put < 0 && errno == EINTR) continue;
      if (put <= 0) return false;
      text.remove_prefix(put);
    }
    return true;
  }

 private:
  int descriptor_;
};

// Nobody but the user and root could have changed it.
const char* trust_fault(const struct stat& s) {
  if (s.st_uid != geteuid() && s.st_uid != 0) return "belongs to another user";
  if (s.st_mode & (S_IWGRP | S_IWOTH)) return "can be written by others";
  return nullptr;
}

const char* folder_fault(const std::string& folder) {
  struct stat s {};
  if (folder.empty()) return "neither REGARD_CACHE_DIR nor HOME says where it is";
  if (stat(folder.c_str(), &s) != 0) return "does not exist";
  if (!S_ISDIR(s.st_mode)) return "is no folder";
  return trust_fault(s);
}

bool make_folder(const std::string& folder) {
  for (std::size_t slash = 1; slash != std::string::npos;) {
    slash = folder.find('/', slash + 1);
    mkdir(folder.substr(0, slash).c_str(), 0700);  // most of them exist
  }
  return !folder_fault(folder);
}

std::string file_name(const KernelKey& key) {
  return hash_of(key.subject).text() + "-" + key.compiler + kEnding;
}

// Reads and checks a file; returns what is wrong with it.
const char* read_entry(const std::string& path, CacheEntry& entry) {
  const File file(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  if (!file.is_open()) return errno == ELOOP ? "is a symbolic link" : "cannot be opened";
  struct stat s {};
  if (fstat(file.descriptor(), &s) != 0 || !S_ISREG(s.st_mode)) return "is no regular file";
  if (const char* fault = trust_fault(s)) return fault;
  const std::uint64_t size = s.st_size;
  if (size < sizeof(Header) || size > kMostBytes) return "has an impossible size";
  std::string bytes(size, '\0');
  if (!file.read_all(bytes)) return "cannot be read";
  Header h;
  std::memcpy(&h, bytes.data(), sizeof h);
  if (std::memcmp(h.magic, kMagic, sizeof kMagic) != 0) return "is no kernel of this version";
  constexpr std::size_t kChecked = offsetof(Header, subject_bytes);
  if (h.checksum != hash_of(std::string_view(bytes).substr(kChecked))) return "is damaged";
  // Sizes below the most cannot overflow when added.
  const bool sane = h.subject_bytes <= size && h.compiler_bytes <= size && h.image_bytes <= size;
  if (!sane || sizeof h + h.subject_bytes + h.compiler_bytes + h.image_bytes != size) {
    return "contradicts itself";
  }
  std::size_t at = sizeof h;
  const auto take = [&](std::uint64_t count) {
    at += count;
    return bytes.substr(at - count, count);
  };
  entry.subject = take(h.subject_bytes);
  entry.compiler = take(h.compiler_bytes);
  entry.binary = {.image = take(h.image_bytes), .resources = h.resources};
  return nullptr;
}

std::vector<std::string> files_in(const std::string& folder, const std::string& prefix) {
  std::vector<std::string> paths;
  DIR* const directory = opendir(folder.c_str());
  if (!directory) return paths;
  while (const dirent* entry = readdir(directory)) {
    const std::string name = entry->d_name;
    const bool fits = name.ends_with(kEnding) && name.starts_with(prefix);
    if (fits && name.front() != '.') paths.push_back(folder + "/" + name);
  }
  closedir(directory);
  std::sort(paths.begin(), paths.end());
  return paths;
}

bool load_from(const std::string& path, const KernelKey& key, KernelBinary& binary) {
  CacheEntry entry;
  const char* fault = read_entry(path, entry);
  if (!fault &&
      (entry.subject != key.subject || (!key.compiler.empty() && entry.compiler != key.compiler))) {
    fault = "is of another kernel than its name says";
  }
  if (fault) {
    log_line("cache: " + path + " " + fault);
    return false;
  }
  binary = std::move(entry.binary);
  return true;
}

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
  if (const char* fault = folder_fault(folder)) {
    if (is_logging()) log_line("cache: " + folder + " " + fault);
    return false;
  }
  if (!key.compiler.empty()) {
    const std::string path = folder + "/" + file_name(key);
    return access(path.c_str(), F_OK) == 0 && load_from(path, key, binary);
  }
  for (const std::string& path : files_in(folder, hash_of(key.subject).text() + "-")) {
    if (load_from(path, key, binary)) return true;
  }
  return false;
}

void store_kernel(const KernelKey& key, const KernelBinary& binary) {
  static std::atomic<unsigned> counter{0};
  const std::string folder = cache_folder();
  if (folder.empty() || !make_folder(folder)) return;
  Header h{.magic = {},
           .checksum = {},
           .subject_bytes = key.subject.size(),
           .compiler_bytes = key.compiler.size(),
           .image_bytes = binary.image.size(),
           .resources = binary.resources};
  std::memcpy(h.magic, kMagic, sizeof kMagic);
  std::string bytes(reinterpret_cast<const char*>(&h), sizeof h);
  bytes += key.subject + key.compiler + binary.image;
  h.checksum = hash_of(std::string_view(bytes).substr(offsetof(Header, subject_bytes)));
  std::memcpy(bytes.data(), &h, sizeof h);

  const std::string name = file_name(key);
  const std::string temporary = folder + "/." + name + "." + std::to_string(getpid()) + "." +
                                std::to_string(counter.fetch_add(1)) + ".part";
  constexpr int kFlags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  bool written = false;
  {
    const File file(open(temporary.c_str(), kFlags, 0600));
    if (!file.is_open()) return;
    written = file.write_all(bytes) && fsync(file.descriptor()) == 0;
  }
  if (!written || rename(temporary.c_str(), (folder + "/" + name).c_str()) != 0) {
    unlink(temporary.c_str());
  }
}

std::vector<CacheEntry> cache_entries() {
  std::vector<CacheEntry> entries;
  const std::string folder = cache_folder();
  const char* const folder_is = folder_fault(folder);
  for (const std::string& path : files_in(folder, "")) {
    CacheEntry entry{.path = path, .subject = "", .compiler = "", .binary = {}, .fault = ""};
    const char* fault = read_entry(path, entry);
    if (!fault) fault = folder_is;
    if (fault) entry.fault = fault;
    entries.push_back(std::move(entry));
  }
  return entries;
}

int clear_cache() {
  const std::string folder = cache_folder();
  int count = 0;
  DIR* const directory = opendir(folder.c_str());
  if (!directory) return 0;
  while (const dirent* entry = readdir(directory)) {
    const std::string name = entry->d_name;
    const bool ours = name.ends_with(kEnding) || (name.front() == '.' && name.ends_with(".part") &&
                                                  name.find(kEnding) != std::string::npos);
    if (ours && unlinkat(dirfd(directory), entry->d_name, 0) == 0) ++count;
  }
  closedir(directory);
  return count;
}

}  // namespace regard::cuda_backend
