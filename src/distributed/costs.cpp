#include "distributed/costs.hpp"

#include <algorithm>

#include "distributed/heads.hpp"
#include "plan/count.h"

namespace regard::distributed {
namespace {

std::int64_t element_bytes(const WholeSequence& whole) { return std::int64_t(size_of(whole.type)); }
std::int64_t sum_bytes(const WholeSequence& whole) {
  return std::max<std::int64_t>(4, element_bytes(whole));
}

// Bytes of one key and its value, for all batch entries and heads.
Count bytes_of_key(const WholeSequence& whole, std::int64_t element) {
  return Count(whole.batch) * whole.heads_kv * (whole.head_size + whole.head_size_v) * element;
}

// Keys come in forward, and again in backward, after which sums for own keys come.
Moved moved_by_keys(const PlanContents& plan, int rank) {
  std::int64_t keys = 0, sums = 0;
  for (int other = 0; other < plan.ranks; ++other) {
    if (other == rank) continue;
    for (const Rows& run : plan.runs(other, rank)) keys += size_of_range(run);
    for (const Rows& run : plan.runs(rank, other)) sums += size_of_range(run);
  }
  const Count came = bytes_of_key(plan.whole, element_bytes(plan.whole)) * keys;
  const Count back = bytes_of_key(plan.whole, sum_bytes(plan.whole)) * sums;
  return {.forward = came.value(), .backward = (came + back).value()};
}

// Keys pass by; in backward with their sums, which come home at the end.
Moved moved_by_ring(const PlanContents& plan, int rank) {
  if (plan.ranks == 1) return {};
  const WholeSequence& w = plan.whole;
  const Count came = bytes_of_key(w, element_bytes(w)) * (w.length - plan.rows(rank));
  const Count back = bytes_of_key(w, sum_bytes(w)) * w.length;
  return {.forward = came.value(), .backward = (came + back).value()};
}

// Forward: q, k, v of own heads come, and out of own rows. Backward: q, k, v, out, lse and dout of
// own heads come, and dq, dk, dv of own rows, the last two as sums.
Moved moved_by_heads(const PlanContents& plan, int rank) {
  const WholeSequence& w = plan.whole;
  const std::int64_t element = element_bytes(w), sum = sum_bytes(w);
  const std::int64_t both = w.head_size + w.head_size_v;
  const Heads own = query_heads(w, plan.ranks, rank);
  const Count rows = plan.rows(rank), other_rows = w.length - plan.rows(rank);
  const std::int64_t queries = size_of_range(own), keys = size_of_range(key_heads(w, own));
  std::int64_t keys_of_others = 0;
  for (int other = 0; other < plan.ranks; ++other) {
    if (other == rank) continue;
    keys_of_others += size_of_range(key_heads(w, query_heads(w, plan.ranks, other)));
  }
  const Count inputs = (Count(queries) * w.head_size + Count(keys) * both) * element;
  const Count results = Count(queries) * (Count(2) * w.head_size_v * element + sum);
  const Count outs = Count(w.heads_q - queries) * w.head_size_v * element;
  const Count gradients =
      Count(w.heads_q - queries) * w.head_size * element + Count(keys_of_others) * both * sum;
  const Count forward = other_rows * inputs + rows * outs;
  const Count backward = other_rows * (inputs + results) + rows * gradients;
  return {.forward = (forward * w.batch).value(), .backward = (backward * w.batch).value()};
}

}  // namespace

Moved moved_of(const PlanContents& plan, int rank) {
  if (plan.scheme == Scheme::ring) return moved_by_ring(plan, rank);
  if (plan.scheme == Scheme::ulysses) return moved_by_heads(plan, rank);
  return moved_by_keys(plan, rank);
}

double seconds(const PlanContents& plan, const Rates& rates) {
  const WholeSequence& w = plan.whole;
  const double pair = 2.0 * (4 * double(w.head_size) + 3 * double(w.head_size_v)) *
                      double(w.heads_q) * double(w.batch);
  double most = 0;
  for (const Moved& moved : plan.moved) {
    most = std::max(most, double(moved.forward) + double(moved.backward));
  }
  const double area = *std::max_element(plan.areas.begin(), plan.areas.end());
  return area * pair / rates.flops + most / rates.bytes_per_second;
}

}  // namespace regard::distributed
