// The lanes of avx512, for lanes_test; this file alone is compiled for them.
#include "cpu/kernels/lanes_avx512.hpp"

#include "tests/cpu/lanes_table.hpp"

namespace regard::tests {
namespace {

struct NoRounding {};  // a logarithm packs no pairs
constexpr LanesTable with_weights(LanesTable table) {
  table.weight_log2 = log2_all<Avx512Pairs<NoRounding>>;
  return table;
}

}  // namespace
extern const LanesTable avx512_lanes = with_weights(table_of<Avx512F32, Avx512F64>());
}  // namespace regard::tests
