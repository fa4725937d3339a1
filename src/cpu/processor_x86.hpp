// The CPUID instruction, and the register states that the operating system saves.
#pragma once

#include <cpuid.h>

namespace regard::cpu_backend {

struct Registers {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

inline Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

inline bool all_of(unsigned bits, unsigned wanted) { return (bits & wanted) == wanted; }

// Bits of XCR0; 0 if the operating system does not say.
inline unsigned saved_states() {
  constexpr unsigned kOsxsave = 1u << 27;
  if (!all_of(cpuid(1, 0).ecx, kOsxsave)) return 0;
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

}  // namespace regard::cpu_backend
