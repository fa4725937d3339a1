// Attention as a plain program computes it, whole matrices in the inputs' own type: the yardstick
// for accuracy, time and memory.
#pragma once

#include "tensors/array.hpp"

namespace regard::cli {

// What is wanted and in which type; none = not wanted.
struct WantedTypes {
  Type out = Type::none, dq = Type::none, dk = Type::none, dv = Type::none;
  Type dbias = Type::none, dsink = Type::none;

  bool backward() const {
    return dq != Type::none || dk != Type::none || dv != Type::none || dbias != Type::none ||
           dsink != Type::none;
  }
};

struct UnfusedOptions {
  WantedTypes wanted;
  bool round_scores = false;  // scores stored in the type too, as a framework's matmul leaves them
  bool whole_batch = false;   // hold all heads' probabilities at once, as batched products do
  int threads = 1;
};

// All f64 and dense, in the API's shapes, holding values of the wanted types.
struct Results {
  Array out, lse, dq, dk, dv, dbias, dsink;
};

struct UnfusedResults : Results {
  std::size_t matrix_bytes = 0;  // score and probability matrices that were held at once
};

UnfusedResults unfused_attention(const Attention& attention, const Tensor& dout, const Tensor& dlse,
                                 const UnfusedOptions& options);

// f64 zeros in the shapes of the wanted results.
Results empty_results(const Attention& attention, const WantedTypes& wanted);
// The same, for results: rows of no sequence have an lse of -infinity.
Results hidden_results(const Attention& attention, const WantedTypes& wanted);

// dropout_mask(attention) as (B, Hq, Sq, Sk) bytes; empty without dropout.
Array dropout_keep(const Attention& attention);

}  // namespace regard::cli
