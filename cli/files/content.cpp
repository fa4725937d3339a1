// One rule for both kinds of files.
#include "files/content.hpp"

#include <fmt/core.h>

namespace regard::cli {

std::string content_fault(const std::string& tensor, const Held& held) {
  const auto must = [&](const char* types, const char* conversion) {
    return fmt::format("{} holds {}, but must hold {}: save {}.astype({})", tensor, held.name,
                       types, tensor, conversion);
  };
  if (tensor == "mask") return held.type == boolean ? "" : must("bool", "bool");
  if (tensor.starts_with("cu_seqlens") || tensor.starts_with("seqused")) {
    return held.type == i32 || held.int64 ? "" : must("int32 or int64", "np.int32");
  }
  const bool real = held.type == f64 || held.type == f32 || held.type == f16 || held.type == bf16;
  return real ? "" : must("float64, float32, float16 or bfloat16", "np.float32");
}

}  // namespace regard::cli
