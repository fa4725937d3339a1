#include "tests/distributed/rank_case.hpp"

#include <algorithm>

namespace regard::tests {
namespace {

using Positions = std::vector<std::int64_t>;

bool has_rows(const Array& x, std::int64_t length) {
  return x.tensor().rank >= 3 && x.tensor().sizes[2] == length;
}

// The number in the whole array of a part's element n.
std::int64_t whole_index(const Array& whole, const Array& part, const Positions& rows,
                         std::int64_t n) {
  const Tensor& t = part.tensor();
  const std::int64_t column = t.rank == 4 ? n % t.sizes[3] : 0;
  const std::int64_t row = t.rank == 4 ? n / t.sizes[3] : n;
  const std::int64_t i = row % t.sizes[2], bh = row / t.sizes[2];
  const std::int64_t in_row = bh * whole.tensor().sizes[2] + rows[std::size_t(i)];
  return t.rank == 4 ? in_row * t.sizes[3] + column : in_row;
}

Array rows_of(const Array& whole, const Positions& rows, std::int64_t length, bool gaps) {
  if (!whole.given()) return {};
  const Tensor& t = whole.tensor();
  std::vector<std::int64_t> sizes(t.sizes.begin(), t.sizes.begin() + t.rank);
  const bool cut = has_rows(whole, length);
  if (cut) sizes[2] = std::int64_t(rows.size());
  Array part(t.type, sizes, gaps && t.rank >= 3);
  for (std::int64_t n = 0; n < part.count(); ++n) {
    part.set(n, whole.get(cut ? whole_index(whole, part, rows, n) : n));
  }
  return part;
}

}  // namespace

distributed::Plan WholeCase::plan(int ranks) const {
  const Settings& s = settings;
  return distributed::plan({.length = s.len_q,
                            .batch = s.batch,
                            .heads_q = s.heads_q,
                            .heads_kv = s.heads_kv,
                            .head_size = s.dim,
                            .head_size_v = s.dim_v,
                            .type = s.type,
                            .causal = s.causal,
                            .window = s.window,
                            .cu_seqlens = cu_seqlens},
                           ranks, scheme, {}, distributed::RowCounts::equal, overlap);
}

Attention WholeCase::attention(const Case& c, Array& spans) const {
  Attention a = c.attention();
  a.batch_begin = batch_begin;
  a.head_begin = head_begin;
  if (cu_seqlens.empty()) return a;
  spans = Array(i32, {1, 1, settings.len_q, 2});
  spans.fill(0);  // rows after the last document see nothing
  for (std::size_t n = 1; n < cu_seqlens.size(); ++n) {
    for (std::int64_t row = cu_seqlens[n - 1]; row < cu_seqlens[n]; ++row) {
      spans.set(2 * row, cu_seqlens[n - 1]);
      spans.set(2 * row + 1, cu_seqlens[n]);
    }
  }
  a.row_spans = spans;
  return a;
}

RankCase::RankCase(const Case& whole, const distributed::Plan& plan, int rank) {
  const Positions rows = plan.positions(rank);
  const std::int64_t length = plan.whole().length;
  const auto part = [&](const Array& x) { return rows_of(x, rows, length, whole.s.gaps); };
  accumulates = whole.s.accumulate;
  q = part(whole.q), k = part(whole.k), v = part(whole.v);
  bias = part(whole.bias), mask = part(whole.mask);
  slopes = part(whole.slopes), sink = part(whole.sink);
  out = part(whole.out), lse = part(whole.lse), dout = part(whole.dout), dlse = part(whole.dlse);
  dq = part(whole.dq), dk = part(whole.dk), dv = part(whole.dv);
  dbias = part(whole.dbias), dsink = part(whole.dsink);
  a = {.q = q,
       .k = k,
       .v = v,
       .bias = bias,
       .mask = mask,
       .alibi_slopes = slopes,
       .sink = sink,
       .scale = whole.s.scale,
       .softcap = whole.s.softcap,
       .dropout = whole.attention().dropout};
}

RankCase::RankCase(const WholeCase& problem, const Case& whole, const distributed::Plan& plan,
                   int rank)
    : RankCase(whole, plan, rank) {
  a.batch_begin = problem.batch_begin;
  a.head_begin = problem.head_begin;
}

void RankCase::forward(const distributed::Plan& plan, const distributed::Collectives& ranks,
                       const Run& run) const {
  distributed::forward(a, {.out = out, .lse = lse}, plan, ranks, run);
}

void RankCase::backward(const distributed::Plan& plan, const distributed::Collectives& ranks,
                        const Run& run) const {
  distributed::backward(
      a, {.out = out, .lse = lse, .dout = dout, .dlse = dlse},
      {.dq = dq, .dk = dk, .dv = dv, .dbias = dbias, .dsink = dsink, .accumulate = accumulates},
      plan, ranks, run);
}

bool RankCase::gaps_intact() const {
  const std::vector<const Array*> all = {&q, &k, &v, &out, &lse, &dq, &dk, &dv, &dbias};
  return std::all_of(all.begin(), all.end(),
                     [](const Array* x) { return !x->given() || x->gaps_intact(); });
}

distributed::Moved uncounted_bytes(const WholeCase& problem, const distributed::Plan& plan,
                                   int rank) {
  const Settings& s = problem.settings;
  const auto heads_of = [&](int n) {
    return (n + 1) * s.heads_q / plan.ranks() - n * s.heads_q / plan.ranks();
  };
  if (plan.scheme() != distributed::Scheme::ulysses) {
    return {.forward = 0, .backward = s.sink ? (plan.ranks() - 1) * s.heads_q * 4 : 0};
  }
  const std::int64_t own = heads_of(rank), others = s.heads_q - own;
  const std::int64_t rows = plan.rows(rank), other_rows = s.len_q - rows;
  const std::int64_t element = std::int64_t(size_of(s.type)), sum = s.type == f64 ? 8 : 4;
  // (batch, heads, row, column) that broadcast: elements of one row for a rank's heads.
  const auto row_of = [&](const std::array<bool, 4>& broadcast, int n) {
    return (broadcast[0] ? 1 : s.batch) * (broadcast[3] ? 1 : s.len_k) *
           (broadcast[1] ? std::min<std::int64_t>(1, heads_of(n)) : heads_of(n));
  };
  std::int64_t scores = 0;
  if (s.bias != Type::none) {
    scores += other_rows * row_of(s.bias_broadcast, rank) * std::int64_t(size_of(s.bias));
  }
  if (s.mask) scores += other_rows * row_of(s.mask_broadcast, rank);
  const std::int64_t wider = s.wide_results ? 4 - element : 0;  // of out and dout
  const std::int64_t wider_dq = s.wide_results || s.accumulate ? sum - element : 0;
  std::int64_t forward = scores + rows * others * s.batch * (sum + wider * s.dim_v);
  std::int64_t backward = scores + rows * others * s.batch * wider_dq * s.dim;
  backward += other_rows * own * s.batch * 2 * wider * s.dim_v;
  if (s.dlse) backward += other_rows * own * s.batch * sum;
  if (s.sink) backward += others * 4;
  for (int n = 0; n < plan.ranks() && s.bias != Type::none; ++n) {
    if (n != rank) backward += rows * row_of(s.bias_broadcast, n) * (s.bias == f64 ? 8 : 4);
  }
  return {.forward = forward, .backward = backward};
}

void put(Case& whole, const RankCase& part, const distributed::Plan& plan, int rank) {
  const Positions rows = plan.positions(rank);
  const auto put_one = [&](const Array& to, const Array& from) {
    if (!to.given()) return;
    const bool cut = has_rows(to, plan.whole().length);
    const bool adds = !cut && &to == &whole.dbias && rank > 0;
    for (std::int64_t n = 0; n < from.count(); ++n) {
      const std::int64_t at = cut ? whole_index(to, from, rows, n) : n;
      to.set(at, from.get(n) + (adds ? to.get(at) : 0));
    }
  };
  put_one(whole.out, part.out);
  put_one(whole.lse, part.lse);
  put_one(whole.dq, part.dq);
  put_one(whole.dk, part.dk);
  put_one(whole.dv, part.dv);
  put_one(whole.dbias, part.dbias);
  put_one(whole.dsink, part.dsink);
}

}  // namespace regard::tests
