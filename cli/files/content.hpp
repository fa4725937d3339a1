// What kind of elements each tensor of `regard attend` must hold.
#pragma once

#include <string>

#include "regard/type.hpp"

namespace regard::cli {

// held: the type of the elements in a file, none for one that attention has no use for; int64 =
// they are 64-bit integers; name: the file's word for the type. Returns "" if `tensor` may hold
// them, else what it must hold and how to convert.
struct Held {
  Type type = Type::none;
  bool int64 = false;
  std::string name;
};
std::string content_fault(const std::string& tensor, const Held& held);

}  // namespace regard::cli
