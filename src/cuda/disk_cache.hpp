// Compiled kernels on disk: one file each, which is checked before it is believed.
//
// The folder belongs to the user alone (0700). A file is written beside its place and renamed, so
// that nobody reads half of one. A file is used if it is a regular file of the user (or of root,
// who may have installed it), that nobody else may write, whose checksum holds, and whose key is,
// letter for letter, the one that is looked for. Anything else is as if it were not there.
#pragma once

#include <string>
#include <vector>

#include "cuda/jit.hpp"

namespace regard::cuda_backend {

struct KernelKey {
  std::string subject;   // config, chip, options, hash of the texts: one a line
  std::string compiler;  // "nvrtc13.0"; empty: whichever made it
};

KernelKey kernel_key(const KernelConfig&, const KernelUnit&, const std::string& architecture,
                     const std::string& compiler);

bool load_kernel(const KernelKey&, KernelBinary&);
void store_kernel(const KernelKey&, const KernelBinary&);  // or not: a cache may fail

struct CacheEntry {
  std::string path;
  std::string subject;
  std::string compiler;
  KernelBinary binary;
  std::string fault;  // why it is not used; empty where it would be
};
std::vector<CacheEntry> cache_entries();
int clear_cache();  // how many files went

}  // namespace regard::cuda_backend
