// What this processor and its operating system allow.
#include "cpu/cpuid.hpp"

#include <cpuid.h>
#include <unistd.h>

#include <cstring>

#include "cpu/peak.hpp"

namespace regard::cpu_backend {
namespace {

struct Registers {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

// The register states that the operating system saves; 0 if it does not say.
unsigned saved_states(const Registers& features) {
  constexpr unsigned kOsxsave = 1u << 27;
  if (!(features.ecx & kOsxsave)) return 0;
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

bool all_of(unsigned bits, unsigned wanted) { return (bits & wanted) == wanted; }

Processor probe() {
  const Registers one = cpuid(1, 0), seven = cpuid(7, 0), seven_one = cpuid(7, 1);
  const unsigned states = saved_states(one);
  constexpr unsigned kFma = 1u << 12, kAvx = 1u << 28, kF16c = 1u << 29, kAvx2 = 1u << 5;
  constexpr unsigned kAvx512F = 1u << 16, kDq = 1u << 17, kBw = 1u << 30, kVl = 1u << 31;
  constexpr unsigned kBf16 = 1u << 5, kYmm = 0x6, kZmm = 0xe6;
  const bool avx2 =
      all_of(states, kYmm) && all_of(one.ecx, kFma | kAvx | kF16c) && all_of(seven.ebx, kAvx2);
  const bool avx512 = avx2 && all_of(states, kZmm) && all_of(seven.ebx, kAvx512F | kDq | kBw | kVl);
  Processor processor;
  if (avx512 && all_of(seven_one.eax, kBf16)) processor.usable.push_back(Isa::avx512bf16);
  if (avx512) processor.usable.push_back(Isa::avx512);
  if (avx2) processor.usable.push_back(Isa::avx2);
  processor.usable.push_back(Isa::scalar);
  if (processor.usable.front() == Isa::avx512bf16) {
    // The rates differ by two one way or the other, so that noise cannot flip the choice.
    processor.bf16_dot_pays = spin_rate(Isa::avx512bf16, Type::bf16, 0.0005) >
                              1.2 * spin_rate(Isa::avx512, Type::f32, 0.0005);
  }
  return processor;
}

}  // namespace

const Processor& this_processor() {
  // Never destroyed: calls may come while the process ends.
  static const Processor* const processor = new Processor(probe());
  return *processor;
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

std::size_t cache_size(int level) {
  const int names[] = {_SC_LEVEL1_DCACHE_SIZE, _SC_LEVEL2_CACHE_SIZE, _SC_LEVEL3_CACHE_SIZE};
  const long size = level >= 1 && level <= 3 ? sysconf(names[level - 1]) : 0;
  return size > 0 ? static_cast<std::size_t>(size) : 0;
}

}  // namespace regard::cpu_backend
