// The full score matrix of one head, as a plain program writes it: the yardstick's first half.
#pragma once

#include <limits>
#include <vector>

#include "tensors/geometry.hpp"

namespace regard::cli {

template <class Real>
inline constexpr Real kHidden = -std::numeric_limits<Real>::infinity();

// Rows of q, k, v or dout of one head, dense: rows x dim; transposed: dim x rows.
template <class Real>
std::vector<Real> dense_rows(const Tensor& t, bool packed, Index b, Index h, Index first,
                             Index rows, Index dim);
template <class Real>
std::vector<Real> transposed(const std::vector<Real>& matrix, Index rows, Index columns);

// c[i][j] += sum over d of a[i][d] * bt[d][j]; rows x columns, inner sums in order of d.
template <class Real>
void multiply_add(const Real* a, const Real* bt, Real* c, Index rows, Index inner, Index columns);

template <class Real>
struct ScoreMatrix {
  Index rows = 0, columns = 0;
  std::vector<Real> scores;     // kHidden where the pair is hidden
  std::vector<Real> slope;      // d capped / d scaled; empty without softcap
  std::vector<Real> magnitude;  // the size of what was summed, for error bounds; if asked for
};

struct ScoreOptions {
  Type round_to = Type::none;  // store the scores in this type, as a framework's matmul does
  bool magnitude = false;
};

// q: rows x D, kt: D x columns.
template <class Real>
ScoreMatrix<Real> score_matrix(const Attention& attention, const Shape& shape,
                               const Sequence& sequence, Index b, Index h,
                               const std::vector<Real>& q, const std::vector<Real>& kt,
                               const ScoreOptions& options);

template <class Real>
void round_all(std::vector<Real>& values, Type type);

}  // namespace regard::cli
