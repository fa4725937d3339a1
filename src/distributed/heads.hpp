// Ulysses: which query heads each rank computes, and which heads of keys they read.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "distributed/views.hpp"
#include "regard/distributed.hpp"

namespace regard::distributed {

using Heads = Rows;  // [begin, end), of heads instead of rows

// Neighbours; their numbers differ by one at most. A rank may have none.
inline Heads query_heads(const WholeSequence& whole, int ranks, int rank) {
  return {rank * whole.heads_q / ranks, (rank + 1) * whole.heads_q / ranks};
}

// Those that these query heads read. Several ranks may need the same.
inline Heads key_heads(const WholeSequence& whole, const Heads& own) {
  if (own.begin == own.end) return {};
  const std::int64_t share = whole.heads_q / whole.heads_kv;
  return {own.begin / share, (own.end - 1) / share + 1};
}

// The same query heads in runs that one call each can take, where all heads of keys are read
// equally often: one run mostly, three at most.
inline std::vector<Heads> runs_of_heads(const WholeSequence& whole, const Heads& own) {
  const std::int64_t share = whole.heads_q / whole.heads_kv;
  const std::int64_t keys = size_of_range(key_heads(whole, own));
  if (keys == 0) return {};
  const std::int64_t first_end = std::min(own.end, (own.begin / share + 1) * share);
  const std::int64_t first = first_end - own.begin;
  const bool is_even = size_of_range(own) == keys * first && (keys <= 2 || first == share);
  if (is_even) return {own};
  std::vector<Heads> runs;
  std::int64_t begin = own.begin;
  for (const std::int64_t end :
       {first == share ? own.begin : first_end, own.end / share * share, own.end}) {
    if (end > begin) runs.push_back({begin, end});
    begin = std::max(begin, end);
  }
  return runs;
}

}  // namespace regard::distributed
