// The lanes of avx2, for lanes_test; this file alone is compiled for them.
#include "cpu/kernels/lanes_avx2.hpp"

#include "tests/cpu/lanes_table.hpp"

namespace regard::tests {
extern const LanesTable avx2_lanes = table_of<Avx2F32, Avx2F64>();
}  // namespace regard::tests
