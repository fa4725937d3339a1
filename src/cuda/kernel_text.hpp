// The texts of the kernels, and the few lines that make one kernel of them.
#pragma once

#include <string>
#include <vector>

#include "cuda/nvrtc.hpp"
#include "plan/cuda/kernel/kernel_config.h"

namespace regard::cuda_backend {

// A text within the library; cmake/embed_text.cmake writes the table.
struct EmbeddedText {
  const char* name;
  const char* text;
};
extern const EmbeddedText kEmbeddedTexts[];
extern const int kEmbeddedTextCount;

// What is compiled: the unit, which includes the headers, and nothing else.
struct KernelUnit {
  std::string text;
  std::vector<SourceText> headers;
};

inline constexpr const char* kKernelSymbol = "regard_kernel";

// From the embedded texts, or from REGARD_KERNEL_DIR (read again each time).
KernelUnit kernel_unit(const KernelConfig&);

}  // namespace regard::cuda_backend
