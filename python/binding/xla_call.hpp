// One call that XLA makes, by names: its buffers as Arrays, its attributes as values.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "array.hpp"
#include "xla_abi.hpp"

namespace regard::python::xla {

// All throw Error for a name that is missing or of another kind: a call that Python put together
// wrongly, or a jaxlib of another interface.
class Call {
 public:
  explicit Call(const CallFrame& frame);

  const CallFrame& frame() const { return frame_; }

  std::string text(std::string_view name) const;
  std::int64_t integer(std::string_view name) const;
  double number(std::string_view name) const;

  // The buffer of that name, operand or result; null where the call has none.
  const Buffer* buffer_if_any(const std::string& name) const;

  // As the library sees it; `device` is where its memory is. Empty where the call has none.
  Array array_if_any(const std::string& name, int device) const;
  Array array(const std::string& name, int device) const;

 private:
  const void* attribute(std::string_view name, AttributeKind kind) const;
  void add(const std::string& names, const Operands& buffers);

  const CallFrame& frame_;
  std::map<std::string, const Buffer*> buffers_;
  bool rows_first_ = false;  // (B, S, H, D)
};

}  // namespace regard::python::xla
