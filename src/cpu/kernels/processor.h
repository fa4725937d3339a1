// What kernels need of a processor besides its Lanes.
#pragma once

#if defined(__x86_64__)
#define REGARD_VECTOR_REGISTER "+x"
#define REGARD_PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define REGARD_VECTOR_REGISTER "+w"
#define REGARD_PAUSE() asm volatile("isb")
#else
#define REGARD_VECTOR_REGISTER "+f"
#define REGARD_PAUSE() asm volatile("")
#endif

namespace regard {
namespace {

// Tells the processor that this thread waits in a loop.
inline __attribute__((always_inline)) void pause_processor() { REGARD_PAUSE(); }

// Forces x into a register, and hides its value from the compiler.
template <class Vector>
inline __attribute__((always_inline)) void keep_in_register(Vector& x) {
  asm volatile("" : REGARD_VECTOR_REGISTER(x));
}

}  // namespace
}  // namespace regard
