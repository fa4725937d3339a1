// Types that the compiler knows.
#pragma once

#include "regard/type.hpp"
#include "semantics/portable.h"

namespace regard {
namespace {

// A type that the compiler knows, so that loads and stores need not look at it.
template <Type kType>
struct KnownType {
  REGARD_INLINE operator Type() const { return kType; }
};
template <class Call>
REGARD_INLINE void with_known(Type type, Call call) {
  if (type == Type::f64) return call(KnownType<Type::f64>());
  if (type == Type::f16) return call(KnownType<Type::f16>());
  if (type == Type::bf16) return call(KnownType<Type::bf16>());
  call(KnownType<Type::f32>());
}

}  // namespace
}  // namespace regard
