// What kind of elements each tensor of `regard attend` must hold.
#pragma once

#include <string>

#include "files/input_file.hpp"
#include "tensors/array.hpp"

namespace regard::cli {

// The elements of a tensor in a file.
struct Held {
  Type type = Type::none;  // none: a type that attention has no use for, or int64
  bool int64 = false;
  std::string name;  // the file's word for the type
};

// "" if the tensor of that name ("q", "mask", ...) may hold them; else what it must hold, and how
// to convert it.
std::string content_fault(const std::string& tensor, const Held& held);

// 64-bit integers at an offset of the file, as i32; refuses, naming `field`, a value that does not
// fit.
Array read_int64(const InputFile& file, std::uint64_t offset, const Sizes& sizes,
                 const std::string& field);

}  // namespace regard::cli
