// Throws an Error that names an argument and its value.
#pragma once

#include <new>
#include <string>

#include "regard/error.hpp"
#include "regard/tensor.hpp"
#include "semantics/portable.h"

namespace regard {

std::string printed(const std::string& text);  // a zero as "\0": what() would end there
inline std::string printed(const char* text) { return text; }
std::string printed(const void* address);  // "0x7f00"
inline std::string printed(const Tensor& tensor) { return to_string(tensor); }
inline std::string printed(Type type) { return name_of(type); }
// With a point, whatever the locale: the shortest text that reads as this value; with so many
// decimals.
std::string printed(double value);
std::string decimal(double value, int decimals);
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

// Takes a reason that is a literal. Others are built where a rule is broken: if (...) refuse(...).
template <class Value>
REGARD_INLINE void require(bool holds, const char* argument, const Value& value,
                           const char* reason) {
  if (!holds) [[unlikely]]
    refuse(argument, value, reason);
}

// What the library keeps for itself may find no memory: the caller then gets an Error too.
template <class Body>
auto with_memory_errors(const Body& body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    refuse("memory", "exhausted", "an allocation failed", Code::out_of_memory);
  }
}

}  // namespace regard
