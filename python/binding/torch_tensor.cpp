#include "torch_tensor.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>
#include <stdexcept>
#include <string>

#include "direct_options.hpp"

namespace regard::python {

namespace nb = nanobind;

using torch_abi::Handle;
using torch_abi::Value;

torch_abi::Functions torch_functions;

namespace {

// Where objects of the classes Tensor and Parameter hold their tensor, an address; in bytes.
std::ptrdiff_t offset_in_objects = 0;

const void* address_at(const void* memory) {
  const void* address = nullptr;
  std::memcpy(&address, memory, sizeof(address));
  return address;
}

// Found by the attribute _cdata, which is that address. PyTorch has had it first or second in an
// object, and nothing of an object is read that every tensor's object does not have.
bool find_offset(nb::handle example) {
  const auto address = nb::cast<std::uintptr_t>(example.attr("_cdata"));
  const auto* const object = reinterpret_cast<const char*>(example.ptr());
  for (std::size_t i = 0; i < 2; ++i) {
    const std::size_t offset = sizeof(PyObject) + i * sizeof(void*);
    if (address_at(object + offset) != reinterpret_cast<const void*>(address)) continue;
    offset_in_objects = static_cast<std::ptrdiff_t>(offset);
    return true;
  }
  return false;
}

}  // namespace

bool load_torch(const std::string& path, nb::handle example) {
  const auto found = torch_abi::functions_of(path);
  if (!found || !find_offset(example)) return false;
  torch_functions = *found;
  return true;
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

Handle handle_of(nb::handle x) {
  return reinterpret_cast<Handle>(reinterpret_cast<char*>(x.ptr()) + offset_in_objects);
}

std::int32_t device_type_of(nb::handle x) {
  std::int32_t type = 0;
  check(torch_functions.device_type(handle_of(x), &type), "read a tensor");
  return type;
}

bool is_neg(nb::handle x) { return torch_functions.is_neg(handle_of(x)); }

bool requires_grad(nb::handle x) { return torch_functions.requires_grad(address_at(handle_of(x))); }

nb::object object_of(const Owned& x) {
  void* const object = torch_functions.to_object(x.get());
  if (!object) throw nb::python_error();
  return nb::steal(static_cast<PyObject*>(object));
}

int thread_count() {
  std::uint32_t count = 0;
  check(torch_functions.num_threads(&count), "count its threads");
  return static_cast<int>(count);
}

TorchDevice device_of(const Owned& x) {
  TorchDevice device;
  check(torch_functions.device_type(x.get(), &device.type), "read a tensor");
  if (!device.is_cpu()) {
    check(torch_functions.device_index(x.get(), &device.index), "read a tensor");
  }
  return device;
}

namespace {

constexpr std::array kTypes = {Type::f32, Type::bf16, Type::f16, Type::f64};

// PyTorch's numbers of these types.
const std::array<std::int32_t, kTypes.size()>& type_numbers() {
  static const std::array numbers = {torch_functions.f32(), torch_functions.bf16(),
                                     torch_functions.f16(), torch_functions.f64()};
  return numbers;
}

Type type_of(std::int32_t number) {
  const auto& numbers = type_numbers();
  const auto found = std::find(numbers.begin(), numbers.end(), number);
  return found == numbers.end() ? Type::none
                                : kTypes[static_cast<std::size_t>(found - numbers.begin())];
}

// Of bytes for other types.
std::int32_t number_of(Type type) {
  const auto found = std::find(kTypes.begin(), kTypes.end(), type);
  return found == kTypes.end() ? torch_functions.u8()
                               : type_numbers()[static_cast<std::size_t>(found - kTypes.begin())];
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
  tensor.type = type_of(number);
  if (tensor.type == Type::none) refuse(argument, "a tensor", "has another element type");
  tensor.data = x.data();
  tensor.rank = static_cast<int>(rank);
  std::copy_n(sizes, rank, tensor.sizes.begin());
  std::copy_n(strides, rank, tensor.strides.begin());
  return tensor;
}

// ------------------------------------------------------------------------------------------ making

namespace {

Made made(std::span<const std::int64_t> sizes, const std::int64_t* strides, Type type,
          TorchDevice device) {
  Handle handle = nullptr;
  const auto status =
      torch_functions.empty(static_cast<std::int64_t>(sizes.size()), sizes.data(), strides,
                            number_of(type), device.type, device.index, &handle);
  // The general path then raises PyTorch's own error, which says how much memory was asked for.
  if (status != 0) refuse("q", "a tensor", "PyTorch could not allocate memory for its call");
  Made made{.owner = Owned(handle), .view = {}};
  made.view.data = made.owner.data();
  made.view.type = type;
  made.view.rank = static_cast<int>(sizes.size());
  std::copy_n(sizes.data(), sizes.size(), made.view.sizes.begin());
  std::copy_n(strides, sizes.size(), made.view.strides.begin());
  return made;
}

}  // namespace

Owned bytes_of(std::size_t size, TorchDevice device) {
  const std::int64_t sizes = static_cast<std::int64_t>(size), stride = 1;
  return made({&sizes, 1}, &stride, Type::boolean, device).owner;
}

thread_local TorchMemory::Block TorchMemory::kept_;

void* TorchMemory::allocate(void* self, std::size_t size) {
  auto& memory = *static_cast<TorchMemory*>(self);
  if (!memory.device_.is_cpu()) {
    memory.bytes_.emplace(bytes_of(size, memory.device_));
    return memory.bytes_->data();
  }
  Block& block = memory.block_;
  if (kept_.size >= size) {
    block = std::exchange(kept_, {});
  } else {
    block.data.reset(new (std::nothrow) char[size]);
    block.size = block.data ? size : 0;
  }
  return block.data.get();
}

TorchMemory::~TorchMemory() {
  if (block_.size > kept_.size && block_.size <= kMostKept) kept_ = std::move(block_);
}

Made dense(std::span<const std::int64_t> sizes, Type type, TorchDevice device) {
  std::array<std::int64_t, Tensor::kMaxRank> strides{};
  std::int64_t stride = 1;
  for (std::size_t i = sizes.size(); i-- > 0; stride *= std::max<std::int64_t>(sizes[i], 1)) {
    strides[i] = stride;
  }
  return made(sizes, strides.data(), type, device);
}

Made rows_like(const Tensor& like, std::int64_t size, TorchDevice device) {
  const auto rank = static_cast<std::size_t>(like.rank);
  std::array<std::int64_t, Tensor::kMaxRank> sizes = like.sizes, strides{};
  std::array<std::size_t, Tensor::kMaxRank> order{};
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.begin() + like.rank - 1, [&](std::size_t a, std::size_t b) {
    return like.strides[a] != like.strides[b] ? like.strides[a] > like.strides[b] : a < b;
  });
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

// ------------------------------------------------------------------------- an operator's arguments

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
