// Tensors of PyTorch in C++, through its stable C ABI.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <memory>
#include <optional>
#include <regard/regard.hpp>
#include <span>
#include <string>
#include <utility>

#include "torch_abi.hpp"

namespace regard::python {

// PyTorch's functions, which load_torch finds before anything here is used.
extern torch_abi::Functions torch_functions;

// Whether this PyTorch has them. path: of its Python module; example: any plain tensor.
bool load_torch(const std::string& path, nanobind::handle example);

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

// The tensor of an object whose class is exactly PyTorch's Tensor or Parameter. The object owns it.
torch_abi::Handle handle_of(nanobind::handle x);
std::int32_t device_type_of(nanobind::handle x);
bool is_neg(nanobind::handle x);  // negated lazily
bool requires_grad(nanobind::handle x);
nanobind::object object_of(const Owned& x);
int thread_count();  // what torch.get_num_threads returns

TorchDevice device_of(const Owned& x);

// A view with the axes as PyTorch has them. Error: another element type than f64 to bf16, or more
// axes than Tensor's.
Tensor viewed(const char* argument, const Owned& x);

// Memory for the workspace of one call. On a GPU it is PyTorch's, whose caching allocator gives it
// away again for later work on the stream only. On the CPU a thread keeps a block for its next
// call: the C library takes long for blocks of this size.
class TorchMemory {
 public:
  explicit TorchMemory(TorchDevice device) : device_(device) {}
  ~TorchMemory();
  TorchMemory(const TorchMemory&) = delete;
  TorchMemory& operator=(const TorchMemory&) = delete;
  Allocator allocator() { return {.allocate = &TorchMemory::allocate, .self = this}; }

 private:
  struct Block {
    std::unique_ptr<char[]> data{};
    std::size_t size = 0;
  };
  static constexpr std::size_t kMostKept = 512 << 10;
  static thread_local Block kept_;

  static void* allocate(void* self, std::size_t size);

  TorchDevice device_;
  std::optional<Owned> bytes_{};  // on a GPU
  Block block_{};                 // on the CPU
};

// `size` bytes.
Owned bytes_of(std::size_t size, TorchDevice device);
// A new tensor, and a view of it with the axes as PyTorch has them.
struct Made {
  Owned owner;
  Tensor view;
};
// A dense tensor of these sizes.
Made dense(std::span<const std::int64_t> sizes, Type type, TorchDevice device);
// A dense tensor for rows of `size` elements, with its axes in memory in the order of `like`:
// kernels.dense in Python.
Made rows_like(const Tensor& like, std::int64_t size, TorchDevice device);
// A dense copy.
Owned contiguous(Owned x);

// An optional argument of an operator: 0 where it is not given.
torch_abi::Value taken_optional(torch_abi::Value value);
// An argument bool[4].
std::array<bool, 4> taken_flags(torch_abi::Value value);

}  // namespace regard::python
