// The lanes of scalar, for lanes_test; this file alone is compiled for them.
#include "cpu/kernels/lanes_scalar.hpp"

#include "tests/cpu/lanes_table.hpp"

namespace regard::tests {
extern const LanesTable scalar_lanes = table_of<Scalar<float>, Scalar<double>>();
}  // namespace regard::tests
