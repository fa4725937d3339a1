// Types of elements that the compiler knows, so that loads and stores in a loop need not look at
// them.
#pragma once

#include "regard/type.hpp"
#include "semantics/portable.h"

namespace regard {
namespace {

template <Type kType>
struct KnownType {
  REGARD_INLINE operator Type() const { return kType; }
};

// Calls call(KnownType) for a floating-point type.
template <class Call>
REGARD_INLINE void with_known(Type type, Call call) {
  if (type == Type::f64) return call(KnownType<Type::f64>());
  if (type == Type::f16) return call(KnownType<Type::f16>());
  if (type == Type::bf16) return call(KnownType<Type::bf16>());
  call(KnownType<Type::f32>());
}

}  // namespace
}  // namespace regard
