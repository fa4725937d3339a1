// The kernels for AVX-512 by AVX2: in place of the library's.
#include "tests/cpu/emulated_avx512.hpp"

namespace regard {
using namespace emulated512;
}

#include "cpu/kernels/isa_avx512.cpp"
