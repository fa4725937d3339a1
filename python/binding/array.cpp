#include "array.hpp"

#include <nanobind/ndarray.h>

#include <algorithm>

namespace regard::python {

namespace {

using nanobind::dlpack::dtype_code;

Tensor tensor_of(const void* data, Type type, std::size_t rank) {
  Tensor tensor;
  tensor.data = const_cast<void*>(data);
  tensor.type = type;
  tensor.rank = static_cast<int>(rank);
  return tensor;
}

void require_rank(const std::string& argument, std::size_t rank) {
  if (rank <= Tensor::kMaxRank) return;
  throw Error(Code::invalid_argument, argument, std::to_string(rank) + " dimensions",
              "an array has at most 4");
}

// View: an ndarray type, read-only or writable.
template <class View>
Array described(const nanobind::object& source, const std::string& argument,
                const std::string& type) {
  View view;
  if (!nanobind::try_cast(source, view)) {
    throw Error(Code::invalid_argument, argument, nanobind::type_name(source.type()).c_str(),
                "must be an array that speaks DLPack");
  }
  require_rank(argument, view.ndim());
  const Type own = type.empty()
                       ? type_of_dlpack(view.dtype().code, view.dtype().bits, view.dtype().lanes)
                       : type_named("type", type);
  if (own == Type::none || (!type.empty() && view.itemsize() != size_of(own))) {
    throw Error(
        Code::invalid_argument, argument,
        nanobind::str(nanobind::getattr(source, "dtype", nanobind::str("its type"))).c_str(),
        "must hold f64, f32, f16, bf16, bool or i32");
  }
  Array array{.tensor = tensor_of(view.data(), own, view.ndim()),
              .device = device_of_dlpack(view.device_type(), view.device_id(), argument),
              .owner = nanobind::cast(view)};
  for (std::size_t axis = 0; axis < view.ndim(); ++axis) {
    array.tensor.sizes[axis] = static_cast<std::int64_t>(view.shape(axis));
    array.tensor.strides[axis] = view.stride(axis);
  }
  return array;
}

}  // namespace

Type type_of_dlpack(std::uint8_t code, std::uint8_t bits, std::uint16_t lanes) {
  if (lanes != 1) return Type::none;
  const auto is = [&](dtype_code wanted, int size) {
    return code == static_cast<std::uint8_t>(wanted) && bits == size;
  };
  static_assert(kTypeCount == 7, "a type was added: how DLPack names it");
  if (is(dtype_code::Float, 64)) return Type::f64;
  if (is(dtype_code::Float, 32)) return Type::f32;
  if (is(dtype_code::Float, 16)) return Type::f16;
  if (is(dtype_code::Bfloat, 16)) return Type::bf16;
  if (is(dtype_code::Bool, 8)) return Type::boolean;
  if (is(dtype_code::Int, 32)) return Type::i32;
  return Type::none;
}

int device_of_dlpack(int type, int index, const std::string& argument) {
  namespace device = nanobind::device;
  if (type == device::cpu::value || type == device::cuda_host::value) return Array::kHost;
  const std::string named = "device (" + std::to_string(type) + ", " + std::to_string(index) + ")";
  if (type != device::cuda::value && type != device::cuda_managed::value) {
    throw Error(Code::unsupported, argument, named + " of DLPack",
                "must be in memory of the CPU or of a CUDA GPU");
  }
  if (index < 0) {
    throw Error(Code::invalid_argument, argument, named + " of DLPack",
                "a GPU's index must not be negative");
  }
  return index;
}

Type type_named(const std::string& argument, const std::string& name) {
  for (const Type type : {f64, f32, f16, bf16, Type::boolean, Type::i32}) {
    if (name == name_of(type)) return type;
  }
  throw Error(Code::invalid_argument, argument, name, "must be f64, f32, f16, bf16, bool or i32");
}

Array array_at(const std::string& argument, std::uintptr_t pointer, const std::string& type,
               const std::vector<std::int64_t>& sizes, const std::vector<std::int64_t>& strides,
               int device, nanobind::object owner) {
  require_rank(argument, sizes.size());
  if (strides.size() != sizes.size()) {
    throw Error(Code::invalid_argument, argument, std::to_string(strides.size()) + " strides",
                "must be as many as sizes, " + std::to_string(sizes.size()));
  }
  Array array{
      .tensor = tensor_of(reinterpret_cast<void*>(pointer), type_named("type", type), sizes.size()),
      .device = device < 0 ? Array::kHost : device,
      .owner = std::move(owner)};
  std::copy(sizes.begin(), sizes.end(), array.tensor.sizes.begin());
  std::copy(strides.begin(), strides.end(), array.tensor.strides.begin());
  return array;
}

Array array_from(const nanobind::object& source, const std::string& argument,
                 const std::string& type, bool writable) {
  if (!writable) return described<nanobind::ndarray<nanobind::ro>>(source, argument, type);
  nanobind::ndarray<nanobind::ro> readable;
  nanobind::ndarray<> view;
  if (nanobind::try_cast(source, readable) && !nanobind::try_cast(source, view)) {
    throw Error(Code::invalid_argument, argument, "a read-only array", "must be writable");
  }
  return described<nanobind::ndarray<>>(source, argument, type);
}

Array swapped(const Array& array, int first, int second) {
  const auto rank = array.tensor.rank;
  if (first < 0 || second < 0 || first >= rank || second >= rank) {
    throw Error(Code::invalid_argument, "axes",
                std::to_string(first) + ", " + std::to_string(second),
                "must be axes of an array of " + std::to_string(rank) + " dimensions");
  }
  Array result = array;
  std::swap(result.tensor.sizes[first], result.tensor.sizes[second]);
  std::swap(result.tensor.strides[first], result.tensor.strides[second]);
  return result;
}

std::string device_name(int device) {
  return device == Array::kHost ? "cpu" : "cuda:" + std::to_string(device);
}

}  // namespace regard::python
