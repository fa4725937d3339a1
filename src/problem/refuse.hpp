// The user's error word: throws an Error that names argument and value.
#pragma once

#include <string>

#include "regard/error.hpp"
#include "regard/tensor.hpp"

namespace regard {

inline std::string printed(const std::string& text) { return text; }
inline std::string printed(const char* text) { return text; }
inline std::string printed(const Tensor& tensor) { return to_string(tensor); }
inline std::string printed(Type type) { return name_of(type); }
std::string printed(double value);
template <class Int>
  requires std::is_integral_v<Int>
std::string printed(Int value) {
  return std::to_string(value);
}

template <class Value>
[[noreturn]] void refuse(const char* argument, const Value& value, const std::string& reason,
                         Code code = Code::invalid_argument) {
  throw Error(code, argument, printed(value), reason);
}

// The reason is a literal, or costs nothing to build: it is built whether the rule holds or not.
template <class Value, class Reason>
void require(bool holds, const char* argument, const Value& value, const Reason& reason) {
  if (!holds) refuse(argument, value, std::string(reason));
}

}  // namespace regard
