// The lanes of avx512, for lanes_test; this file alone is compiled for them.
#include "cpu/kernels/lanes_avx512.hpp"

#include "tests/cpu/lanes_table.hpp"

namespace regard::tests {
extern const LanesTable avx512_lanes = table_of<Avx512F32, Avx512F64>();
}  // namespace regard::tests
