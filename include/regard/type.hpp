/// \file
/// Type: what one element of a tensor is.
#pragma once

#if __cplusplus < 202002L
#error "regard: the C++ API needs C++20 (-std=c++20); regard/regard.h serves C and older C++"
#endif

namespace regard {

/// f64, f32, f16 (IEEE binary16), bf16 (the upper half of an f32), boolean (one byte) and i32.
enum class Type : unsigned char { none, f64, f32, f16, bf16, boolean, i32 };

/// What knows every type states this number, so that a new type stops the build there.
inline constexpr int kTypeCount = 7;

inline constexpr Type f64 = Type::f64;          ///< IEEE binary64
inline constexpr Type f32 = Type::f32;          ///< IEEE binary32
inline constexpr Type f16 = Type::f16;          ///< IEEE binary16
inline constexpr Type bf16 = Type::bf16;        ///< the upper half of an f32
inline constexpr Type boolean = Type::boolean;  ///< one byte; 0 is false, anything else true
inline constexpr Type i32 = Type::i32;          ///< 32-bit signed integer

}  // namespace regard
