// The format of a compiled kernel on disk, and everything that is checked about one file.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/jit.hpp"

namespace regard::cuda_backend {

struct KernelKey {
  std::string subject;   // config, chip, options, hash of the texts: one a line
  std::string compiler;  // "nvrtc13.0"; empty: whichever made it
};

inline constexpr const char* kKernelEnding = ".kernel";
inline constexpr std::uint64_t kMostFileBytes = 64 << 20;
std::string file_name(const KernelKey&);

struct CacheEntry {
  std::string path;
  KernelKey key;
  std::uint64_t image_bytes = 0;
  KernelResources resources;
  std::string fault;  // why it is not used; empty where it would be
};

// Reads all of the file in pieces. The image is kept where `image` is not null.
CacheEntry read_entry(const std::string& path, std::string* image = nullptr);

// Writes a file that does not exist yet; returns why it could not. What is left then is removed.
std::string write_entry(const std::string& path, const KernelKey&, const KernelBinary&);

}  // namespace regard::cuda_backend
