// The fix-up pass: rows that a NaN in a hidden place may have reached, one at a time in float64.
//
// A tile multiplies hidden pairs by zero, and 0 * NaN is NaN. The kernels only check what they
// write. A row whose result is not finite is flagged, and computed again here from its visible
// pairs alone.
#include "cpu/fixup.hpp"

#include <cstring>
#include <limits>

#include "rows/element.hpp"
#include "rows/rows.hpp"
#include "threads/threads.hpp"

namespace regard::cpu_backend {
namespace {

// Calls work(b, kv) for each head with a flag set in `rows`.
template <class Flags, class Work>
void each_spoiled_head(const Problem& p, int workers, const Run& run, Flags flags, Work work) {
  const int64 heads = p.sizes.heads_kv;
  parallel_tasks(p.sizes.batch * heads, workers, run, [&](int64 task, int) {
    const int64 b = task / heads, kv = task % heads;
    if (flags(b, kv)) work(b, kv);
  });
}

// Flags are 0 or 1.
bool any(const std::uint8_t* flags, int64 count) {
  return std::memchr(flags, 1, std::size_t(count)) != nullptr;
}

bool is_nan(double x) { return x != x; }

double lse_of(const Head& head, int64 i) {
  const View& lse = head.problem.lse;
  return load_element(lse, offset_of(lse.strides, head.b, head.h, head.seq.first_q, i));
}

void fill_with_nan(const View& view, int64 offset, int64 count) {
  for (int64 d = 0; view.given() && d < count; ++d) {
    store_element(view, offset + d, std::numeric_limits<double>::quiet_NaN());
  }
}

bool sees_any_key(const Head& head, int64 i) {
  const Sequence& s = head.seq;
  const Interval keys = visible_keys(head.problem.mask_params, s, i);
  for (int64 j = keys.begin; j < keys.end; ++j) {
    if (visible(head, i, j)) return true;
  }
  return false;
}

// Which gradients of a key are NaN without computing: dk and dv if a row that sees it has a NaN
// lse, dk if one has a NaN delta.
struct Foregone {
  bool dk = false;
  bool dv = false;
};
Foregone foregone(const Problem& p, int64 b, int64 kv, int64 j, const double* deltas) {
  const int64 group = p.sizes.group();
  Foregone lost;
  for (int64 g = 0; g < group && !lost.dv; ++g) {
    const Head head(p, b, kv * group + g);
    const Sequence& s = head.seq;
    const Interval rows = visible_queries(p.mask_params, s, j);
    for (int64 i = rows.begin; i < rows.end && !lost.dv; ++i) {
      const bool spoils_all = is_nan(lse_of(head, i));
      if (!spoils_all && (lost.dk || !is_nan(deltas[g * s.len_q + i]))) continue;
      if (!visible(head, i, j)) continue;
      lost.dk = true;
      lost.dv = spoils_all;
    }
  }
  return lost;
}

// A NaN lse or delta makes NaN of its whole row, without computing: a training run that has
// diverged must not slow down.
void fix_up_query(const Head& head, int64 i, double delta, RowScratch& scratch) {
  const Problem& p = head.problem;
  if ((is_nan(lse_of(head, i)) || is_nan(delta)) && sees_any_key(head, i)) {
    fill_with_nan(p.dq, offset_of(p.dq.strides, head.b, head.h, head.seq.first_q, i), p.sizes.dim);
  } else {
    query_gradient_row(head, i, delta, nullptr, scratch);
  }
}

void fix_up_key(const Problem& p, int64 b, int64 kv, int64 j, const double* deltas,
                RowScratch& scratch) {
  const Foregone lost = foregone(p, b, kv, j, deltas);
  const int64 first = sequence(p.sequences, b).first_k;
  if (!lost.dv) key_gradient_row(p, b, kv, j, deltas, scratch);
  if (lost.dk) fill_with_nan(p.dk, offset_of(p.dk.strides, b, kv, first, j), p.sizes.dim);
  if (lost.dv) fill_with_nan(p.dv, offset_of(p.dv.strides, b, kv, first, j), p.sizes.dim_v);
}

}  // namespace

void fix_up_forward(const Problem& p, const Batch& batch, const std::uint8_t* nonfinite,
                    int workers, const Run& run) {
  const int64 group = p.sizes.group();
  if (!any(nonfinite, batch.totals().rows_q * p.sizes.heads_q)) return;
  each_spoiled_head(
      p, workers, run,
      [&](int64 b, int64 kv) {
        return any(nonfinite + batch.first_q(b, kv), group * batch[b].seq.len_q);
      },
      [&](int64 b, int64 kv) {
        RowScratch scratch;
        for (int64 g = 0; g < group; ++g) {
          const Head head(p, b, kv * group + g);
          const std::uint8_t* const rows = nonfinite + batch.first_q(b, kv) + g * head.seq.len_q;
          for (int64 i = 0; i < head.seq.len_q; ++i) {
            if (rows[i]) forward_row(head, i, scratch);
          }
        }
      });
}

void fix_up_backward(const Problem& p, const Batch& batch, const std::uint8_t* nonfinite_q,
                     const std::uint8_t* nonfinite_k, int workers, const Run& run) {
  const int64 group = p.sizes.group();
  if (!any(nonfinite_q, batch.totals().rows_q * p.sizes.heads_q) &&
      !any(nonfinite_k, batch.totals().rows_k * p.sizes.heads_kv)) {
    return;
  }
  each_spoiled_head(
      p, workers, run,
      [&](int64 b, int64 kv) {
        return any(nonfinite_q + batch.first_q(b, kv), group * batch[b].seq.len_q) ||
               any(nonfinite_k + batch.first_k(b, kv), batch[b].seq.len_k);
      },
      [&](int64 b, int64 kv) {
        const int64 len_q = batch[b].seq.len_q, len_k = batch[b].seq.len_k;
        const std::vector<double> deltas = deltas_of(p, b, kv);
        RowScratch scratch;
        for (int64 g = 0; g < group; ++g) {
          const Head head(p, b, kv * group + g);
          const std::uint8_t* const rows = nonfinite_q + batch.first_q(b, kv) + g * len_q;
          for (int64 i = 0; i < len_q; ++i) {
            if (rows[i]) fix_up_query(head, i, deltas[std::size_t(g * len_q + i)], scratch);
          }
        }
        const std::uint8_t* const rows = nonfinite_k + batch.first_k(b, kv);
        for (int64 j = 0; j < len_k; ++j) {
          if (rows[j]) fix_up_key(p, b, kv, j, deltas.data(), scratch);
        }
      });
}

}  // namespace regard::cpu_backend
