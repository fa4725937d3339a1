// Whether tensors share memory, decided from their addresses, sizes and strides.
#pragma once

#include <initializer_list>
#include <utility>

#include "regard/regard.hpp"

namespace regard {

using NamedTensor = std::pair<const char*, const Tensor*>;

// The answer is exact where strides are nested, as those of slices of a larger dense tensor are;
// otherwise the search may end with `unproven`.
enum class Overlap : unsigned char { none, some, unproven };
Overlap overlap_of(const Tensor&, const Tensor&);

void check_overlap(const char* name, const Tensor&);  // no element may be written twice

// No element of an output may share a byte with an element of another output or of an input.
void check_distinct(std::initializer_list<NamedTensor> outputs, const Attention& inputs,
                    std::initializer_list<NamedTensor> more_inputs = {});
void check_distinct(const Attention&, const ForwardOutputs&);
void check_distinct(const Attention&, const BackwardInputs&, const Gradients&);

}  // namespace regard
