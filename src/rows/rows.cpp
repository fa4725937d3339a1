// Attention one row at a time, in float64, by the textbook.
#include "rows/rows.hpp"

#include <algorithm>
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
  static double abs(double x) { return std::fabs(x); }
  static double tanh(double x) { return std::tanh(x); }
  static double max(double a, double b) { return a > b ? a : b; }
};

// The value of a tensor that has one for each row: lse, dlse.
double row_value(const View& view, const Head& head, int64 i) {
  return load_element(view, offset_of(view.strides, head.b, head.h, head.seq.first_q, i));
}

const double* load_row(std::vector<double>& to, const View& view, int64 offset, int64 size) {
  to.resize(std::size_t(size));
  load_elements(view, offset, size, to.data());
  return to.data();
}
const double* load_query_row(std::vector<double>& to, const View& view, const Head& head, int64 i,
                             int64 size) {
  return load_row(to, view, offset_of(view.strides, head.b, head.h, head.seq.first_q, i), size);
}
const double* load_key_row(std::vector<double>& to, const View& view, const Head& head, int64 j,
                           int64 size) {
  return load_row(to, view, offset_of(view.strides, head.b, head.kv(), head.seq.first_k, j), size);
}

// Partial sums side by side: quicker than one, and more exact.
double dot(const double* a, const double* b, int64 size) {
  constexpr int kParts = 8;
  double part[kParts] = {};
  int64 d = 0;
  for (; d + kParts <= size; d += kParts) {
    for (int t = 0; t < kParts; ++t) part[t] += a[d + t] * b[d + t];
  }
  for (int t = 0; d < size; ++d, ++t) part[t] += a[d] * b[d];
  return ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
}

// out . dout of a row. Where nothing is seen, out is 0 and takes nothing from dout, whatever that
// holds.
double product_of_rows(const View& out, int64 out_at, const View& dout, int64 dout_at, int64 size) {
  constexpr int64 kPart = 64;
  double x[kPart], y[kPart], sum = 0;
  for (int64 d = 0; d < size; d += kPart) {
    const int64 count = std::min(kPart, size - d);
    load_elements(out, out_at + d, count, x);
    load_elements(dout, dout_at + d, count, y);
    for (int64 e = 0; e < count; ++e) y[e] = x[e] == 0 ? 0 : y[e];
    sum += dot(x, y, count);
  }
  return sum;
}

int64 score_offset(const View& view, const Head& head, int64 i, int64 j) {
  return offset_of(view.strides, head.b, head.h, 0, i) + j * view.strides.column;
}

// A pair's q . k and its logit.
struct Pair {
  double raw;
  double score;
};

Pair score_pair(const Head& head, int64 i, int64 j, const double* q, const double* k) {
  const Problem& p = head.problem;
  const Sequence& s = head.seq;
  const double raw = dot(q, k, p.sizes.dim);
  double bias = p.features.bias ? load_element(p.bias, score_offset(p.bias, head, i, j)) : 0;
  // As the kernels, whose rows may be computed here again.
  if (!computes_in_f64(p) && bias < kLowestBias<float>) bias = kLowestBias<float>;
  const auto logit = score<Double>(p.features, p.score, raw, bias,
                                   head_terms<Double>(p.features, p, head.b, head.h),
                                   relative_position<double>(s, i, j));
  return {raw, logit.value * logit.unit};
}

double sink_of(const Head& head) {
  const Problem& p = head.problem;
  return p.features.sink ? load_element(p.sink, head.h * p.sink.strides.head) : -kInfinity;
}

double dropout_factor(const Head& head, int64 i, int64 j) {
  const Problem& p = head.problem;
  if (!p.features.dropout) return 1;
  return keep(p.dropout, head.seq.positions, head.b, head.h, i, j) ? keep_scale(p.dropout) : 0;
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

// Reads q and dout of query i, k and v of key j from the scratch.
PairGradient pair_gradient(const Head& head, int64 i, int64 j, double delta,
                           const RowScratch& rows) {
  const Problem& p = head.problem;
  const Pair pair = score_pair(head, i, j, rows.q.data(), rows.k.data());
  const double lse = row_value(p.lse, head, i);
  const double weight = std::exp(pair.score - (lse == -kInfinity ? kInfinity : lse));
  const double factor = dropout_factor(head, i, j);
  const double dweight =
      factor == 0 ? 0 : factor * dot(rows.dout.data(), rows.v.data(), p.sizes.dim_v);
  const double dscore = weight * (dweight - delta);
  return {factor * weight, dscore * score_slope<Double>(p.features, p.score, pair.raw), dscore};
}

// Compensated summation (Kahan, 1965): the judge's sums must not be longer than the judged ones'.
void add_to(double& sum, double& lost, double x) {
  const double term = x - lost, total = sum + term;
  lost = total - total == 0 ? (total - sum) - term : 0;  // an infinite sum stays infinite
  sum = total;
}

void add_multiple(RowSum& to, double factor, const std::vector<double>& row) {
  for (std::size_t d = 0; d < row.size(); ++d) add_to(to.sum[d], to.lost[d], factor * row[d]);
}

// Writes a row of out and lse, or merges it into what they hold.
void write_row(const Head& head, int64 i, const double* own, double own_lse) {
  const Problem& p = head.problem;
  const int64 first = head.seq.first_q;
  const int64 out = offset_of(p.out.strides, head.b, head.h, first, i);
  const int64 at = offset_of(p.lse.strides, head.b, head.h, first, i);
  const double given_lse = p.continues ? load_element(p.lse, at) : -kInfinity;
  const bool begins = given_lse == -kInfinity;
  if (!begins && own_lse == -kInfinity) return;
  const double lse = begins ? own_lse
                            : std::fmax(given_lse, own_lse) +
                                  std::log1p(std::exp(-std::fabs(given_lse - own_lse)));
  const double factor = std::exp(given_lse - lse), own_factor = std::exp(own_lse - lse);
  for (int64 d = 0; d < p.sizes.dim_v; ++d) {
    const double merged =
        begins ? own[d] : factor * load_element(p.out, out + d) + own_factor * own[d];
    store_element(p.out, out + d, merged);
  }
  if (p.lse.given()) store_element(p.lse, at, lse);
}

}  // namespace

bool visible(const Head& head, int64 i, int64 j) {
  const Problem& p = head.problem;
  const Sequence& s = head.seq;
  if (!visible_keys(p.mask_params, s, i).contains(j)) return false;
  if (p.features.mask && load_element(p.mask, score_offset(p.mask, head, i, j)) == 0) return false;
  if (!shown_by_spans(p.features, p, s, head.b, head.h, i, j)) return false;
  return !p.features.bias || load_element(p.bias, score_offset(p.bias, head, i, j)) != -kInfinity;
}

void forward_row(const Head& head, int64 i, RowScratch& rows) {
  const Problem& p = head.problem;
  const Sequence& s = head.seq;
  const Interval keys = visible_keys(p.mask_params, s, i);
  const double sink = sink_of(head);
  double max = sink;
  const double* const q = load_query_row(rows.q, p.q, head, i, p.sizes.dim);
  const int64 count = larger<int64>(0, keys.end - keys.begin);
  rows.weights.assign(std::size_t(count), 0);
  rows.seen.assign(std::size_t(count), 0);
  double* const weights = rows.weights.data();
  char* const seen = rows.seen.data();
  for (int64 n = 0; n < count; ++n) {
    const int64 j = keys.begin + n;
    if (!visible(head, i, j)) continue;
    weights[n] = score_pair(head, i, j, q, load_key_row(rows.k, p.k, head, j, p.sizes.dim)).score;
    max = std::fmax(max, weights[n]);
    seen[n] = 1;
  }
  double sum = sink > -kInfinity ? std::exp(sink - max) : 0, lost = 0;
  for (int64 n = 0; n < count; ++n) {
    if (!seen[n]) continue;
    weights[n] = max == -kInfinity && weights[n] == max ? 0 : std::exp(weights[n] - max);
    add_to(sum, lost, weights[n]);
  }
  // A sink of NaN or +inf makes NaN of every row of its head, empty rows included.
  if (!(sink < kInfinity)) sum = std::numeric_limits<double>::quiet_NaN();
  const bool nothing = sum == 0 || (max == sink && sum == 1);
  const double lse = nothing ? sink : max + std::log(sum);
  rows.sum.clear(p.sizes.dim_v, sum == sum ? 0 : sum);
  for (int64 n = 0; n < count; ++n) {
    if (!seen[n]) continue;
    const int64 j = keys.begin + n;
    load_key_row(rows.v, p.v, head, j, p.sizes.dim_v);
    const double weight = sum == 0 ? 0 : weights[n] / sum;  // 0 also where all scores are -inf
    add_multiple(rows.sum, dropout_factor(head, i, j) * weight, rows.v);
  }
  write_row(head, i, rows.sum.sum.data(), lse);
}

double delta_of(const Head& head, int64 i) {
  const Problem& p = head.problem;
  if (p.delta.given()) return row_value(p.delta, head, i);
  const int64 first = head.seq.first_q;
  const int64 out = offset_of(p.out.strides, head.b, head.h, first, i);
  const int64 dout = offset_of(p.dout.strides, head.b, head.h, first, i);
  const double delta = product_of_rows(p.out, out, p.dout, dout, p.sizes.dim_v);
  return p.dlse.given() ? delta - row_value(p.dlse, head, i) : delta;
}

std::vector<double> deltas_of(const Problem& p, int64 b, int64 kv) {
  const int64 group = p.sizes.group(), len = sequence(p.sequences, b).len_q;
  std::vector<double> deltas;
  for (int64 g = 0; g < group; ++g) {
    const Head head(p, b, kv * group + g);
    for (int64 i = 0; i < len; ++i) deltas.push_back(delta_of(head, i));
  }
  return deltas;
}

void query_gradient_row(const Head& head, int64 i, double delta, double* dbias_sum,
                        RowScratch& rows) {
  const Problem& p = head.problem;
  const Sequence& s = head.seq;
  const Interval keys = visible_keys(p.mask_params, s, i);
  rows.sum.clear(p.sizes.dim, 0);
  load_query_row(rows.q, p.q, head, i, p.sizes.dim);
  load_query_row(rows.dout, p.dout, head, i, p.sizes.dim_v);
  for (int64 j = keys.begin; j < keys.end; ++j) {
    if (!visible(head, i, j)) continue;
    load_key_row(rows.k, p.k, head, j, p.sizes.dim);
    load_key_row(rows.v, p.v, head, j, p.sizes.dim_v);
    const PairGradient pair = pair_gradient(head, i, j, delta, rows);
    add_multiple(rows.sum, pair.ds, rows.k);
    if (!dbias_sum) continue;
    const int64 index[4] = {head.b, head.h, i, j};
    int64 offset = 0;
    for (int axis = 0; axis < 4; ++axis) {
      offset = offset * p.bias_sizes[axis] + (p.bias_sizes[axis] == 1 ? 0 : index[axis]);
    }
    dbias_sum[offset] += pair.dscore;
  }
  if (!p.dq.given()) return;
  const double* const sums = rows.sum.sum.data();
  const int64 dq = offset_of(p.dq.strides, head.b, head.h, s.first_q, i);
  for (int64 d = 0; d < p.sizes.dim; ++d) {
    store(p.dq, dq + d, p.score.scale * sums[d], p.accumulate);
  }
}

void key_gradient_row(const Problem& p, int64 b, int64 kv, int64 j, const double* deltas,
                      RowScratch& rows) {
  const Sequence s = sequence(p.sequences, b);
  const int64 dim = p.sizes.dim, dim_v = p.sizes.dim_v, group = p.sizes.group();
  RowSum& dk = rows.sum;
  RowSum& dv = rows.second_sum;
  dk.clear(dim, 0);
  dv.clear(dim_v, 0);
  const Interval queries = visible_queries(p.mask_params, s, j);
  for (int64 g = 0; g < group; ++g) {
    const Head head(p, b, kv * group + g);
    load_key_row(rows.k, p.k, head, j, dim);
    load_key_row(rows.v, p.v, head, j, dim_v);
    for (int64 i = queries.begin; i < queries.end; ++i) {
      if (!visible(head, i, j)) continue;
      load_query_row(rows.q, p.q, head, i, dim);
      load_query_row(rows.dout, p.dout, head, i, dim_v);
      const PairGradient pair = pair_gradient(head, i, j, deltas[g * s.len_q + i], rows);
      add_multiple(dk, pair.ds, rows.q);
      add_multiple(dv, pair.kept_weight, rows.dout);
    }
  }
  const auto write = [&](const View& view, const std::vector<double>& row, double scale) {
    if (!view.given()) return;
    const int64 offset = offset_of(view.strides, b, kv, s.first_k, j);
    for (std::size_t d = 0; d < row.size(); ++d) {
      store(view, offset + int64(d), scale * row[d], p.accumulate);
    }
  };
  write(p.dk, dk.sum, p.score.scale);
  write(p.dv, dv.sum, 1);
}

double sink_gradient_of_row(const Head& head, int64 i, double delta) {
  const double sink = sink_of(head);
  return sink == -kInfinity ? 0 : -std::exp(sink - row_value(head.problem.lse, head, i)) * delta;
}

}  // namespace regard
