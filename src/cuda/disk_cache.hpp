// Compiled kernels on disk: one file each, checked before it is used.
//
// The folder is private (0700) and trusted by trust.hpp. A file is written under another name and
// then renamed, so that nobody reads half of one. A file is used if it is a trusted regular file,
// if its checksum holds, and if it contains the very key that is looked for. Anything else counts
// as missing. If all files together take too much room, those that were not used for the longest
// time are deleted.
#pragma once

#include <string>
#include <vector>

#include "cuda/cache_file.hpp"

namespace regard::cuda_backend {

KernelKey kernel_key(const KernelConfig&, const KernelUnit&, const std::string& architecture,
                     const std::string& compiler);

bool load_kernel(const KernelKey&, KernelBinary&);
// Returns why the kernel was not kept: folder or file, and the reason; "" where it was.
std::string store_kernel(const KernelKey&, const KernelBinary&);

// Makes the folder where there is none; returns why there is no folder to write to, "" = there is.
std::string make_cache_folder();
// Why the folder is not used, or could not be made; "" where it is used, if only to read. Changes
// nothing.
std::string cache_fault();

std::vector<CacheEntry> cache_entries();
inline constexpr const char* kLockName = ".lock";  // kernel_lock.hpp
int clear_cache();                                 // how many files went

inline constexpr std::uint64_t kMostCacheBytes = std::uint64_t(1) << 30;
// If the files take more than this: deletes those unused for the longest time until a quarter of
// the room is free. Returns how many it deleted.
int shrink_cache(std::uint64_t most_bytes);

}  // namespace regard::cuda_backend
