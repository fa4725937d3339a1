// Rows in a GPU's memory, by one small kernel.
#pragma once

#include <cstdint>

#include "cuda/driver.hpp"
#include "regard/tensor.hpp"

namespace regard::cuda_backend {

// Tensors have rank 4 and equal sizes. to = first, + second where it is given, + to if `add`; in
// f32 or wider. A copy may be between equal types, bool among them; else the terms are f32, or f64
// for f64.
struct RowSum {
  Tensor first{}, second{}, to{};
  bool add = false;
};

// Puts the kernel on the stream; `context` is the current one.
void write_rows(const RowSum&, const Chip&, std::uint64_t context, Stream, int device);

}  // namespace regard::cuda_backend
