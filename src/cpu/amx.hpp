// Whether this process may use AMX.
#pragma once

#include <string>

namespace regard::cpu_backend {

// Why it may not; "" if it may. The first call asks the operating system for the tile registers.
const std::string& amx_refusal();

}  // namespace regard::cpu_backend
