// Attention one row at a time, in float64, by the textbook. The reference backend consists of it,
// and the CPU backend's fix-up pass uses it for rows that a NaN in a hidden place may have reached.
#pragma once

#include <vector>

#include "problem/problem.h"

namespace regard {

// One batch entry and one query head.
struct Head {
  const Problem& problem;
  int64 b;
  int64 h;
  Sequence seq;

  Head(const Problem& whole, int64 entry, int64 head_q)
      : problem(whole), b(entry), h(head_q), seq(sequence(whole.sequences, entry)) {}
  int64 kv() const { return h / problem.sizes.group(); }
};

// A row of sums, and the rounding error of each.
struct RowSum {
  std::vector<double> sum;
  std::vector<double> lost;

  void clear(int64 size, double value) {
    sum.assign(std::size_t(size), value);
    lost.assign(std::size_t(size), 0);
  }
};

// Rows as float64 and intermediate results; reused from row to row.
struct RowScratch {
  std::vector<double> q, k, v, dout;  // one row of each
  std::vector<double> weights;        // of every key
  std::vector<char> seen;             // of every key: whether the row sees it
  RowSum sum, second_sum;             // the results
};

// Writes row i of out and lse; in a continued call, merged with what they hold.
void forward_row(const Head&, int64 i, RowScratch&);

// dout . out - dlse of row i, given or made.
double delta_of(const Head&, int64 i);

// The deltas of every query head of one kv head: [group][len_q].
std::vector<double> deltas_of(const Problem&, int64 b, int64 kv);

// Writes row i of dq (if given) and adds row i's ds to dbias_sum (if not null), a dense array of
// the bias's sizes.
void query_gradient_row(const Head&, int64 i, double delta, double* dbias_sum, RowScratch&);

// Writes row j of dk and dv, those given, for kv head `kv`. deltas: [group][len_q].
void key_gradient_row(const Problem&, int64 b, int64 kv, int64 j, const double* deltas,
                      RowScratch&);

// What row i adds to its head's dsink: -exp(sink - lse) delta.
double sink_gradient_of_row(const Head&, int64 i, double delta);

// Whether the pair takes part: interval, mask, and a bias of -inf.
bool visible(const Head&, int64 i, int64 j);

}  // namespace regard
