// NumPy's .npy: versions 1 to 3, little endian, C order; f8 f4 f2 b1 i4, and i8 where values fit.
#pragma once

#include <string>

#include "tensors/array.hpp"

namespace regard::cli {

// Refuses elements that the tensor of that name ("q", "mask", ...) must not hold.
Array read_npy(const std::string& path, const std::string& tensor);
void write_npy(const std::string& path, const Tensor& tensor);

}  // namespace regard::cli
