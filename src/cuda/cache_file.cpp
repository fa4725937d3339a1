// Reads and writes one compiled kernel.
#include "cuda/cache_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <string_view>

#include "cuda/hash.hpp"
#include "cuda/trust.hpp"

namespace regard::cuda_backend {
namespace {

constexpr char kMagic[8] = {'R', 'e', 'g', 'a', 'r', 'd', 'K', '2'};
constexpr std::size_t kPiece = 64 << 10;

// A file: this, then subject, compiler and image. `checksum` is of all that follows it.
struct Header {
  char magic[8];
  Hash checksum;
  std::uint64_t subject_bytes;
  std::uint64_t compiler_bytes;
  std::uint64_t image_bytes;
  KernelResources resources;
};
constexpr std::size_t kChecked = offsetof(Header, subject_bytes);
static_assert(sizeof(Header) == 72 && kChecked == 24);

std::string_view bytes_of(const Header& h) { return {reinterpret_cast<const char*>(&h), sizeof h}; }

class File {
 public:
  File(const std::string& path, int flags, mode_t mode = 0)
      : descriptor_(open(path.c_str(), flags | O_NOFOLLOW | O_CLOEXEC, mode)) {}
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int descriptor() const { return descriptor_; }
  bool is_open() const { return descriptor_ >= 0; }

  bool read_all(void* to, std::size_t count) const {
    auto* at = static_cast<char*>(to);
    while (count > 0) {
      const ssize_t got = read(descriptor_, at, count);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return false;
      at += got;
      count -= std::size_t(got);
    }
    return true;
  }
  bool write_all(std::string_view text) const {
    while (!text.empty()) {
      const ssize_t put = write(descriptor_, text.data(), text.size());
      if (put < 0 && errno == EINTR) continue;
      if (put <= 0) return false;
      text.remove_prefix(std::size_t(put));
    }
    return true;
  }

 private:
  int descriptor_;
};

// The header and the bytes that it announces, hashed on the way.
class Reader {
 public:
  explicit Reader(const File& file) : file_(file) {}

  std::string read_header(Header& h, std::uint64_t size) {
    if (!file_.read_all(&h, sizeof h)) return "cannot be read";
    if (std::memcmp(h.magic, kMagic, sizeof kMagic) != 0) return "is no kernel of this version";
    hasher_.add(bytes_of(h).substr(kChecked));
    // Sizes below the most cannot overflow when added.
    const bool sane = h.subject_bytes <= size && h.compiler_bytes <= size && h.image_bytes <= size;
    if (!sane || sizeof h + h.subject_bytes + h.compiler_bytes + h.image_bytes != size) {
      return "contradicts itself";
    }
    return "";
  }

  // Appends to the text where there is one.
  bool take(std::uint64_t count, std::string* text) {
    std::string piece;
    while (count > 0) {
      piece.resize(std::min<std::uint64_t>(count, kPiece));
      if (!file_.read_all(piece.data(), piece.size())) return false;
      hasher_.add(piece);
      if (text) *text += piece;
      count -= piece.size();
    }
    return true;
  }

  Hash checksum() { return hasher_.end(); }

 private:
  const File& file_;
  Hasher hasher_;
};

std::string read_checked(const std::string& path, CacheEntry& entry, std::string* image) {
  const File file(path, O_RDONLY | O_NONBLOCK);
  if (!file.is_open()) return errno == ELOOP ? "is a symbolic link" : "cannot be opened";
  struct stat s {};
  if (fstat(file.descriptor(), &s) != 0 || !S_ISREG(s.st_mode)) return "is no regular file";
  if (std::string fault = trust_fault(file.descriptor()); !fault.empty()) return fault;
  const auto size = std::uint64_t(s.st_size);
  if (size < sizeof(Header) || size > kMostFileBytes) return "has an impossible size";
  Header h;
  Reader reader(file);
  if (std::string fault = reader.read_header(h, size); !fault.empty()) return fault;
  if (!reader.take(h.subject_bytes, &entry.key.subject) ||
      !reader.take(h.compiler_bytes, &entry.key.compiler) || !reader.take(h.image_bytes, image)) {
    return "cannot be read";
  }
  if (h.checksum != reader.checksum()) return "is damaged";
  entry.image_bytes = h.image_bytes;
  entry.resources = h.resources;
  const std::string name = path.substr(path.rfind('/') + 1);
  return name == file_name(entry.key) ? "" : "is of another kernel than its name says";
}

}  // namespace

std::string file_name(const KernelKey& key) {
  return hash_of(key.subject).text() + "-" + key.compiler + kKernelEnding;
}

CacheEntry read_entry(const std::string& path, std::string* image) {
  CacheEntry entry{.path = path, .key = {}, .image_bytes = 0, .resources = {}, .fault = ""};
  entry.fault = read_checked(path, entry, image);
  return entry;
}

std::string write_entry(const std::string& path, const KernelKey& key, const KernelBinary& binary) {
  Header h{.magic = {},
           .checksum = {},
           .subject_bytes = key.subject.size(),
           .compiler_bytes = key.compiler.size(),
           .image_bytes = binary.image.size(),
           .resources = binary.resources};
  std::memcpy(h.magic, kMagic, sizeof kMagic);
  const std::string content = key.subject + key.compiler + binary.image;
  Hasher hasher;
  hasher.add(bytes_of(h).substr(kChecked));
  hasher.add(content);
  h.checksum = hasher.end();
  const File file(path, O_WRONLY | O_CREAT | O_EXCL, 0600);
  if (file.is_open() && file.write_all(bytes_of(h)) && file.write_all(content) &&
      fsync(file.descriptor()) == 0) {
    return "";
  }
  std::string reason = std::strerror(errno);
  if (file.is_open()) unlink(path.c_str());
  return reason;
}

}  // namespace regard::cuda_backend
