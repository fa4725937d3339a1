// The textbook in float64: every row by itself.
#include "reference/reference.hpp"

#include "rows/element.hpp"
#include "rows/rows.hpp"
#include "threads/threads.hpp"

namespace regard::reference {
namespace {

void write_bias_gradient(const Problem& p, const double* sum) {
  const int64* n = p.bias_sizes;
  int64 index = 0;
  for (int64 b = 0; b < n[0]; ++b) {
    for (int64 h = 0; h < n[1]; ++h) {
      for (int64 i = 0; i < n[2]; ++i) {
        for (int64 j = 0; j < n[3]; ++j, ++index) {
          const int64 at = offset_of(p.dbias.strides, b, h, 0, i) + j * p.dbias.strides.column;
          store_element(p.dbias, at, sum[index] + (p.accumulate ? load_element(p.dbias, at) : 0));
        }
      }
    }
  }
}

}  // namespace

void forward(const Problem& p, const Run& run) {
  const int64 heads = p.sizes.heads_q;
  parallel_tasks(p.sizes.batch * heads, worker_count(run), run, [&](int64 task, int) {
    const Head head(p, task / heads, task % heads);
    RowScratch scratch;
    for (int64 i = 0; i < head.seq.len_q; ++i) forward_row(head, i, scratch);
  });
}

void backward(const Problem& p, const Run& run) {
  const int64 heads = p.sizes.heads_kv, group = p.sizes.group();
  std::vector<double> dsink(std::size_t(p.sizes.heads_q), 0), dbias;
  if (p.dbias.given()) {
    const int64* const n = p.bias_sizes;
    dbias.assign(std::size_t(n[0] * n[1] * n[2] * n[3]), 0);
  }
  // Heads of different batches share dbias and dsink, which are therefore summed by one worker.
  const int workers = p.dbias.given() || p.dsink.given() ? 1 : worker_count(run);
  parallel_tasks(p.sizes.batch * heads, workers, run, [&](int64 task, int) {
    const int64 b = task / heads, kv = task % heads;
    const Sequence seq = sequence(p.sequences, b);
    const std::vector<double> deltas = deltas_of(p, b, kv);
    RowScratch scratch;
    for (int64 g = 0; g < group; ++g) {
      const Head head(p, b, kv * group + g);
      const double* const own = deltas.data() + g * seq.len_q;
      for (int64 i = 0; (p.dq.given() || p.dbias.given()) && i < seq.len_q; ++i) {
        query_gradient_row(head, i, own[i], dbias.empty() ? nullptr : dbias.data(), scratch);
      }
      for (int64 i = 0; p.dsink.given() && i < seq.len_q; ++i) {
        dsink[std::size_t(head.h)] += sink_gradient_of_row(head, i, own[i]);
      }
    }
    for (int64 j = 0; (p.dk.given() || p.dv.given()) && j < seq.len_k; ++j) {
      key_gradient_row(p, b, kv, j, deltas.data(), scratch);
    }
  });
  if (p.dbias.given()) write_bias_gradient(p, dbias.data());
  for (int64 h = 0; p.dsink.given() && h < p.sizes.heads_q; ++h) {
    const int64 at = h * p.dsink.strides.head;
    store_element(p.dsink, at,
                  dsink[std::size_t(h)] + (p.accumulate ? load_element(p.dsink, at) : 0));
  }
}

}  // namespace regard::reference
