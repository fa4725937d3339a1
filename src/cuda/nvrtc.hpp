// NVRTC, the run-time compiler, opened at run time.
#pragma once

#include <string>
#include <vector>

namespace regard::cuda_backend {

struct SourceText {
  std::string name;  // as #include says it
  std::string text;
};

struct Compilation {
  bool succeeded = false;
  std::string image;  // a cubin, or PTX where the compiler does not know the chip
  std::string log;
};

struct Nvrtc;  // the functions

class Compiler {
 public:
  // Found and opened at the first call; null where there is none.
  static const Compiler* if_any();
  static const std::string& why_not();  // and how to get it
  // Files and variables that the search has met but does not trust, and why, each a sentence.
  static const std::vector<std::string>& skipped();

  const std::string& path() const { return path_; }
  const std::string& name() const { return name_; }  // "nvrtc13.0"

  // The architecture to compile for, for a GPU of this compute capability: "sm_86", or "compute_90"
  // if the GPU is newer than the compiler, or "" if it is older than every architecture that the
  // compiler knows. Kernels of `own_features` run on chips of this very capability only: "sm_90a".
  std::string architecture(int capability, bool own_features = false) const;

  Compilation compile(const std::string& unit, const std::vector<SourceText>& headers,
                      const std::string& architecture) const;

  // The options of every compilation; a part of what names a kernel.
  static const std::vector<std::string>& options();

 private:
  friend struct CompilerSearch;
  const Nvrtc* functions_ = nullptr;
  std::string path_;
  std::string name_;
  std::vector<int> capabilities_;  // ascending
  bool has_minimal_ = false;
};

}  // namespace regard::cuda_backend
