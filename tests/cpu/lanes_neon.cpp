// The lanes of neon, for lanes_test; this file alone is compiled for them.
#include "cpu/kernels/lanes_neon.hpp"

#include "tests/cpu/lanes_table.hpp"

namespace regard::tests {
extern const LanesTable neon_lanes = table_of<NeonF32, NeonF64>();
}  // namespace regard::tests
