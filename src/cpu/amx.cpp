// What CPUID and the operating system say of AMX.
#include "cpu/amx.hpp"

#include "cpu/processor_x86.hpp"
#include "system/system.hpp"

namespace regard::cpu_backend {
namespace {

// The tiles that lanes_amx.hpp configures: 8 of 16 rows of 64 bytes.
bool has_tiles() {
  const Registers palette = cpuid(0x1d, 1);
  const unsigned names = palette.ebx >> 16, row_bytes = palette.ebx & 0xffff;
  return names >= 8 && row_bytes >= 64 && (palette.ecx & 0xffff) >= 16;
}

std::string refusal() {
  constexpr unsigned kBf16 = 1u << 5, kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  constexpr unsigned kTileState = 0x60000;
  if (!all_of(cpuid(7, 0).edx, kAmxBf16 | kAmxTile) || !all_of(cpuid(7, 1).eax, kBf16) ||
      !has_tiles()) {
    return "not offered by this processor";
  }
  if (!all_of(saved_states(), kTileState)) return "the operating system keeps no tile registers";
  return system::allow_tiles();
}

}  // namespace

const std::string& amx_refusal() {
  static const std::string* const text = new std::string(refusal());
  return *text;
}

}  // namespace regard::cpu_backend
