// Score matrix, softmax, product; arithmetic in f32 (f64 for f64), and every matrix is rounded to
// the inputs' type when it is stored.
#include "verify/unfused.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <thread>
#include <vector>

#include "tensors/geometry.hpp"

namespace regard::cli {

namespace {

template <class Real>
inline constexpr Real kHidden = -std::numeric_limits<Real>::infinity();

template <class Real>
struct ScoreMatrix {
  Index rows = 0, columns = 0;
  std::vector<Real> scores;  // kHidden where the pair is hidden
  std::vector<Real> slope;   // d capped / d scaled; empty without softcap
};

// Rows of q, k, v or dout of one head.
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

// c[i][j] += sum over d of a[i][d] * bt[d][j]; inner sums in the order of d.
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

// c * tanh(s / c), of slope 1 - tanh^2. A cap that f32 cannot hold is as good as 2^120.
template <class Real>
void cap(ScoreMatrix<Real>& m, double softcap) {
  const auto c = static_cast<Real>(sizeof(Real) == 4 ? std::min(softcap, 0x1p120) : softcap);
  m.slope.resize(m.scores.size());
  for (std::size_t n = 0; n < m.scores.size(); ++n) {
    const Real t = std::tanh(m.scores[n] / c);
    m.scores[n] = c * t;
    m.slope[n] = 1 - t * t;
  }
}

double slope_of(const Tensor& slopes, Index b, Index h) {
  if (!slopes.given()) return 0;
  const Index offset =
      slopes.rank == 2 ? b * slopes.strides[0] + h * slopes.strides[1] : h * slopes.strides[0];
  return load(slopes.data, slopes.type, offset);
}

// In the order of docs/semantics.md. q: rows x D, kt: D x columns.
template <class Real>
ScoreMatrix<Real> score_matrix(const Attention& a, const Shape& shape, const Sequence& s, Index b,
                               Index h, const std::vector<Real>& q, const std::vector<Real>& kt,
                               Type round_to) {
  ScoreMatrix<Real> m;
  m.rows = s.len_q;
  m.columns = s.len_k;
  const auto count = static_cast<std::size_t>(m.rows * m.columns);
  m.scores.resize(count);
  const auto scale = static_cast<Real>(scale_of(a, shape));
  multiply_add(q.data(), kt.data(), m.scores.data(), m.rows, shape.dim, m.columns);
  for (Real& x : m.scores) x *= scale;
  if (a.softcap > 0) cap(m, a.softcap);

  const PairStrides bias_at(a.bias), mask_at(a.mask);
  const auto alibi = static_cast<Real>(slope_of(a.alibi_slopes, b, h));
  for (Index i = 0; i < m.rows; ++i) {
    const Interval keys = visible_keys(a, s, i);
    for (Index j = 0; j < m.columns; ++j) {
      Real& score = m.scores[i * m.columns + j];
      bool visible = keys.begin <= j && j < keys.end;
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
      const Real distance = alibi * static_cast<Real>(std::abs(i + s.len_k - s.len_q - j));
      score += added - distance;
    }
  }
  round_all(m.scores, round_to);
  return m;
}

// Everything one kv head's work reads and writes.
template <class Real>
class Worker {
 public:
  Worker(const Attention& a, const Tensor& dout, const Tensor& dlse, const WantedTypes& wanted,
         const Array& keep, const Array& whole, UnfusedResults& results)
      : a_(a),
        dout_(dout),
        dlse_(dlse),
        wanted_(wanted),
        keep_(keep),
        whole_(whole),
        results_(results),
        shape_(shape_of(a)),
        bias_at_(results.dbias.tensor()) {
    keep_scale_ = static_cast<Real>(1 / (1 - dropout_probability(a.dropout.p)));
  }

  void run(Index b, Index kv) {
    const Sequence s = sequence_of(a_, shape_, b);
    k_ = dense_rows<Real>(a_.k, shape_.packed, b, kv, s.first_k, s.len_k, shape_.dim);
    v_ = dense_rows<Real>(a_.v, shape_.packed, b, kv, s.first_k, s.len_k, shape_.dim_v);
    kt_ = transposed(k_, s.len_k, shape_.dim);
    dk_.assign(k_.size(), 0);
    dv_.assign(v_.size(), 0);
    for (Index h = kv * shape_.group(); h < (kv + 1) * shape_.group(); ++h) head(s, b, h);
    write(results_.dk, wanted_.dk, dk_, b, kv, s.first_k, s.len_k, shape_.dim);
    write(results_.dv, wanted_.dv, dv_, b, kv, s.first_k, s.len_k, shape_.dim_v);
  }

 private:
  void head(const Sequence& s, Index b, Index h) {
    const auto q = dense_rows<Real>(a_.q, shape_.packed, b, h, s.first_q, s.len_q, shape_.dim);
    ScoreMatrix<Real> m = score_matrix(a_, shape_, s, b, h, q, kt_, a_.q.type);
    std::vector<Real> sink_share;
    const std::vector<Real> lse = softmax(m, h, sink_share);
    write_lse(lse, b, h, s);
    save(m, b, h);

    std::vector<Real> dropped = m.scores;  // Z * P
    drop(dropped, b, h, s);
    round_all(dropped, a_.q.type);
    std::vector<Real> out(static_cast<std::size_t>(s.len_q * shape_.dim_v));
    accumulate(Sum::over_keys, m, dropped, v_, out, shape_.dim_v);
    write(results_.out, wanted_.out, out, b, h, s.first_q, s.len_q, shape_.dim_v);
    if (wanted_.backward()) backward(s, b, h, q, m, dropped, sink_share);
  }

  // Turns scores into probabilities; returns the lse.
  std::vector<Real> softmax(ScoreMatrix<Real>& m, Index h, std::vector<Real>& sink_share) {
    std::vector<Real> lse(m.rows, kHidden<Real>);
    sink_share.assign(m.rows, 0);
    const Real sink =
        a_.sink.given()
            ? static_cast<Real>(load(a_.sink.data, a_.sink.type, h * a_.sink.strides[0]))
            : kHidden<Real>;
    for (Index i = 0; i < m.rows; ++i) {
      Real* const row = m.scores.data() + i * m.columns;
      Real top = sink;
      for (Index j = 0; j < m.columns; ++j) top = std::max(top, row[j]);
      if (top == kHidden<Real>) {
        std::fill(row, row + m.columns, Real{0});
        continue;
      }
      Real sum = 0;
      for (Index j = 0; j < m.columns; ++j) {
        row[j] = row[j] == kHidden<Real> ? 0 : std::exp(row[j] - top);
        sum += row[j];
      }
      const Real sink_weight = std::exp(sink - top);
      sum += sink_weight;
      for (Index j = 0; j < m.columns; ++j) row[j] /= sum;
      sink_share[i] = sink_weight / sum;
      lse[i] = top + std::log(sum);
    }
    round_all(m.scores, a_.q.type);
    return lse;
  }

  void drop(std::vector<Real>& matrix, Index b, Index h, const Sequence& s) {
    if (!keep_.given()) return;
    const auto* const keep = keep_.as<std::uint8_t>();
    for (Index i = 0; i < s.len_q; ++i) {
      const Index row = ((b * shape_.heads_q + h) * shape_.len_q + i) * shape_.len_k;
      for (Index j = 0; j < s.len_k; ++j) {
        Real& x = matrix[i * s.len_k + j];
        x = keep[row + j] ? x * keep_scale_ : 0;
      }
    }
  }

  enum class Sum { over_keys, over_rows };

  // to[i] += weight[i][j] * rows[j], or to[j] += weight[i][j] * rows[i], over pairs with a
  // probability: hidden rows may hold NaN.
  static void accumulate(Sum sum, const ScoreMatrix<Real>& m, const std::vector<Real>& weight,
                         const std::vector<Real>& rows, std::vector<Real>& to, Index dim) {
    for (Index i = 0; i < m.rows; ++i) {
      for (Index j = 0; j < m.columns; ++j) {
        if (m.scores[i * m.columns + j] == 0) continue;
        const Real factor = weight[i * m.columns + j];
        const Real* const from = rows.data() + (sum == Sum::over_keys ? j : i) * dim;
        Real* const row = to.data() + (sum == Sum::over_keys ? i : j) * dim;
        for (Index d = 0; d < dim; ++d) row[d] += factor * from[d];
      }
    }
  }

  void backward(const Sequence& s, Index b, Index h, const std::vector<Real>& q,
                const ScoreMatrix<Real>& m, const std::vector<Real>& dropped,
                const std::vector<Real>& sink_share) {
    const auto dout =
        dense_rows<Real>(dout_, shape_.packed, b, h, s.first_q, s.len_q, shape_.dim_v);
    accumulate(Sum::over_rows, m, dropped, dout, dv_, shape_.dim_v);

    std::vector<Real> ds(m.scores.size());
    const auto vt = transposed(v_, s.len_k, shape_.dim_v);
    multiply_add(dout.data(), vt.data(), ds.data(), s.len_q, shape_.dim_v, s.len_k);
    round_all(ds, a_.q.type);
    drop(ds, b, h, s);
    Real dsink = 0;
    for (Index i = 0; i < s.len_q; ++i) {
      const Real* const p = m.scores.data() + i * s.len_k;
      Real* const row = ds.data() + i * s.len_k;
      Real delta = 0;
      for (Index j = 0; j < s.len_k; ++j) {
        if (p[j] != 0) delta += p[j] * row[j];
      }
      if (dlse_.given()) {
        delta -= static_cast<Real>(
            load(dlse_.data, dlse_.type, lse_offset(dlse_, shape_.packed, b, h, s.first_q, i)));
      }
      for (Index j = 0; j < s.len_k; ++j) row[j] = p[j] == 0 ? 0 : p[j] * (row[j] - delta);
      if (sink_share[i] != 0) dsink -= sink_share[i] * delta;
    }
    round_all(ds, a_.q.type);
    add_to_bias(ds, b, h, s);
    if (results_.dsink.given()) results_.dsink.template as<double>()[h] += dsink;
    const auto scale = static_cast<Real>(scale_of(a_, shape_));
    for (std::size_t n = 0; n < ds.size(); ++n)
      ds[n] *= m.slope.empty() ? scale : scale * m.slope[n];
    round_all(ds, a_.q.type);
    std::vector<Real> dq(q.size());
    accumulate(Sum::over_keys, m, ds, k_, dq, shape_.dim);
    accumulate(Sum::over_rows, m, ds, q, dk_, shape_.dim);
    write(results_.dq, wanted_.dq, dq, b, h, s.first_q, s.len_q, shape_.dim);
  }

  void add_to_bias(const std::vector<Real>& ds, Index b, Index h, const Sequence& s) {
    if (!results_.dbias.given()) return;
    auto* const dbias = results_.dbias.template as<double>();
    for (Index i = 0; i < s.len_q; ++i) {
      for (Index j = 0; j < s.len_k; ++j) {
        // Summed in f32 as a framework would; the cells are doubles that hold f32 values.
        double& cell = dbias[bias_at_.offset(b, h, i, j)];
        cell = static_cast<Real>(cell) + ds[i * s.len_k + j];
      }
    }
  }

  void write(Array& array, Type type, const std::vector<Real>& rows, Index b, Index h, Index first,
             Index count, Index dim) {
    if (!array.given()) return;
    const Tensor t = array.tensor();
    for (Index i = 0; i < count; ++i) {
      const Index offset = row_offset(t, shape_.packed, b, h, first, i);
      for (Index d = 0; d < dim; ++d) array.set(offset + d, rounded(rows[i * dim + d], type));
    }
  }

  void save(const ScoreMatrix<Real>& m, Index b, Index h) {
    const Index first = (b * shape_.heads_q + h) * shape_.len_q * shape_.len_k;
    const Index count = m.rows * m.columns;
    if (a_.q.type == f64) {
      std::copy_n(m.scores.data(), count, whole_.as<double>() + first);
    } else if (a_.q.type == f32) {
      std::copy_n(m.scores.data(), count, whole_.as<float>() + first);
    } else {
      for (Index n = 0; n < count; ++n) store(whole_.data(), whole_.type, first + n, m.scores[n]);
    }
  }

  void write_lse(const std::vector<Real>& lse, Index b, Index h, const Sequence& s) {
    const Tensor t = results_.lse.tensor();
    for (Index i = 0; i < s.len_q; ++i) {
      results_.lse.set(lse_offset(t, shape_.packed, b, h, s.first_q, i), lse[i]);
    }
  }

  const Attention& a_;
  const Tensor& dout_;
  const Tensor& dlse_;
  const WantedTypes& wanted_;
  const Array& keep_;
  const Array& whole_;
  UnfusedResults& results_;
  Shape shape_;
  PairStrides bias_at_;
  Real keep_scale_ = 1;
  std::vector<Real> k_, v_, kt_, dk_, dv_;
};

template <class Real>
void compute(const Attention& a, const Tensor& dout, const Tensor& dlse, const WantedTypes& wanted,
             int thread_count, const Array& keep, UnfusedResults& results) {
  const Shape shape = shape_of(a);
  const Index tasks = shape.batch * shape.heads_kv;
  // dbias and dsink are shared between heads: their sums stay on one thread.
  const bool shared = results.dbias.given() || results.dsink.given();
  const int threads = shared ? 1 : static_cast<int>(std::clamp<Index>(thread_count, 1, 64));
  const Array whole(a.q.type, {shape.batch, shape.heads_q, shape.len_q, shape.len_k});
  std::atomic<Index> next{0};
  auto work = [&] {
    Worker<Real> worker(a, dout, dlse, wanted, keep, whole, results);
    for (Index task; (task = next++) < tasks;) {
      worker.run(task / shape.heads_kv, task % shape.heads_kv);
    }
  };
  std::vector<std::thread> others;
  for (int n = 1; n < threads; ++n) others.emplace_back(work);
  work();
  for (std::thread& thread : others) thread.join();
  const auto matrix = static_cast<std::size_t>(shape.len_q * shape.len_k) * sizeof(Real);
  const std::size_t matrices = 2 + (wanted.backward() ? 1 : 0) + (a.softcap > 0 ? 1 : 0);
  results.matrix_bytes = matrix * matrices * static_cast<std::size_t>(threads) + keep.byte_count() +
                         whole.byte_count();
}

// dropout_mask(attention) as (B, Hq, Sq, Sk) bytes; empty without dropout.
Array dropout_keep(const Attention& a) {
  if (!(dropout_probability(a.dropout.p) > 0)) return {};
  const Shape shape = shape_of(a);
  Array keep(boolean, {shape.batch, shape.heads_q, shape.len_q, shape.len_k});
  dropout_mask(a, keep.tensor());
  return keep;
}

}  // namespace

UnfusedResults unfused_attention(const Attention& a, const Tensor& dout, const Tensor& dlse,
                                 const WantedTypes& wanted, int threads) {
  UnfusedResults results;
  static_cast<Results&>(results) = empty_results(a, wanted);
  const Array keep = dropout_keep(a);
  if (a.q.type == f64) {
    compute<double>(a, dout, dlse, wanted, threads, keep, results);
  } else {
    compute<float>(a, dout, dlse, wanted, threads, keep, results);
  }
  for (Index n = 0; n < results.dbias.count(); ++n) {
    results.dbias.set(n, rounded(results.dbias.get(n), wanted.dbias));
  }
  return results;
}

}  // namespace regard::cli
