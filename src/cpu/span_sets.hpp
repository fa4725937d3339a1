// What spans say of whole blocks, so that a task finds those that it visits without a look at each.
// Reading the spans once takes time, and the sets memory, in proportion to rows and keys.
#pragma once

#include <vector>

#include "cpu/batch.hpp"
#include "plan/cpu/kernel/visits.h"
#include "regard/regard.hpp"

namespace regard::cpu_backend {

class SpanSets {
 public:
  SpanSets(const Problem&, const CpuTiling&, const Batch&, int workers, const Run&);

  // Of the query heads that share a key head; null: nothing is known.
  const SpanReach* of(int64 b, int64 kv) const {
    const auto head = std::size_t(b * heads_q_ + kv * group_);
    return reach_.empty() ? nullptr : reach_.data() + head;
  }

 private:
  const int64 heads_q_, group_;
  std::vector<IntervalSet> sets_;  // of all trees
  std::vector<SpanReach> reach_;   // [batch][heads_q]
};

}  // namespace regard::cpu_backend
