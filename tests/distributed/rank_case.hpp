// A rank's part of a whole problem, and a whole problem's results put together again.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "regard/distributed.hpp"
#include "tests/cpu/case.hpp"

namespace regard::tests {

// A whole problem, and what is told of it to the plan.
struct WholeCase {
  Settings settings{};  // with len_q = len_k
  std::vector<std::int32_t> cu_seqlens{};
  distributed::Scheme scheme = distributed::Scheme::gather;
  distributed::Overlap overlap = distributed::Overlap::none;
  std::int64_t batch_begin = 0, head_begin = 0;

  distributed::Plan plan(int ranks) const;
  // Over the whole sequence; documents as spans, which lie in `spans`.
  Attention attention(const Case&, Array& spans) const;
};

// A rank's tensors: those of the whole problem in which its rows are all that there are.
struct RankCase {
  RankCase(const Case& whole, const distributed::Plan&, int rank);
  RankCase(const WholeCase&, const Case& whole, const distributed::Plan&, int rank);

  void forward(const distributed::Plan&, const distributed::Collectives&, const Run& = {}) const;
  void backward(const distributed::Plan&, const distributed::Collectives&, const Run& = {}) const;
  bool gaps_intact() const;

  Attention a{};
  bool accumulates = false;
  Array q, k, v, bias, mask, slopes, sink, out, lse, dout, dlse, dq, dk, dv, dbias, dsink;
};

// Bytes that a rank receives next to those that the plan counts: of the sink's gradient, and by
// Ulysses of what only some calls have.
distributed::Moved uncounted_bytes(const WholeCase&, const distributed::Plan&, int rank);

// Writes a rank's results to their rows of the whole problem's. A gradient that all rows share is
// added, from rank 0 on.
void put(Case& whole, const RankCase&, const distributed::Plan&, int rank);

}  // namespace regard::tests
