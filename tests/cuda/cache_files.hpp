// Files of a kernel cache, and other processes, for tests.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "tests/cuda/fake.hpp"

namespace regard::tests {

inline std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void write(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

inline std::vector<std::string> files_of(const EmptyCache& cache) {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(cache.folder())) {
    if (entry.path().extension() == ".kernel") paths.push_back(entry.path());
  }
  return paths;
}

// Runs in a child process and returns the exit status.
template <class Task>
int in_child(const Task& task) {
  const pid_t child = fork();
  if (child == 0) _exit(task());
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace regard::tests
