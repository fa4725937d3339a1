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
  if (tensor.starts_with("cu_seqlens") || tensor.starts_with("seqused") ||
      tensor.ends_with("_spans") || tensor == "q_positions") {
    return held.type == i32 || held.int64 ? "" : must("int32 or int64", "np.int32");
  }
  const bool real = held.type == f64 || held.type == f32 || held.type == f16 || held.type == bf16;
  return real ? "" : must("float64, float32, float16 or bfloat16", "np.float32");
}

Array read_int64(const InputFile& file, std::uint64_t offset, const Sizes& sizes,
                 const std::string& field) {
  Array array(i32, sizes);
  std::vector<std::int64_t> wide(static_cast<std::size_t>(array.count()));
  file.read(offset, wide.data(), wide.size() * sizeof wide[0], field.c_str());
  for (Index n = 0; n < array.count(); ++n) {
    const std::int64_t value = wide[static_cast<std::size_t>(n)];
    if (value != static_cast<std::int32_t>(value)) {
      file.refuse(field, fmt::format("element {} is {}, which does not fit 32 bits", n, value));
    }
    array.as<std::int32_t>()[n] = static_cast<std::int32_t>(value);
  }
  return array;
}

}  // namespace regard::cli
