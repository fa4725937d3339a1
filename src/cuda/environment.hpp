// What the environment says to GPUs: the four variables that the library reads, and where the
// system keeps caches and libraries.
#pragma once

#include <string>
#include <vector>

namespace regard::cuda_backend {

std::string backend_variable();  // REGARD_BACKEND
std::string cache_folder();      // REGARD_CACHE_DIR, or the user's own; "" where there is none
std::string kernel_folder();     // REGARD_KERNEL_DIR: texts to be used instead of the embedded ones

// Folders in which NVRTC may lie, likeliest first: toolkits, pip packages.
std::vector<std::string> compiler_folders();

// One line to where REGARD_LOG says: "stderr", or a file. Costs a comparison where it is not set.
bool is_logging();
void log_line(const std::string& line);

}  // namespace regard::cuda_backend
