// PyTorch's stable C ABI (torch/csrc/stable/c/shim.h and what it includes): what is used here. The
// functions are found in the running process, so that the wheel is built without PyTorch and serves
// every version from 2.10 on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace regard::python::torch_abi {

struct TensorObject;
struct ListObject;
struct LibraryObject;

using Handle = TensorObject*;
using Status = std::int32_t;  // 0 = done
// An argument or a result of an operator: a number's bytes, an owned Handle or list, or the address
// of an optional one on the heap.
using Value = std::uint64_t;
// Takes the arguments off the stack, and leaves the results there.
using Kernel = void(Value* stack, std::uint64_t arguments, std::uint64_t results);

// The oldest version whose conventions are followed; newer ones convert.
inline constexpr std::uint64_t kVersion = std::uint64_t{2} << 56 | std::uint64_t{10} << 48;

struct Functions {
  // tensors
  Status (*data)(Handle, void**) = nullptr;
  Status (*rank)(Handle, std::int64_t*) = nullptr;
  Status (*count)(Handle, std::int64_t*) = nullptr;  // elements
  Status (*sizes)(Handle, std::int64_t**) = nullptr;
  Status (*strides)(Handle, std::int64_t**) = nullptr;
  Status (*type)(Handle, std::int32_t*) = nullptr;
  Status (*device_type)(Handle, std::int32_t*) = nullptr;
  Status (*device_index)(Handle, std::int32_t*) = nullptr;
  Status (*is_defined)(Handle, bool*) = nullptr;
  Status (*empty)(std::int64_t rank, const std::int64_t* sizes, const std::int64_t* strides,
                  std::int32_t type, std::int32_t device_type, std::int32_t device_index,
                  Handle*) = nullptr;
  Status (*undefined)(Handle*) = nullptr;
  Status (*same)(Handle, Handle*) = nullptr;
  Status (*destroy)(Handle) = nullptr;
  // element types and devices
  std::int32_t (*bf16)() = nullptr;
  std::int32_t (*f16)() = nullptr;
  std::int32_t (*f32)() = nullptr;
  std::int32_t (*f64)() = nullptr;
  std::int32_t (*u8)() = nullptr;
  std::int32_t (*cpu)() = nullptr;
  std::int32_t (*cuda)() = nullptr;
  std::int32_t (*contiguous)() = nullptr;  // a memory format
  // lists
  Status (*list_item)(ListObject*, std::size_t, Value*) = nullptr;
  Status (*destroy_list)(ListObject*) = nullptr;
  // operators
  Status (*open_library)(const char* name_space, const char* key, const char* file,
                         std::uint32_t line, LibraryObject**) = nullptr;
  Status (*implement)(LibraryObject*, const char* name, Kernel*, std::uint64_t version) = nullptr;
  Status (*call)(const char* name, const char* overload, Value* stack,
                 std::uint64_t version) = nullptr;
  // the machine
  Status (*num_threads)(std::uint32_t*) = nullptr;
  Status (*current_stream)(std::int32_t device_index, void** stream) = nullptr;  // null: no CUDA
  bool (*is_grad_enabled)() = nullptr;
  // C++ functions, of addresses and numbers only: the C ABI has none for these
  void* (*to_object)(Handle) = nullptr;  // a PyObject; a new reference
  bool (*is_neg)(Handle) = nullptr;
  bool (*requires_grad)(const void* tensor) = nullptr;  // to what the Handle points
  std::int64_t (*count_function_modes)() = nullptr;
  std::int64_t (*count_dispatch_modes)() = nullptr;
  void* const* (*tracing)() = nullptr;                 // to null where torch.jit traces nothing
  bool (*keys_are_included)(std::uint64_t) = nullptr;  // sets of dispatch keys, of this thread
  bool (*keys_are_excluded)(std::uint64_t) = nullptr;
};

// path: of PyTorch's Python module, which this process has loaded. Nothing where a function is
// missing that every build of PyTorch from 2.10 on has.
std::optional<Functions> functions_of(const std::string& path);

}  // namespace regard::python::torch_abi
