// Scores of one head in order of docs/semantics.md: scale, softcap, bias, ALiBi, visibility.
#include "verify/score_matrix.hpp"

#include <algorithm>
#include <cmath>

namespace regard::cli {

template <class Real>
std::vector<Real> dense_rows(const Tensor& t, bool packed, Index b, Index h, Index first,
                             Index rows, Index dim) {
  std::vector<Real> dense(static_cast<std::size_t>(rows * dim));
  for (Index row = 0; row < rows; ++row) {
    const Index offset = row_offset(t, packed, b, h, first, row);
    for (Index d = 0; d < dim; ++d) {
      dense[static_cast<std::size_t>(row * dim + d)] =
          static_cast<Real>(load(t.data, t.type, offset + d));
    }
  }
  return dense;
}

template <class Real>
std::vector<Real> transposed(const std::vector<Real>& matrix, Index rows, Index columns) {
  std::vector<Real> result(matrix.size());
  for (Index i = 0; i < rows; ++i) {
    for (Index j = 0; j < columns; ++j) result[j * rows + i] = matrix[i * columns + j];
  }
  return result;
}

template <class Real>
void multiply_add(const Real* a, const Real* bt, Real* c, Index rows, Index inner, Index columns) {
  constexpr Index kBlock = 512;  // columns of c and bt that stay in the first cache
  for (Index begin = 0; begin < columns; begin += kBlock) {
    const Index end = std::min(begin + kBlock, columns);
    for (Index i = 0; i < rows; ++i) {
      Real* const c_row = c + i * columns;
      for (Index d = 0; d < inner; ++d) {
        const Real factor = a[i * inner + d];
        const Real* const b_row = bt + d * columns;
        for (Index j = begin; j < end; ++j) c_row[j] += factor * b_row[j];
      }
    }
  }
}

template <class Real>
void round_all(std::vector<Real>& values, Type type) {
  if (type == Type::f16) {
    for (Real& x : values) x = float_from_f16(f16_from_float(static_cast<float>(x)));
  } else if (type == Type::bf16) {
    for (Real& x : values) x = float_from_bf16(bf16_from_float(static_cast<float>(x)));
  }
}

namespace {

template <class Real>
std::vector<Real> absolute(std::vector<Real> values) {
  for (Real& x : values) x = std::fabs(x);
  return values;
}

// Softcap: scores become c * tanh(s / c), slope 1 - tanh^2; the magnitude shrinks with the slope.
// 16-bit kernels may take tanh as 1 - 2 / (e^2x + 1), whose error is of the cap's size
// (docs/numerics.md); beyond 2^24, where that leaves nothing of a score, the size stays as it is.
// A cap that f32 cannot hold is as good as 2^120.
template <class Real>
void cap(ScoreMatrix<Real>& m, double softcap_given, bool narrow) {
  const auto softcap =
      static_cast<Real>(sizeof(Real) == 4 ? std::min(softcap_given, 0x1p120) : softcap_given);
  const Real size_if_narrow = std::min(softcap, Real{0x1p24});
  m.slope.resize(m.scores.size());
  for (std::size_t n = 0; n < m.scores.size(); ++n) {
    const Real t = std::tanh(m.scores[n] / softcap);
    m.scores[n] = softcap * t;
    m.slope[n] = 1 - t * t;
    if (m.magnitude.empty()) continue;
    m.magnitude[n] =
        m.magnitude[n] * m.slope[n] + (narrow ? size_if_narrow : std::fabs(m.scores[n]));
  }
}

double slope_of(const Tensor& slopes, Index b, Index h) {
  if (!slopes.given()) return 0;
  const Index offset =
      slopes.rank == 2 ? b * slopes.strides[0] + h * slopes.strides[1] : h * slopes.strides[0];
  return load(slopes.data, slopes.type, offset);
}

}  // namespace

template <class Real>
ScoreMatrix<Real> score_matrix(const Attention& a, const Shape& shape, const Sequence& s, Index b,
                               Index h, const std::vector<Real>& q, const std::vector<Real>& kt,
                               const ScoreOptions& options) {
  ScoreMatrix<Real> m;
  m.rows = s.len_q;
  m.columns = s.len_k;
  const auto count = static_cast<std::size_t>(m.rows * m.columns);
  m.scores.resize(count);
  const auto scale = static_cast<Real>(scale_of(a, shape));
  multiply_add(q.data(), kt.data(), m.scores.data(), m.rows, shape.dim, m.columns);
  for (Real& x : m.scores) x *= scale;
  if (options.magnitude) {
    m.magnitude.resize(count);
    multiply_add(absolute(q).data(), absolute(kt).data(), m.magnitude.data(), m.rows, shape.dim,
                 m.columns);
    for (Real& x : m.magnitude) x *= std::fabs(scale);
  }
  if (a.softcap > 0) {
    cap(m, a.softcap, a.q.type == Type::f16 || a.q.type == Type::bf16);
  }

  const PairStrides bias_at(a.bias), mask_at(a.mask);
  const auto alibi = static_cast<Real>(slope_of(a.alibi_slopes, b, h));
  for (Index i = 0; i < m.rows; ++i) {
    const Interval keys = visible_keys(a, s, i);
    for (Index j = 0; j < m.columns; ++j) {
      Real& score = m.scores[i * m.columns + j];
      bool visible = keys.begin <= j && j < keys.end;
      visible = visible && spans_show(a, shape, s, b, h, i, j);
      if (visible && a.mask.given()) {
        visible = load(a.mask.data, a.mask.type, mask_at.offset(b, h, i, j)) != 0;
      }
      Real added = 0;
      if (visible && a.bias.given()) {
        added = static_cast<Real>(load(a.bias.data, a.bias.type, bias_at.offset(b, h, i, j)));
        visible = added != kHidden<Real>;
      }
      if (!visible) {
        score = kHidden<Real>;
        continue;
      }
      const Real distance = alibi * static_cast<Real>(std::abs(distance_of(a, s, i, j)));
      score += added - distance;
      if (options.magnitude)
        m.magnitude[i * m.columns + j] += std::fabs(added) + std::fabs(distance);
    }
  }
  round_all(m.scores, options.round_to);
  return m;
}

#define REGARD_INSTANTIATE(Real)                                                                  \
  template std::vector<Real> dense_rows<Real>(const Tensor&, bool, Index, Index, Index, Index,    \
                                              Index);                                             \
  template std::vector<Real> transposed(const std::vector<Real>&, Index, Index);                  \
  template void multiply_add(const Real*, const Real*, Real*, Index, Index, Index);               \
  template void round_all(std::vector<Real>&, Type);                                              \
  template ScoreMatrix<Real> score_matrix(const Attention&, const Shape&, const Sequence&, Index, \
                                          Index, const std::vector<Real>&,                        \
                                          const std::vector<Real>&, const ScoreOptions&);
REGARD_INSTANTIATE(float)
REGARD_INSTANTIATE(double)
#undef REGARD_INSTANTIATE

}  // namespace regard::cli
