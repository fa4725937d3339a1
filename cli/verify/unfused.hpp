// Attention as a plain program computes it, whole matrices in the inputs' own type: what `regard
// attend --compare` compares accuracy, time and memory with.
#pragma once

#include "verify/float64.hpp"

namespace regard::cli {

struct UnfusedResults : Results {
  std::size_t matrix_bytes = 0;  // score and probability matrices that were held at once
};

// Scores are stored in the type too, as a framework's matmul leaves them, and the probabilities of
// all heads are held at once, as batched products do. The results hold values of the wanted types.
UnfusedResults unfused_attention(const Attention& attention, const Tensor& dout, const Tensor& dlse,
                                 const WantedTypes& wanted, int threads);

}  // namespace regard::cli
