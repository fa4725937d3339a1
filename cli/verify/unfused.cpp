// Plain attention: score matrix, softmax, product; arithmetic in f32 (f64 for f64), every matrix
// rounded to the inputs' type when it is stored.
#include "verify/unfused.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <thread>

#include "verify/score_matrix.hpp"

namespace regard::cli {

namespace {

Sizes sizes_of(const Tensor& t) { return {t.sizes.begin(), t.sizes.begin() + t.rank}; }

// Everything one kv head's work reads and writes.
template <class Real>
class Worker {
 public:
  Worker(const Attention& a, const Tensor& dout, const Tensor& dlse, const UnfusedOptions& options,
         const Array& keep, const Array& whole, UnfusedResults& results)
      : a_(a),
        dout_(dout),
        dlse_(dlse),
        options_(options),
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
    write(results_.dk, options_.wanted.dk, dk_, b, kv, s.first_k, s.len_k, shape_.dim);
    write(results_.dv, options_.wanted.dv, dv_, b, kv, s.first_k, s.len_k, shape_.dim_v);
  }

 private:
  void head(const Sequence& s, Index b, Index h) {
    const auto q = dense_rows<Real>(a_.q, shape_.packed, b, h, s.first_q, s.len_q, shape_.dim);
    ScoreOptions score_options;
    if (options_.round_scores) score_options.round_to = a_.q.type;
    ScoreMatrix<Real> m = score_matrix(a_, shape_, s, b, h, q, kt_, score_options);
    std::vector<Real> sink_share;
    const std::vector<Real> lse = softmax(m, h, sink_share);
    write_lse(lse, b, h, s);
    save(m, b, h);

    std::vector<Real> dropped = m.scores;  // Z * P
    drop(dropped, b, h, s);
    round_all(dropped, a_.q.type);
    std::vector<Real> out(static_cast<std::size_t>(s.len_q * shape_.dim_v));
    accumulate_visible(dropped, m.scores, v_, out, s.len_q, s.len_k, shape_.dim_v);
    write(results_.out, options_.wanted.out, out, b, h, s.first_q, s.len_q, shape_.dim_v);
    if (options_.wanted.backward()) backward(s, b, h, q, m, dropped, sink_share);
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

  // out[i] += weight[i][j] * rows[j] over pairs with a probability: hidden rows may hold NaN.
  static void accumulate_visible(const std::vector<Real>& weight, const std::vector<Real>& share,
                                 const std::vector<Real>& rows, std::vector<Real>& out, Index count,
                                 Index columns, Index dim) {
    for (Index i = 0; i < count; ++i) {
      for (Index j = 0; j < columns; ++j) {
        if (share[i * columns + j] == 0) continue;
        const Real factor = weight[i * columns + j];
        for (Index d = 0; d < dim; ++d) out[i * dim + d] += factor * rows[j * dim + d];
      }
    }
  }

  static void accumulate_transposed(const std::vector<Real>& weight, const std::vector<Real>& share,
                                    const std::vector<Real>& rows, std::vector<Real>& out,
                                    Index count, Index columns, Index dim) {
    for (Index i = 0; i < count; ++i) {
      for (Index j = 0; j < columns; ++j) {
        if (share[i * columns + j] == 0) continue;
        const Real factor = weight[i * columns + j];
        for (Index d = 0; d < dim; ++d) out[j * dim + d] += factor * rows[i * dim + d];
      }
    }
  }

  void backward(const Sequence& s, Index b, Index h, const std::vector<Real>& q,
                const ScoreMatrix<Real>& m, const std::vector<Real>& dropped,
                const std::vector<Real>& sink_share) {
    const auto dout =
        dense_rows<Real>(dout_, shape_.packed, b, h, s.first_q, s.len_q, shape_.dim_v);
    accumulate_transposed(dropped, m.scores, dout, dv_, s.len_q, s.len_k, shape_.dim_v);

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
    accumulate_visible(ds, m.scores, k_, dq, s.len_q, s.len_k, shape_.dim);
    accumulate_transposed(ds, m.scores, q, dk_, s.len_q, s.len_k, shape_.dim);
    write(results_.dq, options_.wanted.dq, dq, b, h, s.first_q, s.len_q, shape_.dim);
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
    if (!whole_.given()) return;
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
  const UnfusedOptions& options_;
  const Array& keep_;
  const Array& whole_;
  UnfusedResults& results_;
  Shape shape_;
  PairStrides bias_at_;
  Real keep_scale_ = 1;
  std::vector<Real> k_, v_, kt_, dk_, dv_;
};

template <class Real>
void compute(const Attention& a, const Tensor& dout, const Tensor& dlse,
             const UnfusedOptions& options, const Array& keep, UnfusedResults& results) {
  const Shape shape = shape_of(a);
  const Index tasks = shape.batch * shape.heads_kv;
  // dbias and dsink are shared between heads: their sums stay on one thread.
  const bool shared = results.dbias.given() || results.dsink.given();
  const int threads = shared ? 1 : static_cast<int>(std::clamp<Index>(options.threads, 1, 64));
  Array whole;
  if (options.whole_batch) {
    whole = Array(a.q.type, {shape.batch, shape.heads_q, shape.len_q, shape.len_k});
  }
  std::atomic<Index> next{0};
  auto work = [&] {
    Worker<Real> worker(a, dout, dlse, options, keep, whole, results);
    for (Index task; (task = next++) < tasks;) {
      worker.run(task / shape.heads_kv, task % shape.heads_kv);
    }
  };
  std::vector<std::thread> others;
  for (int n = 1; n < threads; ++n) others.emplace_back(work);
  work();
  for (std::thread& thread : others) thread.join();
  const auto matrix = static_cast<std::size_t>(shape.len_q * shape.len_k) * sizeof(Real);
  const std::size_t matrices = 2 + (options.wanted.backward() ? 1 : 0) + (a.softcap > 0 ? 1 : 0);
  results.matrix_bytes = matrix * matrices * static_cast<std::size_t>(threads) + keep.byte_count() +
                         whole.byte_count();
}

}  // namespace

Results empty_results(const Attention& a, const WantedTypes& wanted) {
  const Shape shape = shape_of(a);
  Results r;
  Sizes out = sizes_of(a.q);
  out.back() = shape.dim_v;
  r.out = Array(f64, out);
  if (shape.packed) {
    r.lse = Array(f64, {shape.heads_q, a.q.sizes[0]});
  } else {
    r.lse = Array(f64, {shape.batch, shape.heads_q, shape.len_q});
  }
  if (wanted.dq != Type::none) r.dq = Array(f64, sizes_of(a.q));
  if (wanted.dk != Type::none) r.dk = Array(f64, sizes_of(a.k));
  if (wanted.dv != Type::none) r.dv = Array(f64, sizes_of(a.v));
  if (wanted.dbias != Type::none) r.dbias = Array(f64, sizes_of(a.bias));
  if (wanted.dsink != Type::none) r.dsink = Array(f64, sizes_of(a.sink));
  return r;
}

Results hidden_results(const Attention& a, const WantedTypes& wanted) {
  Results r = empty_results(a, wanted);
  std::fill_n(r.lse.as<double>(), r.lse.count(), kHidden<double>);
  return r;
}

Array dropout_keep(const Attention& a) {
  if (!(dropout_probability(a.dropout.p) > 0)) return {};
  const Shape shape = shape_of(a);
  Array keep(boolean, {shape.batch, shape.heads_q, shape.len_q, shape.len_k});
  dropout_mask(a, keep.tensor());
  return keep;
}

UnfusedResults unfused_attention(const Attention& a, const Tensor& dout, const Tensor& dlse,
                                 const UnfusedOptions& options) {
  UnfusedResults results;
  static_cast<Results&>(results) = hidden_results(a, options.wanted);
  const Array keep = dropout_keep(a);
  if (a.q.type == f64) {
    compute<double>(a, dout, dlse, options, keep, results);
  } else {
    compute<float>(a, dout, dlse, options, keep, results);
  }
  for (Index n = 0; n < results.dbias.count(); ++n) {
    results.dbias.set(n, rounded(results.dbias.get(n), options.wanted.dbias));
  }
  return results;
}

}  // namespace regard::cli
