// A Python array as the library takes it: a regard::Tensor and the device that holds its memory.
#pragma once

#include <nanobind/nanobind.h>

#include <regard/regard.hpp>
#include <string>
#include <vector>

namespace regard::python {

struct Array {
  Tensor tensor{};
  int device = kHost;        // index of the GPU, or kHost
  nanobind::object owner{};  // keeps the memory alive; may be empty

  static constexpr int kHost = -1;
};

// "f32" and so on, as name_of writes them. Error for another name.
Type type_named(const std::string& argument, const std::string& name);

// The element type that DLPack names so; Type::none for another one.
Type type_of_dlpack(std::uint8_t code, std::uint8_t bits, std::uint16_t lanes);

// DLPack's device in the numbers of Array::device. Error for memory of another kind.
int device_of_dlpack(int type, int index, const std::string& argument);

// A view of memory at `pointer`; strides count elements. `argument` is the name in an Error.
Array array_at(const std::string& argument, std::uintptr_t pointer, const std::string& type,
               const std::vector<std::int64_t>& sizes, const std::vector<std::int64_t>& strides,
               int device, nanobind::object owner);

// A view of any object with DLPack or the buffer protocol. `argument` is the name in an Error.
// `type` overrides the element type where the protocol has none (bf16 as 16-bit integers).
// `writable` refuses read-only memory.
Array array_from(const nanobind::object& source, const std::string& argument,
                 const std::string& type, bool writable);

// The same memory with two axes exchanged: (B, S, H, D) as (B, H, S, D). Error if an axis is
// missing.
Array swapped(const Array& array, int first, int second);

std::string device_name(int device);  // "cpu", "cuda:0"

}  // namespace regard::python
