// The lanes of avx512 by AVX2, for lanes_test: in place of those of the hardware.
#include "tests/cpu/emulated_avx512.hpp"

namespace regard {
using namespace emulated512;
}

#include "tests/cpu/lanes_avx512.cpp"
