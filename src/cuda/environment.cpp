// Reads the environment; no other file of the CUDA backend does.
#include "cuda/environment.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <memory>

#include "cuda/trust.hpp"
#include "system/system.hpp"

namespace regard::cuda_backend {
namespace {

using system::variable;

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

// Libraries that the process has loaded may have NVRTC next to them. A relative name is skipped,
// because the working directory may have changed since.
void add_neighbours(std::vector<std::string>& folders) {
  for (const std::string& path : system::loaded_libraries()) {
    if (!path.starts_with('/')) continue;
    for (const std::string packages : {"/site-packages", "/dist-packages"}) {
      const std::size_t at = path.find(packages + "/");
      if (at != std::string::npos) add_packages(path.substr(0, at) + packages, folders);
    }
    if (path.find("/libcudart") != std::string::npos) folders.push_back(folder_of(path));
  }
}

// Where the program's own folder is prefix/bin, as Python's is; a program elsewhere has no prefix.
void add_prefix_of_program(std::vector<std::string>& folders) {
  const std::string folder = folder_of(system::program_file());
  if (folder.ends_with("/bin")) add_prefix(folder_of(folder), folders);
}

// "" where the variable is not set, or is no absolute path, which is noted.
std::string absolute_variable(const char* name, std::vector<std::string>& ignored) {
  std::string value = variable(name);
  if (value.empty() || value.starts_with('/')) return value;
  ignored.push_back(std::string(name) + " = \"" + printable(value) +
                    "\" is not used: it is not an absolute path");
  return "";
}

// Paths that the user has named for this very purpose may be relative. They stay so where there is
// no working directory.
std::string absolute(const std::string& path) {
  std::error_code failure;
  return path.empty() ? "" : std::filesystem::absolute(path, failure).string();
}

}  // namespace

std::string backend_variable() { return variable("REGARD_BACKEND"); }

std::string cache_folder() {
  if (std::string folder = variable("REGARD_CACHE_DIR"); !folder.empty()) return absolute(folder);
  // The specification of XDG asks that relative paths be ignored.
  if (std::string base = variable("XDG_CACHE_HOME"); base.starts_with('/')) return base + "/regard";
  if (std::string home = variable("HOME"); home.starts_with('/')) return home + "/.cache/regard";
  return "";
}

bool cache_folder_is_named() { return !variable("REGARD_CACHE_DIR").empty(); }

std::string kernel_folder() { return absolute(variable("REGARD_KERNEL_DIR")); }

std::vector<std::string> names_in(const std::string& folder) {
  struct Close {
    void operator()(DIR* directory) const { closedir(directory); }
  };
  std::vector<std::string> names;
  const std::unique_ptr<DIR, Close> directory(opendir(folder.c_str()));
  if (!directory) return names;
  while (const dirent* entry = readdir(directory.get())) names.emplace_back(entry->d_name);
  return names;
}

std::vector<std::string> entries_beginning_with(const std::string& folder,
                                                const std::string& prefix) {
  std::vector<std::string> found;
  for (const std::string& name : names_in(folder)) {
    if (name.starts_with(prefix)) found.push_back(folder + "/" + name);
  }
  std::sort(found.rbegin(), found.rend());  // newer versions first
  return found;
}

std::string folder_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? "" : path.substr(0, slash);
}

CompilerFolders compiler_folders() {
  std::vector<std::string> folders, ignored;
  add_neighbours(folders);
  for (const char* name : {"CUDA_HOME", "CUDA_PATH"}) {
    const std::string home = absolute_variable(name, ignored);
    if (!home.empty()) folders.push_back(home + "/lib64");
  }
  for (const std::string& toolkit : entries_beginning_with("/usr/local", "cuda")) {
    folders.push_back(toolkit + "/lib64");
  }
  for (const char* name : {"VIRTUAL_ENV", "CONDA_PREFIX"}) {
    const std::string prefix = absolute_variable(name, ignored);
    if (prefix.empty()) continue;
    add_prefix(prefix, folders);
    folders.push_back(prefix + "/lib");
  }
  add_prefix_of_program(folders);
  CompilerFolders found{.folders = {}, .ignored = std::move(ignored)};
  for (std::string& folder : folders) {
    const auto& known = found.folders;
    if (std::find(known.begin(), known.end(), folder) == known.end()) {
      found.folders.push_back(std::move(folder));
    }
  }
  return found;
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

const std::string& record_file() {
  static const auto* const file = new std::string(absolute(variable("REGARD_RECORD")));
  return *file;
}

bool stderr_is_terminal() { return isatty(STDERR_FILENO) != 0; }

void write_to_stderr(const std::string& text) {
  if (write(STDERR_FILENO, text.data(), text.size()) < 0) return;
}

}  // namespace regard::cuda_backend
