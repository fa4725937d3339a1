#include "distributed/head_groups.hpp"

#include <algorithm>

#include "distributed/views.hpp"
#include "distributed/visibility.hpp"

namespace regard::distributed {
namespace {

// Tiles of 128 rows that two for each multiprocessor of an H100 nearly are; of 128 keys twice as
// many, because their work differs more.
constexpr std::int64_t kBusy = 256;

// How many heads of keys have so many tiles in all batch entries, by the rank that has the most
// blocks; but at most so many.
template <class Blocks>
std::int64_t small_group(const Part& part, std::int64_t tiles, const Blocks& blocks_of,
                         std::int64_t most) {
  std::int64_t blocks = 1;
  for (int rank = 0; rank < part.plan().ranks; ++rank) blocks = std::max(blocks, blocks_of(rank));
  const std::int64_t of_head = std::max<std::int64_t>(1, part.batch()) * blocks;
  return std::clamp<std::int64_t>((tiles + of_head - 1) / of_head, 1,
                                  std::max<std::int64_t>(1, most));
}

// Groups of so many heads each; 0 is none.
std::vector<Heads> groups_of(const std::vector<std::int64_t>& counts) {
  std::vector<Heads> groups;
  std::int64_t begin = 0;
  for (const std::int64_t count : counts) {
    if (count > 0) groups.push_back({begin, begin + count});
    begin += count;
  }
  return groups;
}

}  // namespace

std::vector<Heads> groups_of_keys(const Part& part) {
  const PlanContents& plan = part.plan();
  const std::int64_t heads = plan.whole.heads_kv;
  const Tensor& dbias = part.gradients().dbias;
  const bool shares_bias = dbias.given() && !has_heads(dbias);
  if (plan.overlap() == Overlap::none || shares_bias) return {{0, heads}};
  if (part.pass() == Pass::forward) {
    const std::int64_t share = plan.whole.heads_q / heads;
    const std::int64_t few = small_group(
        part, kBusy, [&](int rank) { return share * (plan.rows(rank) / kBlock); }, heads / 4);
    return groups_of({few, heads - few});
  }
  const std::int64_t few = small_group(
      part, 2 * kBusy, [&](int rank) { return size_of_range(plan.keys(rank)) / kBlock; },
      heads / 2);
  return groups_of({few, heads - 2 * few, few});
}

}  // namespace regard::distributed
