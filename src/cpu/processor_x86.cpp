// x86: what CPUID says.
#include "cpu/processor_x86.hpp"

#include <cstring>

#include "cpu/amx.hpp"
#include "cpu/processor.hpp"

namespace regard::cpu_backend {
std::vector<Isa> usable_isas() {
  const Registers one = cpuid(1, 0), seven = cpuid(7, 0), seven_one = cpuid(7, 1);
  const unsigned states = saved_states();
  constexpr unsigned kFma = 1u << 12, kAvx = 1u << 28, kF16c = 1u << 29, kAvx2 = 1u << 5;
  constexpr unsigned kAvx512F = 1u << 16, kDq = 1u << 17, kBw = 1u << 30, kVl = 1u << 31;
  constexpr unsigned kBf16 = 1u << 5, kYmm = 0x6, kZmm = 0xe6;
  const bool avx2 =
      all_of(states, kYmm) && all_of(one.ecx, kFma | kAvx | kF16c) && all_of(seven.ebx, kAvx2);
  const bool avx512 = avx2 && all_of(states, kZmm) && all_of(seven.ebx, kAvx512F | kDq | kBw | kVl);
  std::vector<Isa> usable;
  if (avx512 && amx_refusal().empty()) usable.push_back(Isa::amx);
  if (avx512 && all_of(seven_one.eax, kBf16)) usable.push_back(Isa::avx512bf16);
  if (avx512) usable.push_back(Isa::avx512);
  if (avx2) usable.push_back(Isa::avx2);
  usable.push_back(Isa::scalar);
  return usable;
}

const IsaKernels& kernels_of(Isa isa) {
  switch (isa) {
    case Isa::avx2:
      return avx2_kernels;
    case Isa::avx512:
      return avx512_kernels;
    case Isa::avx512bf16:
      return avx512bf16_kernels;
    case Isa::amx:
      return amx_kernels;
    case Isa::scalar:
    case Isa::neon:
      break;
  }
  return scalar_kernels;
}

std::string missing(Isa isa) {
  return isa == Isa::amx ? amx_refusal() : "not offered by this processor or its operating system";
}

std::string processor_name() {
  char name[49] = {};
  for (unsigned part = 0; part < 3; ++part) {
    const Registers r = cpuid(0x80000002u + part, 0);
    std::memcpy(name + 16 * part, &r, sizeof r);
  }
  std::string text = name;
  text.erase(0, text.find_first_not_of(' '));
  return text.empty() ? "unknown" : text;
}

}  // namespace regard::cpu_backend
