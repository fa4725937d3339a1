// Reads the environment; no other file of the CUDA backend does.
#include "cuda/environment.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

namespace regard::cuda_backend {
namespace {

// A program with more rights than its caller's does not follow the caller's environment.
std::string variable(const char* name) {
  const char* const value = secure_getenv(name);
  return value ? value : "";
}

std::vector<std::string> entries_beginning_with(const std::string& folder,
                                                const std::string& prefix) {
  std::vector<std::string> found;
  DIR* const directory = opendir(folder.c_str());
  if (!directory) return found;
  while (const dirent* entry = readdir(directory)) {
    const std::string name = entry->d_name;
    if (name.starts_with(prefix)) found.push_back(folder + "/" + name);
  }
  closedir(directory);
  std::sort(found.rbegin(), found.rend());  // newer versions first
  return found;
}

// Where pip puts NVRTC below a site-packages folder.
void add_packages(const std::string& site_packages, std::vector<std::string>& folders) {
  for (const std::string& toolkit : entries_beginning_with(site_packages + "/nvidia", "cu")) {
    folders.push_back(toolkit + "/lib");  // nvidia/cu13/lib, nvidia/cuda_nvrtc/lib
  }
}

// prefix/lib/python3.*/site-packages
void add_prefix(const std::string& prefix, std::vector<std::string>& folders) {
  for (const std::string& python : entries_beginning_with(prefix + "/lib", "python3")) {
    add_packages(python + "/site-packages", folders);
    add_packages(python + "/dist-packages", folders);
  }
}

std::string folder_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? "" : path.substr(0, slash);
}

// Libraries that the process has already loaded have brought their own NVRTC beside them.
int add_neighbours(dl_phdr_info* info, std::size_t, void* list) {
  auto& folders = *static_cast<std::vector<std::string>*>(list);
  const std::string path = info->dlpi_name ? info->dlpi_name : "";
  const std::size_t packages = path.find("site-packages/");
  if (packages != std::string::npos) {
    folders.push_back(path.substr(0, packages) + "site-packages");
  } else if (path.find("/libcudart") != std::string::npos) {
    folders.push_back(folder_of(path));
  }
  return 0;
}

}  // namespace

std::string backend_variable() { return variable("REGARD_BACKEND"); }

std::string cache_folder() {
  if (std::string folder = variable("REGARD_CACHE_DIR"); !folder.empty()) return folder;
  // The specification of XDG asks that relative paths be ignored.
  if (std::string base = variable("XDG_CACHE_HOME"); base.starts_with('/')) return base + "/regard";
  if (std::string home = variable("HOME"); home.starts_with('/')) return home + "/.cache/regard";
  return "";
}

std::string kernel_folder() { return variable("REGARD_KERNEL_DIR"); }

std::vector<std::string> compiler_folders() {
  std::vector<std::string> folders;
  std::vector<std::string> neighbours;
  dl_iterate_phdr(add_neighbours, &neighbours);
  for (const std::string& neighbour : neighbours) {
    if (neighbour.ends_with("site-packages")) {
      add_packages(neighbour, folders);
    } else {
      folders.push_back(neighbour);
    }
  }
  for (const char* name : {"VIRTUAL_ENV", "CONDA_PREFIX"}) {
    if (const std::string prefix = variable(name); !prefix.empty()) {
      add_prefix(prefix, folders);
      folders.push_back(prefix + "/lib");
    }
  }
  char self[4096];
  const ssize_t length = readlink("/proc/self/exe", self, sizeof self);
  if (length > 0) add_prefix(folder_of(folder_of(std::string(self, length))), folders);
  for (const char* name : {"CUDA_HOME", "CUDA_PATH"}) {
    if (const std::string home = variable(name); !home.empty()) folders.push_back(home + "/lib64");
  }
  for (const std::string& toolkit : entries_beginning_with("/usr/local", "cuda")) {
    folders.push_back(toolkit + "/lib64");
  }
  std::vector<std::string> unique;
  for (std::string& folder : folders) {
    if (std::find(unique.begin(), unique.end(), folder) == unique.end()) {
      unique.push_back(std::move(folder));
    }
  }
  return unique;
}

bool is_logging() {
  static const bool logging = !variable("REGARD_LOG").empty();
  return logging;
}

void log_line(const std::string& line) {
  if (!is_logging()) return;
  static const int file = [] {
    const std::string path = variable("REGARD_LOG");
    if (path == "stderr") return STDERR_FILENO;
    return open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  }();
  const std::string text = "regard: " + line + "\n";
  if (file >= 0 && write(file, text.data(), text.size()) < 0) return;  // a log may fail
}

}  // namespace regard::cuda_backend
