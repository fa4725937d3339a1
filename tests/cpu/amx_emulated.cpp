// AMX is emulated wherever AVX-512 is; in place of the library's src/cpu/amx.cpp.
#include "cpu/amx.hpp"

namespace regard::cpu_backend {

const std::string& amx_refusal() {
  static const std::string none;
  return none;
}

}  // namespace regard::cpu_backend
