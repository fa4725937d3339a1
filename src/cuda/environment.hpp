// What the environment says about GPUs: the variables that the library reads, and where the
// system keeps caches and libraries.
#pragma once

#include <string>
#include <vector>

namespace regard::cuda_backend {

std::string backend_variable();  // REGARD_BACKEND
std::string cache_folder();      // REGARD_CACHE_DIR, or the user's own; "" where there is none
bool cache_folder_is_named();    // by REGARD_CACHE_DIR
std::string kernel_folder();     // REGARD_KERNEL_DIR: texts to be used instead of the embedded ones

// Folders in which NVRTC may lie, likeliest first: next to libraries that the process has loaded,
// in toolkits, in Python's packages. None of them is checked yet.
struct CompilerFolders {
  std::vector<std::string> folders;  // absolute, each once
  std::vector<std::string> ignored;  // variables that name no absolute folder, each a sentence
};
CompilerFolders compiler_folders();

std::string folder_of(const std::string& path);                // "" where there is no slash
std::vector<std::string> names_in(const std::string& folder);  // none where it cannot be read
// Full paths of a folder's entries that begin so; newer versions first.
std::vector<std::string> entries_beginning_with(const std::string& folder,
                                                const std::string& prefix);

// One line to where REGARD_LOG says: "stderr", or a file. Costs a comparison where it is not set.
bool is_logging();
void log_line(const std::string& line);

// The file that REGARD_RECORD names, absolute; "" where it is not set.
const std::string& record_file();

bool stderr_is_terminal();
void write_to_stderr(const std::string& text);  // which may fail

}  // namespace regard::cuda_backend
