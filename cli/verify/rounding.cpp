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
  // A head's operands as magnitudes, the scores of which become probabilities, and its results.
  struct Head {
    const Sequence& s;
    Index b, h;
    ScoreMatrix<double> m;
    Doubles q, dout, g;  // g_ij = sum |dout_i| |v_j|
    double sink;
    Doubles out, dq;
  };

  struct Row {
    double lse = kHidden<double>, mean = 0, sink_share = 0;
    bool sees = false;
  };

  // delta of a row, and its error.
  struct Delta {
    double value = 0, unit = 0;
  };

  void head(const Sequence& s, Index b, Index h) {
    Head x = operands_of(s, b, h);
    Doubles magnitude(static_cast<std::size_t>(shape_.dim_v));
    for (Index i = 0; i < s.len_q; ++i) {
      double* const p = x.m.scores.data() + i * x.m.columns;
      const Row row = softmax(p, x.m.magnitude.data() + i * x.m.columns, x.m.columns, x.sink);
      std::fill(magnitude.begin(), magnitude.end(), 0);
      add_to_out(x, i, row, magnitude);
      if (units_.lse.given() && row.lse != kHidden<double>) {
        const Tensor t = units_.lse.tensor();
        units_.lse.set(lse_offset(t, shape_.packed, b, h, s.first_q, i),
                       arithmetic_ * (1 + growth_ * row.mean + std::fabs(row.lse)));
      }
      if (wanted_.backward()) add_to_gradients(x, i, row, delta_of(x, i, row, magnitude));
    }
    write(units_.out, x.out, b, h, s.first_q, s.len_q, shape_.dim_v);
    write(units_.dq, x.dq, b, h, s.first_q, s.len_q, shape_.dim);
  }

  Head operands_of(const Sequence& s, Index b, Index h) const {
    Doubles q = dense_rows<double>(a_.q, shape_.packed, b, h, s.first_q, s.len_q, shape_.dim);
    Head x{
        .s = s,
        .b = b,
        .h = h,
        .m = score_matrix(a_, shape_, s, b, h, q, kt_, {.round_to = Type::none, .magnitude = true}),
        .q = absolute(std::move(q)),
        .dout = {},
        .g = {},
        .sink = a_.sink.given() ? load(a_.sink.data, a_.sink.type, h * a_.sink.strides[0])
                                : kHidden<double>,
        .out = Doubles(static_cast<std::size_t>(s.len_q * shape_.dim_v)),
        .dq = {}};
    x.dq.resize(x.q.size());
    if (wanted_.backward()) {
      x.dout = absolute(
          dense_rows<double>(dout_, shape_.packed, b, h, s.first_q, s.len_q, shape_.dim_v));
      x.g.resize(x.m.scores.size());
      const auto vt = transposed(v_, s.len_k, shape_.dim_v);
      multiply_add(x.dout.data(), vt.data(), x.g.data(), s.len_q, shape_.dim_v, s.len_k);
    }
    return x;
  }

  // What dropout multiplies a weight by.
  double kept(const Head& x, Index i, Index j) const {
    if (!keep_.given()) return 1;
    const Index row = ((x.b * shape_.heads_q + x.h) * shape_.len_q + i) * shape_.len_k;
    return keep_.as<std::uint8_t>()[row + j] ? keep_scale_ : 0;
  }

  // The units of a row of out, and of the row's part of dv. magnitude: of the row of out itself.
  void add_to_out(Head& x, Index i, const Row& row, Doubles& magnitude) {
    const double* const p = x.m.scores.data() + i * x.m.columns;
    const double* const a = x.m.magnitude.data() + i * x.m.columns;
    for (Index j = 0; j < x.m.columns; ++j) {
      if (p[j] < 0) continue;  // hidden
      const double z = kept(x, i, j), unit = z * weight(p[j], a[j], row);
      for (Index d = 0; d < shape_.dim_v; ++d) {
        x.out[i * shape_.dim_v + d] += unit * v_[j * shape_.dim_v + d];
        magnitude[d] += z * p[j] * v_[j * shape_.dim_v + d];
        if (!x.dout.empty()) dv_[j * shape_.dim_v + d] += unit * x.dout[i * shape_.dim_v + d];
      }
    }
  }

  // And adds to the units of dsink.
  Delta delta_of(const Head& x, Index i, const Row& row, const Doubles& magnitude) {
    Delta delta;
    for (Index d = 0; d < shape_.dim_v; ++d) {
      if (magnitude[d] == 0) continue;  // sees nothing: dout may hold NaN
      const double dout = x.dout[i * shape_.dim_v + d], out = x.out[i * shape_.dim_v + d];
      delta.value += dout * magnitude[d];
      delta.unit += dout * (out + out_roundoff_ * magnitude[d] + out_step_);
    }
    if (dlse_.given() && (row.sees || x.sink != kHidden<double>)) {
      delta.value += std::fabs(
          load(dlse_.data, dlse_.type, lse_offset(dlse_, shape_.packed, x.b, x.h, x.s.first_q, i)));
    }
    if (units_.dsink.given() && row.sink_share > 0 && std::isfinite(delta.value)) {
      units_.dsink.as<double>()[x.h] +=
          weight(row.sink_share, std::fabs(x.sink), row) * delta.value +
          row.sink_share * delta.unit;
    }
    return delta;
  }

  // The units of a row of dq, and of the row's parts of dk and dbias.
  void add_to_gradients(Head& x, Index i, const Row& row, const Delta& delta) {
    const double* const p = x.m.scores.data() + i * x.m.columns;
    const double* const a = x.m.magnitude.data() + i * x.m.columns;
    const double scale = std::fabs(scale_of(a_, shape_));
    for (Index j = 0; j < x.m.columns; ++j) {
      if (p[j] < 0) continue;
      const double terms = kept(x, i, j) * x.g[i * x.m.columns + j] + delta.value;
      double unit = weight(p[j], a[j], row) * terms + p[j] * delta.unit;
      if (units_.dbias.given()) {
        units_.dbias.as<double>()[bias_at_.offset(x.b, x.h, i, j)] += unit;
      }
      if (!x.m.slope.empty()) {
        unit = unit * x.m.slope[i * x.m.columns + j] + 2 * arithmetic_ * p[j] * terms;
      }
      unit *= scale;
      for (Index d = 0; d < shape_.dim; ++d) {
        x.dq[i * shape_.dim + d] += unit * k_[j * shape_.dim + d];
        dk_[j * shape_.dim + d] += unit * x.q[i * shape_.dim + d];
      }
    }
  }

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
