// The compiler's own f16, an oracle for conversions.
#pragma once

namespace regard::tests {

#if defined(__aarch64__) && !defined(__clang__)
using Half = __fp16;  // g++ 12 has no _Float16 for C++ there
#else
using Half = _Float16;
#endif

}  // namespace regard::tests
