// What one tensor must satisfy, and how it becomes a View.
#pragma once

#include <algorithm>
#include <array>

#include "problem/problem.h"
#include "regard/regard.hpp"

namespace regard {

// How many sizes and strides count; 0 of a rank that is not checked yet and negative.
inline std::size_t rank_of(const Tensor& tensor) {
  return static_cast<std::size_t>(std::clamp(tensor.rank, 0, Tensor::kMaxRank));
}

enum class Access : bool { read, write };

void check_shape(const char* name, const Tensor&, int rank, const char* wanted);
void check_last_stride(const char* name, const Tensor&);
void check_data(const char* name, const Tensor&);  // null only where there are no elements

// Tensors of rows with a head size: q, k, v, out and their gradients; sizes as `like`.
View row_view(const char* name, const Tensor&, const Tensor& like, bool packed, Access);
View checked_row_view(const Tensor&, bool packed);  // where every check was made before
View lse_view(const char* name, const Tensor&, const Problem&, Access);
View broadcast_view(const char* name, const Tensor&, const std::array<std::int64_t, 4>& full);
enum class Side : bool { queries, keys };
SpanView span_view(const char* name, const Tensor&, const Problem&, Side);
View head_view(const char* name, const Tensor&, const Sizes&, bool per_batch);
View like_view(const char* name, const Tensor&, const Tensor& bias, const Problem&);

}  // namespace regard
