#include "torch_tensor.hpp"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

#include "direct_options.hpp"

namespace regard::python {

using torch_abi::Handle;
using torch_abi::Value;

torch_abi::Functions torch_functions;

bool load_torch(const std::string& path) {
  const auto found = torch_abi::functions_of(path);
  if (found) torch_functions = *found;
  return found.has_value();
}

void check(torch_abi::Status status, const char* what) {
  if (status != 0) throw std::runtime_error(std::string("PyTorch could not ") + what);
}

// ----------------------------------------------------------------------------------------- reading

Owned Owned::shared(Handle handle) {
  Handle made = nullptr;
  check(torch_functions.same(handle, &made), "share a tensor");
  return Owned(made);
}

Owned Owned::undefined() {
  Handle handle = nullptr;
  check(torch_functions.undefined(&handle), "make an undefined tensor");
  return Owned(handle);
}

bool Owned::is_defined() const {
  bool found = false;
  if (handle_) check(torch_functions.is_defined(handle_, &found), "read a tensor");
  return found;
}

void* Owned::data() const {
  void* data = nullptr;
  check(torch_functions.data(handle_, &data), "read a tensor");
  return data;
}

TorchDevice device_of(const Owned& x) {
  TorchDevice device;
  check(torch_functions.device_type(x.get(), &device.type), "read a tensor");
  check(torch_functions.device_index(x.get(), &device.index), "read a tensor");
  if (device.is_cpu()) device.index = 0;
  return device;
}

namespace {

// PyTorch's number of an element type; of bytes for others.
std::int32_t number_of(Type type) {
  switch (type) {
    case Type::bf16:
      return torch_functions.bf16();
    case Type::f16:
      return torch_functions.f16();
    case Type::f32:
      return torch_functions.f32();
    case Type::f64:
      return torch_functions.f64();
    default:
      return torch_functions.u8();
  }
}

}  // namespace

Tensor viewed(const char* argument, const Owned& x) {
  Tensor tensor;
  std::int64_t rank = 0, *sizes = nullptr, *strides = nullptr;
  std::int32_t number = 0;
  check(torch_functions.rank(x.get(), &rank), "read a tensor");
  if (rank > Tensor::kMaxRank) refuse(argument, "a tensor", "has too many dimensions");
  check(torch_functions.sizes(x.get(), &sizes), "read a tensor");
  check(torch_functions.strides(x.get(), &strides), "read a tensor");
  check(torch_functions.type(x.get(), &number), "read a tensor");
  for (const Type type : {Type::bf16, Type::f16, Type::f32, Type::f64}) {
    if (number == number_of(type)) tensor.type = type;
  }
  if (tensor.type == Type::none) refuse(argument, "a tensor", "has another element type");
  tensor.data = x.data();
  tensor.rank = static_cast<int>(rank);
  std::copy_n(sizes, rank, tensor.sizes.begin());
  std::copy_n(strides, rank, tensor.strides.begin());
  return tensor;
}

// ------------------------------------------------------------------------------------------ making

namespace {

Owned made(std::span<const std::int64_t> sizes, const std::int64_t* strides, Type type,
           TorchDevice device) {
  Handle handle = nullptr;
  check(torch_functions.empty(static_cast<std::int64_t>(sizes.size()), sizes.data(), strides,
                              number_of(type), device.type, device.index, &handle),
        "allocate a tensor");
  return Owned(handle);
}

}  // namespace

Owned bytes_of(std::size_t size, TorchDevice device) {
  const std::int64_t sizes = static_cast<std::int64_t>(size), stride = 1;
  return made({&sizes, 1}, &stride, Type::boolean, device);
}

void* TorchMemory::allocate(void* self, std::size_t size) {
  auto& memory = *static_cast<TorchMemory*>(self);
  memory.bytes_.emplace(bytes_of(size, memory.device_));
  return memory.bytes_->data();
}

Owned dense(std::span<const std::int64_t> sizes, Type type, TorchDevice device) {
  std::array<std::int64_t, Tensor::kMaxRank> strides{};
  std::int64_t stride = 1;
  for (std::size_t i = sizes.size(); i-- > 0; stride *= std::max<std::int64_t>(sizes[i], 1)) {
    strides[i] = stride;
  }
  return made(sizes, strides.data(), type, device);
}

Owned rows_like(const Tensor& like, std::int64_t size, TorchDevice device) {
  const auto rank = static_cast<std::size_t>(like.rank);
  std::array<std::int64_t, Tensor::kMaxRank> sizes = like.sizes, strides{};
  std::array<std::size_t, Tensor::kMaxRank> order{};
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.begin() + like.rank - 1,
                   [&](std::size_t a, std::size_t b) { return like.strides[a] > like.strides[b]; });
  sizes[rank - 1] = size;
  std::int64_t stride = 1;
  for (std::size_t i = rank; i-- > 0;) {
    strides[order[i]] = stride;
    stride *= std::max<std::int64_t>(sizes[order[i]], 1);
  }
  return made({sizes.data(), rank}, strides.data(), like.type, device);
}

Owned contiguous(Owned x) {
  std::array<Value, 2> stack = {x.released(), static_cast<Value>(torch_functions.contiguous())};
  check(torch_functions.call("aten::contiguous", "", stack.data(), torch_abi::kVersion),
        "copy a tensor");
  return Owned(stack[0]);
}

// --------------------------------------------------------------------------- an operator's
// arguments

Value taken_optional(Value value) {
  auto* const given = reinterpret_cast<Value*>(value);
  if (!given) return 0;
  const Value content = *given;
  delete given;
  return content;
}

std::array<bool, 4> taken_flags(Value value) {
  auto* const list = reinterpret_cast<torch_abi::ListObject*>(value);
  std::array<bool, 4> flags{};
  torch_abi::Status status = 0;
  for (std::size_t i = 0; i < flags.size(); ++i) {
    Value flag = 0;
    status |= torch_functions.list_item(list, i, &flag);
    flags[i] = flag & 1;
  }
  torch_functions.destroy_list(list);
  check(status, "read a list");
  return flags;
}

}  // namespace regard::python
