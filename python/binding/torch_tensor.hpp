// Tensors of PyTorch in C++, through its stable C ABI.
#pragma once

#include <array>
#include <optional>
#include <regard/regard.hpp>
#include <span>
#include <string>
#include <utility>

#include "torch_abi.hpp"

namespace regard::python {

// PyTorch's functions, which load_torch finds before anything here is used.
extern torch_abi::Functions torch_functions;

// Whether this PyTorch has them. path: of its Python module.
bool load_torch(const std::string& path);

// Throws std::runtime_error "PyTorch could not WHAT" for a status that is not 0.
void check(torch_abi::Status status, const char* what);

// A tensor that this object owns.
class Owned {
 public:
  explicit Owned(torch_abi::Handle handle) : handle_(handle) {}
  explicit Owned(torch_abi::Value value) : handle_(reinterpret_cast<torch_abi::Handle>(value)) {}
  Owned(Owned&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Owned() {
    if (handle_) torch_functions.destroy(handle_);
  }

  // Another owner of a tensor that somebody else owns.
  static Owned shared(torch_abi::Handle handle);
  static Owned undefined();

  torch_abi::Handle get() const { return handle_; }
  bool is_defined() const;
  void* data() const;
  // Hands the tensor over, as an operator's result or argument.
  torch_abi::Value released() {
    return reinterpret_cast<torch_abi::Value>(std::exchange(handle_, nullptr));
  }

 private:
  torch_abi::Handle handle_ = nullptr;
};

struct TorchDevice {
  std::int32_t type = 0, index = 0;

  static TorchDevice cpu() { return {torch_functions.cpu(), 0}; }
  static TorchDevice cuda(int index) { return {torch_functions.cuda(), index}; }
  bool is_cpu() const { return type == torch_functions.cpu(); }
  bool operator==(const TorchDevice&) const = default;
};

TorchDevice device_of(const Owned& x);

// A view with the axes as PyTorch has them. Error: another element type than f64 to bf16, or more
// axes than Tensor's.
Tensor viewed(const char* argument, const Owned& x);

// Memory of PyTorch for the workspace of one call. Its caching allocator gives it away again for
// later work on the stream only.
class TorchMemory {
 public:
  explicit TorchMemory(TorchDevice device) : device_(device) {}
  Allocator allocator() { return {.allocate = &TorchMemory::allocate, .self = this}; }

 private:
  static void* allocate(void* self, std::size_t size);

  TorchDevice device_;
  std::optional<Owned> bytes_;
};

// `size` bytes.
Owned bytes_of(std::size_t size, TorchDevice device);
// A dense tensor of these sizes.
Owned dense(std::span<const std::int64_t> sizes, Type type, TorchDevice device);
// A dense tensor for rows of `size` elements, with its axes in memory in the order of `like`:
// kernels.dense in Python.
Owned rows_like(const Tensor& like, std::int64_t size, TorchDevice device);
// A dense copy.
Owned contiguous(Owned x);

// An optional argument of an operator: 0 where it is not given.
torch_abi::Value taken_optional(torch_abi::Value value);
// An argument bool[4].
std::array<bool, 4> taken_flags(torch_abi::Value value);

}  // namespace regard::python
