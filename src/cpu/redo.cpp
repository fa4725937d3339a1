// Redoing, one at a time and in float64, the rows that a NaN in a hidden place may have reached.
#include "cpu/redo.hpp"

#include <algorithm>

#include "rows/element.hpp"
#include "rows/rows.hpp"
#include "threads/threads.hpp"

namespace regard::cpu_backend {
namespace {

// Calls work(b, kv) for those heads whose `rows` flags are not all zero.
template <class Flags, class Work>
void each_spoiled_head(const Problem& p, int workers, const Run& run, Flags flags, Work work) {
  const int64 heads = p.sizes.heads_kv;
  parallel_tasks(p.sizes.batch * heads, workers, run, [&](int64 task, int) {
    const int64 b = task / heads, kv = task % heads;
    if (flags(b, kv)) work(b, kv);
  });
}

bool any(const std::uint8_t* flags, int64 count) {
  return std::any_of(flags, flags + count, [](std::uint8_t flag) { return flag != 0; });
}

}  // namespace

void redo_forward(const Problem& p, const Batch& batch, const std::uint8_t* spoiled, int workers,
                  const Run& run) {
  const int64 group = p.sizes.group();
  each_spoiled_head(
      p, workers, run,
      [&](int64 b, int64 kv) {
        return any(spoiled + batch.first_q(b, kv), group * batch[b].seq.len_q);
      },
      [&](int64 b, int64 kv) {
        std::vector<double> scratch;
        for (int64 g = 0; g < group; ++g) {
          const Head head(p, b, kv * group + g);
          const std::uint8_t* const rows = spoiled + batch.first_q(b, kv) + g * head.seq.len_q;
          for (int64 i = 0; i < head.seq.len_q; ++i) {
            if (rows[i]) forward_row(head, i, scratch);
          }
        }
      });
}

void redo_backward(const Problem& p, const Batch& batch, const std::uint8_t* spoiled_q,
                   const std::uint8_t* spoiled_k, int workers, const Run& run) {
  const int64 group = p.sizes.group();
  each_spoiled_head(
      p, workers, run,
      [&](int64 b, int64 kv) {
        return any(spoiled_q + batch.first_q(b, kv), group * batch[b].seq.len_q) ||
               any(spoiled_k + batch.first_k(b, kv), batch[b].seq.len_k);
      },
      [&](int64 b, int64 kv) {
        const int64 len_q = batch[b].seq.len_q, len_k = batch[b].seq.len_k;
        std::vector<double> deltas(group * len_q), scratch;
        for (int64 g = 0; g < group; ++g) {
          const Head head(p, b, kv * group + g);
          const std::uint8_t* const rows = spoiled_q + batch.first_q(b, kv) + g * len_q;
          for (int64 i = 0; i < len_q; ++i) {
            deltas[g * len_q + i] = delta_of(head, i);
            if (rows[i] && p.dq.given()) {
              query_gradient_row(head, i, deltas[g * len_q + i], nullptr, scratch);
            }
          }
        }
        const std::uint8_t* const rows = spoiled_k + batch.first_k(b, kv);
        for (int64 j = 0; j < len_k; ++j) {
          if (rows[j]) key_gradient_row(p, b, kv, j, deltas.data(), scratch);
        }
      });
}

}  // namespace regard::cpu_backend
