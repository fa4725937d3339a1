// Attention one row at a time, in float64, by the textbook.
#include "rows/rows.hpp"

#include <cmath>
#include <limits>

#include "rows/element.hpp"
#include "semantics/score.h"
#include "semantics/softmax.h"

namespace regard {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The Lanes policy of one double.
struct Double {
  using Real = double;
  using Vec = double;
  static double set(double x) { return x; }
  static double mul(double a, double b) { return a * b; }
  static double sub(double a, double b) { return a - b; }
  static double fma(double a, double b, double c) { return a * b + c; }
  static double tanh(double x) { return std::tanh(x); }
};

double load_row(const View& view, const Head& head, int64 h, int64 first, int64 row, int64 column) {
  return load_element(view, offset_of(view.strides, head.b, h, first, row) + column);
}

double dot(const View& a, int64 a_begin, const View& b, int64 b_begin, int64 size) {
  double sum = 0;
  for (int64 d = 0; d < size; ++d) {
    sum += load_element(a, a_begin + d) * load_element(b, b_begin + d);
  }
  return sum;
}

int64 score_offset(const View& view, const Head& head, int64 i, int64 j) {
  return offset_of(view.strides, head.b, head.h, 0, i) + j * view.strides.column;
}

// Where the pair's q . k, and what the score adds to it.
struct Pair {
  double raw;
  double score;
};

Pair score_pair(const Head& head, int64 i, int64 j) {
  const Problem& p = head.problem;
  const Sequence& s = head.seq;
  const double raw = dot(p.q, offset_of(p.q.strides, head.b, head.h, s.first_q, i), p.k,
                         offset_of(p.k.strides, head.b, head.kv(), s.first_k, j), p.sizes.dim);
  const double bias = p.features.bias ? load_element(p.bias, score_offset(p.bias, head, i, j)) : 0;
  double alibi = 0;
  if (p.features.alibi) {
    alibi = load_element(p.alibi_slopes, offset_of(p.alibi_slopes.strides, head.b, head.h, 0, 0)) *
            alibi_distance<double>(i, j, s.len_q, s.len_k);
  }
  const auto logit = score<Double>(p.features, p.score, raw, bias, alibi);
  return {raw, logit.value * logit.unit};
}

double sink_of(const Head& head) {
  const Problem& p = head.problem;
  return p.features.sink ? load_element(p.sink, head.h * p.sink.strides.head) : -kInfinity;
}

double dropout_factor(const Head& head, int64 i, int64 j) {
  const Problem& p = head.problem;
  if (!p.features.dropout) return 1;
  return keep(p.dropout, head.b, head.h, i, j) ? keep_scale(p.dropout) : 0;
}

void store(const View& view, int64 offset, double value, bool accumulate) {
  store_element(view, offset, accumulate ? load_element(view, offset) + value : value);
}

// P, Z dP and ds of a visible pair.
struct PairGradient {
  double kept_weight;  // Z P
  double ds;           // through softmax and softcap, before the scale
  double dscore;       // before the softcap: what the bias receives
};

PairGradient pair_gradient(const Head& head, int64 i, int64 j, double delta) {
  const Problem& p = head.problem;
  const Sequence& s = head.seq;
  const Pair pair = score_pair(head, i, j);
  const double weight = std::exp(pair.score - load_row(p.lse, head, head.h, s.first_q, i, 0));
  const double factor = dropout_factor(head, i, j);
  const double dweight =
      factor == 0
          ? 0
          : factor * dot(p.dout, offset_of(p.dout.strides, head.b, head.h, s.first_q, i), p.v,
                         offset_of(p.v.strides, head.b, head.kv(), s.first_k, j), p.sizes.dim_v);
  const double dscore = weight * (dweight - delta);
  return {factor * weight, dscore * score_slope<Double>(p.features, p.score, pair.raw), dscore};
}

}  // namespace

bool visible(const Head& head, int64 i, int64 j) {
  const Problem& p = head.problem;
  const Sequence& s = head.seq;
  if (!visible_keys(p.mask_params, i, s.len_q, s.len_k).contains(j)) return false;
  if (p.features.mask && load_element(p.mask, score_offset(p.mask, head, i, j)) == 0) return false;
  return !p.features.bias || load_element(p.bias, score_offset(p.bias, head, i, j)) != -kInfinity;
}

void forward_row(const Head& head, int64 i, std::vector<double>& scores) {
  const Problem& p = head.problem;
  const Sequence& s = head.seq;
  const Interval keys = visible_keys(p.mask_params, i, s.len_q, s.len_k);
  const double sink = sink_of(head);
  double max = sink;
  bool sees_any = false;
  scores.assign(s.len_k, -kInfinity);
  std::vector<bool> seen(s.len_k, false);
  for (int64 j = keys.begin; j < keys.end; ++j) {
    if (!visible(head, i, j)) continue;
    scores[j] = score_pair(head, i, j).score;
    max = std::fmax(max, scores[j]);
    seen[j] = sees_any = true;
  }
  double sum = sink > -kInfinity ? std::exp(sink - max) : 0;
  for (int64 j = keys.begin; j < keys.end; ++j) {
    if (seen[j]) sum += max == -kInfinity && scores[j] == max ? 0 : std::exp(scores[j] - max);
  }
  if (std::isnan(sink)) sum = sink;
  const double lse = sees_any && !(max == -kInfinity && sum == 0) ? max + std::log(sum) : sink;
  const int64 out = offset_of(p.out.strides, head.b, head.h, s.first_q, i);
  for (int64 d = 0; d < p.sizes.dim_v; ++d) {
    double sum_v = 0;
    for (int64 j = keys.begin; j < keys.end; ++j) {
      if (!seen[j] || (scores[j] == -kInfinity && lse == -kInfinity)) continue;
      sum_v += dropout_factor(head, i, j) * std::exp(scores[j] - lse) *
               load_row(p.v, head, head.kv(), s.first_k, j, d);
    }
    store_element(p.out, out + d, sum_v);
  }
  if (p.lse.given()) {
    store_element(p.lse, offset_of(p.lse.strides, head.b, head.h, s.first_q, i), lse);
  }
}

double delta_of(const Head& head, int64 i) {
  const Problem& p = head.problem;
  const int64 first = head.seq.first_q;
  const int64 out = offset_of(p.out.strides, head.b, head.h, first, i);
  const int64 dout = offset_of(p.dout.strides, head.b, head.h, first, i);
  double delta = 0;
  for (int64 d = 0; d < p.sizes.dim_v; ++d) {
    // A row that sees nothing has out = 0 and takes nothing from dout, whatever that holds.
    const double value = load_element(p.out, out + d);
    if (value != 0) delta += value * load_element(p.dout, dout + d);
  }
  if (p.dlse.given()) delta -= load_row(p.dlse, head, head.h, first, i, 0);
  return delta;
}

void query_gradient_row(const Head& head, int64 i, double delta, double* dbias_sum,
                        std::vector<double>& sum) {
  const Problem& p = head.problem;
  const Sequence& s = head.seq;
  const Interval keys = visible_keys(p.mask_params, i, s.len_q, s.len_k);
  sum.assign(p.sizes.dim, 0);
  for (int64 j = keys.begin; j < keys.end; ++j) {
    if (!visible(head, i, j)) continue;
    const PairGradient pair = pair_gradient(head, i, j, delta);
    for (int64 d = 0; p.dq.given() && d < p.sizes.dim; ++d) {
      sum[d] += pair.ds * load_row(p.k, head, head.kv(), s.first_k, j, d);
    }
    if (dbias_sum) {
      const int64 index[4] = {head.b, head.h, i, j};
      int64 offset = 0;
      for (int axis = 0; axis < 4; ++axis) {
        offset = offset * p.bias_sizes[axis] + (p.bias_sizes[axis] == 1 ? 0 : index[axis]);
      }
      dbias_sum[offset] += pair.dscore;
    }
  }
  if (!p.dq.given()) return;
  const int64 dq = offset_of(p.dq.strides, head.b, head.h, s.first_q, i);
  for (int64 d = 0; d < p.sizes.dim; ++d) {
    store(p.dq, dq + d, p.score.scale * sum[d], p.accumulate);
  }
}

void key_gradient_row(const Problem& p, int64 b, int64 kv, int64 j, const double* deltas,
                      std::vector<double>& sum) {
  const Sequence s = sequence(p.sequences, b);
  const int64 dim = p.sizes.dim, dim_v = p.sizes.dim_v, group = p.sizes.group();
  sum.assign(dim + dim_v, 0);
  double* const dk = sum.data();
  double* const dv = dk + dim;
  const Interval queries = visible_queries(p.mask_params, j, s.len_q, s.len_k);
  for (int64 g = 0; g < group; ++g) {
    const Head head(p, b, kv * group + g);
    for (int64 i = queries.begin; i < queries.end; ++i) {
      if (!visible(head, i, j)) continue;
      const PairGradient pair = pair_gradient(head, i, j, deltas[g * s.len_q + i]);
      for (int64 d = 0; d < dim; ++d) {
        dk[d] += pair.ds * load_row(p.q, head, head.h, s.first_q, i, d);
      }
      for (int64 d = 0; d < dim_v; ++d) {
        dv[d] += pair.kept_weight * load_row(p.dout, head, head.h, s.first_q, i, d);
      }
    }
  }
  const auto write = [&](const View& view, const double* row, int64 size, double scale) {
    if (!view.given()) return;
    const int64 offset = offset_of(view.strides, b, kv, s.first_k, j);
    for (int64 d = 0; d < size; ++d) store(view, offset + d, scale * row[d], p.accumulate);
  };
  write(p.dk, dk, dim, p.score.scale);
  write(p.dv, dv, dim_v, 1);
}

double sink_gradient(const Head& head, const double* deltas) {
  const Problem& p = head.problem;
  const double sink = sink_of(head);
  double sum = 0;
  for (int64 i = 0; sink != -kInfinity && i < head.seq.len_q; ++i) {
    sum -= std::exp(sink - load_row(p.lse, head, head.h, head.seq.first_q, i, 0)) * deltas[i];
  }
  return sum;
}

}  // namespace regard
