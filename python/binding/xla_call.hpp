// One call that XLA makes: its buffers as Arrays and its attributes as values, by name.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "array.hpp"
#include "xla_abi.hpp"

namespace regard::python::xla {

// All functions throw Error for a name that is missing or has another kind: then Python built the
// call wrongly, or this jaxlib has another interface.
class Call {
 public:
  explicit Call(const CallFrame& frame);

  const CallFrame& frame() const { return frame_; }

  std::string text(std::string_view name) const;
  std::int64_t integer(std::string_view name) const;
  double number(std::string_view name) const;
  bool has_number(std::string_view name) const;

  // The operand or result with that name; null if the call has none.
  const Buffer* buffer_if_any(const std::string& name) const;

  // As the library takes it; `device` holds its memory. Empty if the call has no such buffer.
  Array array_if_any(const std::string& name, int device) const;
  Array array(const std::string& name, int device) const;

 private:
  const void* attribute_if_any(std::string_view name, AttributeKind kind) const;
  const void* attribute(std::string_view name, AttributeKind kind) const;
  void add(const std::string& names, const Operands& buffers);

  const CallFrame& frame_;
  std::map<std::string, const Buffer*> buffers_;
  bool rows_first_ = false;  // (B, S, H, D)
};

}  // namespace regard::python::xla
