// A KernelConfig as designated initialisers, in the order of its members; what equals a default is
// left out.
#include "plan/cuda/config_text.hpp"

#include <iterator>
#include <string_view>

#include "plan/cuda/config_members.hpp"

namespace regard {
namespace {

constexpr const char* kKernels[kKernelCount] = {
    "forward",        "combine",       "delta",   "backward",      "key_gradient",
    "query_gradient", "bias_gradient", "finish",  "sink_gradient", "split_f32",
    "copy_inputs",    "combine_dkv",   "row_map", "key_map",       "write_rows"};
static_assert(int(Kernel::write_rows) + 1 == kKernelCount);

const char* type_of(Kernel) { return "Kernel"; }
const char* type_of(Family) { return "Family"; }
const char* type_of(Products) { return "Products"; }
const char* type_of(BiasGradient) { return "BiasGradient"; }
const char* type_of(Type) { return "Type"; }
const char* enumerator(Type type) {
  constexpr const char* names[] = {"none", "f64", "f32", "f16", "bf16", "boolean", "i32"};
  static_assert(std::size(names) == kTypeCount);
  return names[int(type)];
}
template <class Enum>
const char* enumerator(Enum value) {
  return name_of(value);
}

bool is_always_named(const std::string_view member) {
  return member == "kernel" || member == "family" || member == "level";
}

template <class Value>
std::string text_of(const Value& value) {
  if constexpr (std::is_same_v<Value, bool>) {
    return value ? "true" : "false";
  } else if constexpr (std::is_enum_v<Value>) {
    return std::string("regard::") + type_of(value) + "::" + enumerator(value);
  } else if constexpr (std::is_integral_v<Value>) {
    return std::to_string(value);
  } else {
    std::string text = std::string("regard::") + Listed<Value>::kName + "{";
    const std::size_t empty = text.size();
    const auto add = [&](const auto& member) {
      static constexpr Value kStandard;
      const bool always = std::is_same_v<Value, KernelConfig> && is_always_named(member.name);
      if (!always && value.*member.value == kStandard.*member.value) return;
      text.append(text.size() > empty ? ", ." : ".").append(member.name).append(" = ");
      text += text_of(value.*member.value);
    };
    std::apply([&](const auto&... member) { (add(member), ...); }, Listed<Value>::kMembers);
    return text + "}";
  }
}

}  // namespace

const char* name_of(Kernel kernel) { return kKernels[int(kernel)]; }
const char* name_of(Family family) {
  constexpr const char* names[] = {"simt", "mma", "wgmma"};
  return names[int(family)];
}
const char* name_of(Products products) {
  constexpr const char* names[] = {"direct", "tf32x3", "tf32", "f16x3"};
  return names[int(products)];
}
const char* name_of(BiasGradient bias_gradient) {
  constexpr const char* names[] = {"none", "store", "add", "add_to_row", "add_to_column"};
  return names[int(bias_gradient)];
}

std::string to_text(const KernelConfig& config) { return text_of(config); }

}  // namespace regard
