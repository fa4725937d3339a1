// Finds NVRTC, and compiles with it.
#include "cuda/nvrtc.hpp"

#include <algorithm>

#include "cuda/driver.hpp"
#include "cuda/environment.hpp"
#include "cuda/shared_library.hpp"
#include "cuda/trust.hpp"
#include "problem/refuse.hpp"

namespace regard::cuda_backend {

using Program = struct ProgramTag*;

// Signatures of NVRTC 12.0.
struct Nvrtc {
  int (*version)(int* major, int* minor);
  int (*architecture_count)(int*);
  int (*architectures)(int*);
  int (*create)(Program*, const char* text, const char* name, int headers,
                const char* const* header_texts, const char* const* header_names);
  int (*destroy)(Program*);
  int (*compile)(Program, int count, const char* const* options);
  int (*log_size)(Program, std::size_t*);
  int (*log)(Program, char*);
  int (*cubin_size)(Program, std::size_t*);
  int (*cubin)(Program, char*);
  int (*ptx_size)(Program, std::size_t*);
  int (*ptx)(Program, char*);
  const char* (*error_text)(int);
};

namespace {

constexpr const char* kHowToGetIt =
    "; `pip install \"nvidia-cuda-nvrtc==13.0.*\"` or NVIDIA's CUDA toolkit brings it";

std::string missing_function(const SharedLibrary& library, Nvrtc& n) {
  std::string missing;
  const auto find = [&](const char* symbol, auto& function) {
    library.find(symbol, function, missing);
  };
  find("nvrtcVersion", n.version);
  find("nvrtcGetNumSupportedArchs", n.architecture_count);
  find("nvrtcGetSupportedArchs", n.architectures);
  find("nvrtcCreateProgram", n.create);
  find("nvrtcDestroyProgram", n.destroy);
  find("nvrtcCompileProgram", n.compile);
  find("nvrtcGetProgramLogSize", n.log_size);
  find("nvrtcGetProgramLog", n.log);
  find("nvrtcGetCUBINSize", n.cubin_size);
  find("nvrtcGetCUBIN", n.cubin);
  find("nvrtcGetPTXSize", n.ptx_size);
  find("nvrtcGetPTX", n.ptx);
  find("nvrtcGetErrorString", n.error_text);
  return missing;
}

std::string text_from(int (*size_of)(Program, std::size_t*), int (*get)(Program, char*),
                      Program program) {
  std::size_t size = 0;
  if (size_of(program, &size) != 0 || size == 0) return "";
  std::string text(size, '\0');
  if (get(program, text.data()) != 0) return "";
  return text;
}

// A program of NVRTC, destroyed with this.
class OwnedProgram {
 public:
  OwnedProgram(const Nvrtc& n, Program program) : n_(n), program_(program) {}
  ~OwnedProgram() { n_.destroy(&program_); }
  OwnedProgram(const OwnedProgram&) = delete;
  OwnedProgram& operator=(const OwnedProgram&) = delete;

 private:
  const Nvrtc& n_;
  Program program_;
};

}  // namespace

// The search, once per process.
struct CompilerSearch {
  Compiler compiler;
  Nvrtc functions{};
  std::string why_not;
  std::vector<std::string> skipped;  // what was found but is not used, each a sentence

  // A driver runs kernels that a compiler of its own or an older major version has made.
  static std::vector<int> majors() {
    const int driver_major = driver_version() / 1000;
    return driver_major == 12 ? std::vector<int>{12, 13} : std::vector<int>{13, 12};
  }
  static std::string file_name(int major) { return "libnvrtc.so." + std::to_string(major); }
  static std::string builtins_name(int major) {
    return "libnvrtc-builtins.so." + std::to_string(major) + ".";
  }

  void skip(const std::string& path, const std::string& reason) {
    constexpr std::size_t kMost = 8;  // of names that anybody may have made up
    if (skipped.size() < kMost) skipped.push_back(printable(path) + " is not used: it " + reason);
  }

  // NVRTC opens its built-ins library by name: the one next to it, trusted or not, or none if its
  // folder is not on the loader's path.
  bool open_builtins(const std::string& folder, int major) {
    const auto files = entries_beginning_with(folder, builtins_name(major));
    for (const std::string& file : files) {
      if (const std::string fault = trusted_path(file).fault; !fault.empty()) {
        skip(file, printable(fault));
        return false;
      }
    }
    for (const std::string& file : files) {
      SharedLibrary builtins;
      builtins.open(file);
    }
    return true;
  }

  bool open_in(const std::string& folder, int major) {
    const std::string file = folder + "/" + file_name(major);
    const TrustedPath found = trusted_path(file);
    if (!found.exists) return false;
    if (!found.fault.empty()) {
      skip(file, printable(found.fault));
      return false;
    }
    return open_builtins(folder_of(found.path), major) && open(found.path);
  }

  bool open(const std::string& path) {
    SharedLibrary library;
    if (!library.open(path)) return false;
    if (const std::string missing = missing_function(library, functions); !missing.empty()) {
      why_not = path + " has no " + missing;
      return false;
    }
    int found_major = 0, minor = 0, count = 0;
    if (functions.version(&found_major, &minor) != 0 || found_major < 12) return false;
    if (functions.architecture_count(&count) != 0 || count < 0) return false;
    compiler.capabilities_.resize(std::size_t(count));
    if (functions.architectures(compiler.capabilities_.data()) != 0) return false;
    std::sort(compiler.capabilities_.begin(), compiler.capabilities_.end());
    compiler.functions_ = &functions;
    compiler.path_ = SharedLibrary::path_of(reinterpret_cast<const void*>(functions.version));
    compiler.name_ = "nvrtc" + std::to_string(found_major) + "." + std::to_string(minor);
    compiler.has_minimal_ = found_major > 12 || minor >= 8;
    return true;
  }

  bool find() {
    // Libraries that are loaded already and the loader's own path, of either version. The
    // environment and the system's configuration name them for this purpose, so that they need no
    // check.
    for (int major : majors()) {
      if (open(file_name(major))) return true;
    }
    CompilerFolders known = compiler_folders();
    skipped = std::move(known.ignored);
    for (int major : majors()) {
      for (const std::string& folder : known.folders) {
        if (open_in(folder, major)) return true;
      }
    }
    return false;
  }

  void run() {
    if (find()) return;
    if (why_not.empty()) why_not = "libnvrtc.so.13 or .12 was not found";
    for (const std::string& sentence : skipped) why_not += "; " + sentence;
    why_not += kHowToGetIt;
  }

  static const CompilerSearch& once() {
    static const CompilerSearch* const search = [] {
      auto* const made = new CompilerSearch;
      made->run();
      return made;
    }();
    return *search;
  }
};

const Compiler* Compiler::if_any() {
  const CompilerSearch& search = CompilerSearch::once();
  return search.compiler.functions_ ? &search.compiler : nullptr;
}

const std::string& Compiler::why_not() { return CompilerSearch::once().why_not; }

const std::vector<std::string>& Compiler::skipped() { return CompilerSearch::once().skipped; }

namespace {

// Chips of Tegra, whose machine code no other chip runs.
bool is_embedded(int capability) {
  return capability == 53 || capability == 62 || capability == 72 || capability == 87 ||
         capability == 101 || capability == 110;
}

}  // namespace

std::string Compiler::architecture(int capability, bool own_features) const {
  int same_major = 0, older = 0;
  for (int known : capabilities_) {
    if (known > capability) break;
    if (is_embedded(known) && known != capability) continue;
    older = known;
    if (known / 10 == capability / 10) same_major = known;
  }
  // Machine code runs on later chips of its major version; PTX on every later chip.
  if (same_major) {
    return "sm_" + std::to_string(same_major) +
           (own_features && same_major == capability ? "a" : "");
  }
  return older ? "compute_" + std::to_string(older) : "";
}

const std::vector<std::string>& Compiler::options() {
  static const auto* const options = new std::vector<std::string>{
      "--std=c++20", "--device-as-default-execution-space",
      "--diag-suppress=161",  // "#pragma GCC unroll", for the other compilers of the semantics
      "--ptxas-options=-v",   // registers and spills, into the log
  };
  return *options;
}

Compilation Compiler::compile(const std::string& unit, const std::vector<SourceText>& headers,
                              const std::string& architecture) const {
  const Nvrtc& n = *functions_;
  std::vector<const char*> texts, names;
  for (const SourceText& header : headers) {
    texts.push_back(header.text.c_str());
    names.push_back(header.name.c_str());
  }
  const std::string target = "--gpu-architecture=" + architecture;
  std::vector<const char*> flags = {target.c_str()};
  for (const std::string& option : options()) flags.push_back(option.c_str());
  if (has_minimal_) flags.push_back("--minimal");  // declares less: a few milliseconds
  Program program = nullptr;
  Compilation done;
  const auto failed = [&](const char* function, int result) {
    done.log += std::string(function) + ": " + n.error_text(result);
    return done;
  };
  if (const int result = n.create(&program, unit.c_str(), "regard_kernel.cu", int(headers.size()),
                                  texts.data(), names.data())) {
    return failed("nvrtcCreateProgram", result);
  }
  const OwnedProgram owned(n, program);
  const int result = n.compile(program, int(flags.size()), flags.data());
  done.log = text_from(n.log_size, n.log, program).c_str();
  if (result != 0) return failed("nvrtcCompileProgram", result);
  const bool is_binary = architecture.starts_with("sm_");
  done.image =
      is_binary ? text_from(n.cubin_size, n.cubin, program) : text_from(n.ptx_size, n.ptx, program);
  done.succeeded = !done.image.empty();
  if (!done.succeeded) done.log += "NVRTC made nothing for " + architecture;
  return done;
}

}  // namespace regard::cuda_backend
