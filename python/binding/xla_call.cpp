#include "xla_call.hpp"

#include <cstring>
#include <sstream>

namespace regard::python::xla {

namespace {

Type type_of(ElementType type) {
  switch (type) {
    case kF64:
      return Type::f64;
    case kF32:
      return Type::f32;
    case kF16:
      return Type::f16;
    case kBF16:
      return Type::bf16;
    case kPred:
      return Type::boolean;
    case kS32:
      return Type::i32;
    case kS64:
    case kU32:
      break;
  }
  return Type::none;
}

// Whether an array has the layout of q.
bool has_rows(const std::string& name) {
  for (const char* one : {"q", "k", "v", "out", "dout", "dq", "dk", "dv"}) {
    if (name == one) return true;
  }
  return false;
}

[[noreturn]] void refuse(std::string_view argument, const std::string& value,
                         const std::string& reason) {
  throw Error(Code::internal, std::string(argument), value, reason);
}

}  // namespace

Call::Call(const CallFrame& frame) : frame_(frame) {
  add(text("operands"), frame.operands);
  add(text("results"), frame.results);
  rows_first_ = text("layout") == "bshd" && !buffer_if_any("cu_seqlens_q");
}

void Call::add(const std::string& names, const Operands& buffers) {
  std::istringstream list(names);
  std::string name;
  std::int64_t index = 0;
  for (; list >> name; ++index) {
    if (index >= buffers.count || buffers.kinds[index] != kBuffer) {
      refuse(name, "none", "the call has no such buffer");
    }
    buffers_[name] = static_cast<const Buffer*>(buffers.values[index]);
  }
  if (index != buffers.count) {
    refuse("buffers", std::to_string(buffers.count), "must be as many as " + names);
  }
}

const void* Call::attribute_if_any(std::string_view name, AttributeKind kind) const {
  const Attributes& all = frame_.attributes;
  for (std::int64_t i = 0; i < all.count; ++i) {
    if (std::string_view(all.names[i]->data, all.names[i]->size) == name && all.kinds[i] == kind) {
      return all.values[i];
    }
  }
  return nullptr;
}

const void* Call::attribute(std::string_view name, AttributeKind kind) const {
  if (const void* found = attribute_if_any(name, kind)) return found;
  refuse(name, "none", "the call has no such attribute");
}

bool Call::has_number(std::string_view name) const { return attribute_if_any(name, kScalar); }

std::string Call::text(std::string_view name) const {
  const auto* found = static_cast<const Text*>(attribute(name, kString));
  return found->size > 0 ? std::string(found->data, found->size) : "";
}

std::int64_t Call::integer(std::string_view name) const {
  const auto* found = static_cast<const Scalar*>(attribute(name, kScalar));
  if (found->type != kS64) refuse(name, "a scalar", "must be a 64-bit integer");
  std::int64_t value = 0;
  std::memcpy(&value, found->value, sizeof value);
  return value;
}

double Call::number(std::string_view name) const {
  const auto* found = static_cast<const Scalar*>(attribute(name, kScalar));
  if (found->type != kF64) refuse(name, "a scalar", "must be a float64");
  double value = 0;
  std::memcpy(&value, found->value, sizeof value);
  return value;
}

const Buffer* Call::buffer_if_any(const std::string& name) const {
  const auto found = buffers_.find(name);
  return found == buffers_.end() ? nullptr : found->second;
}

Array Call::array_if_any(const std::string& name, int device) const {
  const Buffer* buffer = buffer_if_any(name);
  if (!buffer) return {};
  Array array{.device = device};
  Tensor& tensor = array.tensor;
  tensor.data = buffer->data;
  tensor.type = type_of(buffer->type);
  if (tensor.type == Type::none || buffer->rank < 0 || buffer->rank > Tensor::kMaxRank) {
    throw Error(Code::invalid_argument, name,
                "an array of " + std::to_string(buffer->rank) + " dimensions",
                "must have at most 4, of f64, f32, f16, bf16, bool or i32");
  }
  tensor.rank = static_cast<int>(buffer->rank);
  std::int64_t stride = 1;
  for (int axis = tensor.rank - 1; axis >= 0; --axis) {
    tensor.sizes[axis] = buffer->sizes[axis];
    tensor.strides[axis] = stride;
    if (buffer->sizes[axis] > 0) stride *= buffer->sizes[axis];
  }
  return rows_first_ && has_rows(name) ? swapped(array, 1, 2) : array;
}

Array Call::array(const std::string& name, int device) const {
  if (!buffer_if_any(name)) refuse(name, "none", "the call must have such an array");
  return array_if_any(name, device);
}

}  // namespace regard::python::xla
