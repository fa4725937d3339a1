// Rounding units: the backward and forward formulas once more, on magnitudes.
//
// A probability carries the relative error u + e (4 + A_ij + mean A_i): u rounds it to the inputs'
// type, e is the arithmetic's roundoff, A_ij the magnitude of what was summed into the score, and
// its mean over the row is the error of the lse; both grow with the square root of the head size,
// as rounding errors of sums do. `tiny` covers probabilities that underflow.
#include "verify/rounding.hpp"

#include <algorithm>
#include <cmath>

#include "verify/score_matrix.hpp"

namespace regard::cli {

namespace {

using Doubles = std::vector<double>;

Doubles absolute(Doubles values) {
  for (double& x : values) x = std::fabs(x);
  return values;
}

class Units {
 public:
  Units(const Attention& a, const Tensor& dout, const Tensor& dlse, const WantedTypes& wanted)
      : a_(a),
        dout_(dout),
        dlse_(dlse),
        wanted_(wanted),
        keep_(dropout_keep(a)),
        shape_(shape_of(a)),
        units_(empty_results(a, wanted)),
        bias_at_(units_.dbias.tensor()) {
    const bool wide = a.q.type == f64;
    roundoff_ = unit_roundoff(a.q.type);
    arithmetic_ = unit_roundoff(wide ? f64 : f32);
    growth_ = std::max(1.0, std::sqrt(double(shape_.dim)) / 6);
    tiny_ = 4 * smallest_step(wide ? f64 : f32);
    // The backward pass takes delta from `out` as it was computed and stored.
    out_roundoff_ = std::max(roundoff_, unit_roundoff(wanted.out));
    out_step_ = smallest_step(wanted.out);
    keep_scale_ = 1 / (1 - dropout_probability(a.dropout.p));
  }

  Results run() {
    for (Index b = 0; b < shape_.batch; ++b) {
      const Sequence s = sequence_of(a_, shape_, b);
      for (Index kv = 0; kv < shape_.heads_kv; ++kv) {
        k_ = dense_rows<double>(a_.k, shape_.packed, b, kv, s.first_k, s.len_k, shape_.dim);
        v_ = dense_rows<double>(a_.v, shape_.packed, b, kv, s.first_k, s.len_k, shape_.dim_v);
        kt_ = transposed(k_, s.len_k, shape_.dim);
        k_ = absolute(std::move(k_));
        v_ = absolute(std::move(v_));
        dk_.assign(k_.size(), 0);
        dv_.assign(v_.size(), 0);
        for (Index h = kv * shape_.group(); h < (kv + 1) * shape_.group(); ++h) head(s, b, h);
        write(units_.dk, dk_, b, kv, s.first_k, s.len_k, shape_.dim);
        write(units_.dv, dv_, b, kv, s.first_k, s.len_k, shape_.dim_v);
      }
    }
    return std::move(units_);
  }

 private:
  void head(const Sequence& s, Index b, Index h) {
    auto q = dense_rows<double>(a_.q, shape_.packed, b, h, s.first_q, s.len_q, shape_.dim);
    ScoreMatrix<double> m =
        score_matrix(a_, shape_, s, b, h, q, kt_, {.round_to = Type::none, .magnitude = true});
    q = absolute(std::move(q));
    Doubles dout, g;  // g_ij = sum |dout_i| |v_j|
    const bool backward = wanted_.backward();
    if (backward) {
      dout = absolute(
          dense_rows<double>(dout_, shape_.packed, b, h, s.first_q, s.len_q, shape_.dim_v));
      g.resize(m.scores.size());
      const auto vt = transposed(v_, s.len_k, shape_.dim_v);
      multiply_add(dout.data(), vt.data(), g.data(), s.len_q, shape_.dim_v, s.len_k);
    }
    const double sink = a_.sink.given() ? load(a_.sink.data, a_.sink.type, h * a_.sink.strides[0])
                                        : kHidden<double>;
    const auto* const keep = keep_.given() ? keep_.as<std::uint8_t>() : nullptr;
    Doubles out(static_cast<std::size_t>(s.len_q * shape_.dim_v)), dq(q.size());
    Doubles magnitude(static_cast<std::size_t>(shape_.dim_v));
    const double scale = std::fabs(scale_of(a_, shape_));
    for (Index i = 0; i < s.len_q; ++i) {
      double* const p = m.scores.data() + i * m.columns;
      const double* const a = m.magnitude.data() + i * m.columns;
      const Row row = softmax(p, a, m.columns, sink);
      const Index keep_row = ((b * shape_.heads_q + h) * shape_.len_q + i) * shape_.len_k;
      std::fill(magnitude.begin(), magnitude.end(), 0);
      for (Index j = 0; j < m.columns; ++j) {
        if (p[j] < 0) continue;  // hidden
        const double z = !keep ? 1 : keep[keep_row + j] ? keep_scale_ : 0;
        const double unit = z * weight(p[j], a[j], row);
        for (Index d = 0; d < shape_.dim_v; ++d) {
          out[i * shape_.dim_v + d] += unit * v_[j * shape_.dim_v + d];
          magnitude[d] += z * p[j] * v_[j * shape_.dim_v + d];
          if (backward) dv_[j * shape_.dim_v + d] += unit * dout[i * shape_.dim_v + d];
        }
      }
      if (units_.lse.given() && row.lse != kHidden<double>) {
        const Tensor t = units_.lse.tensor();
        units_.lse.set(lse_offset(t, shape_.packed, b, h, s.first_q, i),
                       arithmetic_ * (1 + growth_ * row.mean + std::fabs(row.lse)));
      }
      if (!backward) continue;
      double delta = 0, delta_unit = 0;
      for (Index d = 0; d < shape_.dim_v; ++d) {
        if (magnitude[d] == 0) continue;  // sees nothing: dout may hold NaN
        delta += dout[i * shape_.dim_v + d] * magnitude[d];
        delta_unit += dout[i * shape_.dim_v + d] *
                      (out[i * shape_.dim_v + d] + out_roundoff_ * magnitude[d] + out_step_);
      }
      if (dlse_.given() && (row.sees || sink != kHidden<double>)) {
        delta += std::fabs(
            load(dlse_.data, dlse_.type, lse_offset(dlse_, shape_.packed, b, h, s.first_q, i)));
      }
      if (units_.dsink.given() && row.sink_share > 0 && std::isfinite(delta)) {
        units_.dsink.as<double>()[h] +=
            weight(row.sink_share, std::fabs(sink), row) * delta + row.sink_share * delta_unit;
      }
      for (Index j = 0; j < m.columns; ++j) {
        if (p[j] < 0) continue;
        const double z = !keep ? 1 : keep[keep_row + j] ? keep_scale_ : 0;
        const double terms = z * g[i * m.columns + j] + delta;
        double unit = weight(p[j], a[j], row) * terms + p[j] * delta_unit;
        if (units_.dbias.given()) {
          units_.dbias.as<double>()[bias_at_.offset(b, h, i, j)] += unit;
        }
        if (!m.slope.empty()) {
          unit = unit * m.slope[i * m.columns + j] + 2 * arithmetic_ * p[j] * terms;
        }
        unit *= scale;
        for (Index d = 0; d < shape_.dim; ++d) {
          dq[i * shape_.dim + d] += unit * k_[j * shape_.dim + d];
          dk_[j * shape_.dim + d] += unit * q[i * shape_.dim + d];
        }
      }
    }
    write(units_.out, out, b, h, s.first_q, s.len_q, shape_.dim_v);
    write(units_.dq, dq, b, h, s.first_q, s.len_q, shape_.dim);
  }

  struct Row {
    double lse = kHidden<double>, mean = 0, sink_share = 0;
    bool sees = false;
  };

  // Scores become probabilities in place; hidden pairs become -1, so that underflow stays 0.
  static Row softmax(double* scores, const double* magnitude, Index columns, double sink) {
    Row row;
    double top = sink;
    for (Index j = 0; j < columns; ++j) {
      top = std::max(top, scores[j]);
      row.sees = row.sees || scores[j] != kHidden<double>;
    }
    double sum = top == kHidden<double> ? 0 : std::exp(sink - top);
    for (Index j = 0; j < columns; ++j) {
      const bool hidden = scores[j] == kHidden<double>;
      scores[j] = hidden ? -1 : std::exp(scores[j] - top);
      if (!hidden) sum += scores[j];
    }
    if (sum == 0) return row;
    for (Index j = 0; j < columns; ++j) {
      if (scores[j] < 0) continue;
      scores[j] /= sum;
      row.mean += scores[j] * magnitude[j];
    }
    row.sink_share = std::exp(sink - top) / sum;
    row.mean += row.sink_share > 0 ? row.sink_share * std::fabs(sink) : 0;
    row.lse = top + std::log(sum);
    return row;
  }

  double weight(double p, double magnitude, const Row& row) const {
    return p * (roundoff_ + arithmetic_ * (4 + growth_ * (magnitude + row.mean))) + tiny_;
  }

  void write(Array& array, const Doubles& rows, Index b, Index h, Index first, Index count,
             Index dim) {
    if (!array.given()) return;
    const Tensor t = array.tensor();
    for (Index i = 0; i < count; ++i) {
      const Index offset = row_offset(t, shape_.packed, b, h, first, i);
      std::copy_n(rows.data() + i * dim, dim, array.as<double>() + offset);
    }
  }

  const Attention& a_;
  const Tensor& dout_;
  const Tensor& dlse_;
  const WantedTypes& wanted_;
  const Array keep_;
  const Shape shape_;
  Results units_;
  const PairStrides bias_at_;
  double roundoff_ = 0, out_roundoff_ = 0, out_step_ = 0, arithmetic_ = 0, growth_ = 1, tiny_ = 0,
         keep_scale_ = 1;
  Doubles k_, v_, kt_, dk_, dv_;
};

}  // namespace

Results rounding_units(const Attention& attention, const Tensor& dout, const Tensor& dlse,
                       const WantedTypes& wanted) {
  return Units(attention, dout, dlse, wanted).run();
}

}  // namespace regard::cli
