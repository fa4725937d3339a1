// Which heads of keys a rank computes together, while those of other groups travel.
#pragma once

#include <vector>

#include "distributed/heads.hpp"
#include "distributed/part.hpp"

namespace regard::distributed {

// One group, or with Overlap::heads two forward and three backward. The first group of a pass waits
// for its keys, and in backward the last one for its sums, so that these are small: as many heads
// as keep a GPU busy. Where heads share a gradient of the bias they are one: ranks differ where
// that is not so on all, and must find out before they send.
std::vector<Heads> groups_of_keys(const Part&);

// The query heads that read them.
inline Heads queries_of(const WholeSequence& whole, const Heads& keys) {
  const std::int64_t share = whole.heads_q / whole.heads_kv;
  return {keys.begin * share, keys.end * share};
}

}  // namespace regard::distributed
