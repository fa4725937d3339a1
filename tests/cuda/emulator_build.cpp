// Calls the C++ compiler, and opens what it made.
#include "tests/cuda/emulator_build.hpp"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>

namespace regard::emulated {

namespace files = std::filesystem;

std::string setting(const char* variable, const std::string& otherwise) {
  const char* const value = std::getenv(variable);
  return value && *value ? value : otherwise;
}

std::string content(const files::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

files::path source_folder() { return setting("REGARD_EMULATOR_SOURCE", REGARD_SOURCE_DIR); }

#if defined(__SANITIZE_ADDRESS__)
constexpr char kSanitizer[] = " -fsanitize=address -fno-omit-frame-pointer";
#else
constexpr char kSanitizer[] = "";
#endif

std::string compiler_command(const std::vector<files::path>& folders) {
  // Variables without a value begin with a pattern, as registers hold anything. Most kernels run
  // once: they take longer to optimise than to run. Of all libraries they call libm alone.
  const std::string flags = setting("REGARD_EMULATOR_FLAGS",
                                    "-O0 -g1 -w -fno-exceptions -ftrivial-auto-var-init=pattern");
  std::string command = setting("REGARD_EMULATOR_CXX", "g++") + " -std=c++20 " + flags +
                        kSanitizer + " -shared -nostdlib -fPIC -I" +
                        (source_folder() / "tests/cuda/machine").string();
  for (const files::path& folder : folders) command += " -I" + folder.string();
  return command;
}

void build_kernel(const std::string& unit, const std::string& command, const files::path& to) {
  static std::atomic<int> count{0};
  const std::string stem =
      to.string() + "." + std::to_string(getpid()) + "." + std::to_string(++count);
  std::ofstream(stem + ".cpp") << unit;
  const std::string line = command + " " + stem + ".cpp -o " + stem + ".so -lm 2>" + stem + ".txt";
  const int status = std::system(line.c_str());
  const std::string said = content(stem + ".txt");
  files::remove(stem + ".txt");
  files::remove(stem + ".cpp");
  if (status != 0) throw std::runtime_error(line + "\n" + unit + "\n" + said.substr(0, 20000));
  files::rename(stem + ".so", to);
}

KernelEntry load_kernel(const files::path& path, Machine& machine, const std::string& symbol) {
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) throw std::runtime_error(dlerror());
  KernelEntry entry{.function = dlsym(library, symbol.c_str()),
                    .takes_maps = dlsym(library, "regard_emulated_maps") != nullptr};
  auto* const slot = static_cast<Machine**>(dlsym(library, "regard_emulated_machine"));
  const auto* const cluster = static_cast<const int*>(dlsym(library, "regard_emulated_cluster"));
  if (!entry.function || !slot || !cluster)
    throw std::runtime_error(path.string() + " is not a kernel");
  *slot = &machine;
  entry.cluster = *cluster;
  return entry;
}

}  // namespace regard::emulated
