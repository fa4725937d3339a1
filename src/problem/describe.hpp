// From the caller's tensors and options to a Problem, or an Error that names the argument.
#pragma once

#include "problem/sequence_tables.hpp"

namespace regard {

// Describes the Attention without outputs and gradients. The Problem reads the sequence tables from
// `copies`, which must outlive it; without copies, from the caller's memory (a GPU's).
Problem describe(const Attention&, Pass, NullData, TableCopies* = nullptr);

Problem describe_forward(const Attention&, const ForwardOutputs&, TableCopies* = nullptr);
Problem describe_backward(const Attention&, const BackwardInputs&, const Gradients&,
                          TableCopies* = nullptr);

// Describes the forward call that a Mask is made for. With NullData::outside_masks, the tensors
// that the Mask keeps have data.
Problem describe_mask(const Attention&, NullData, TableCopies* = nullptr);

// The backward call after a forward call, with dq, dk, dv and dsink in the inputs' own types.
Problem with_gradients(const Problem& forward);

// The mask that dropout_mask writes; returns where to write it.
View describe_keep(const Problem&, const Tensor& keep);

// "2 x 32/8 heads, 4096 x 4096, D 128, bf16, causal bottom right, bias, dropout 0.1".
std::string to_string(const Problem&);

}  // namespace regard
