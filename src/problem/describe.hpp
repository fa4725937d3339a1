// From the caller's tensors and options to a Problem, or an Error that names the argument.
#pragma once

#include "problem/problem.h"
#include "regard/regard.hpp"

namespace regard {

// `null_data`: explain and workspace look at shapes only, so data pointers may be null.
enum class NullData : bool { refused, allowed };

// `unread`: cu_seqlens and seqused lie where the host cannot read them. Where data may be null,
// they are then left out altogether, as if every sequence were the longest.
enum class Tables : bool { read, unread };

// Attention alone: everything but outputs and gradients.
Problem describe(const Attention&, Pass, NullData, Tables = Tables::read);

Problem describe_forward(const Attention&, const ForwardOutputs&, Tables = Tables::read);
Problem describe_backward(const Attention&, const BackwardInputs&, const Gradients&,
                          Tables = Tables::read);

// The mask that dropout_mask writes; returns where to write it.
View describe_keep(const Problem&, const Tensor& keep);

// "2 x 32/8 heads, 4096 x 4096, D 128, bf16, causal bottom right, bias, dropout 0.1".
std::string to_string(const Problem&);

}  // namespace regard
