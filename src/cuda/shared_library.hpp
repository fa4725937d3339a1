// A library opened at run time; it stays open until the process ends.
#pragma once

#include <dlfcn.h>

#include <string>

namespace regard::cuda_backend {

class SharedLibrary {
 public:
  bool open(const std::string& path) {
    handle_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    return handle_ != nullptr;
  }
  bool is_open() const { return handle_ != nullptr; }

  // False, and `missing` names it, where the library has no such symbol.
  template <class Function>
  bool find(const char* symbol, Function& function, std::string& missing) const {
    function = reinterpret_cast<Function>(dlsym(handle_, symbol));
    if (!function && missing.empty()) missing = symbol;
    return function != nullptr;
  }

  // The file that the symbol came from.
  static std::string path_of(const void* symbol) {
    Dl_info info{};
    return dladdr(symbol, &info) && info.dli_fname ? info.dli_fname : "";
  }

 private:
  void* handle_ = nullptr;
};

}  // namespace regard::cuda_backend
