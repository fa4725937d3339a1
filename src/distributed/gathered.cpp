#include "distributed/gathered.hpp"

#include <algorithm>

#include "distributed/head_groups.hpp"
#include "distributed/views.hpp"
#include "distributed/visibility.hpp"
#include "problem/refuse.hpp"

namespace regard::distributed {
namespace {

Rows range_of_keys(const Part& part) {
  // With a dbias over all keys the call writes the whole gradient.
  if (is_over_keys(part.gradients().dbias)) return {0, part.whole().length};
  return part.plan().keys(part.rank());
}

std::vector<KeyGroup> groups_of(const Part& part) {
  std::vector<KeyGroup> groups;
  for (const Heads& keys : groups_of_keys(part)) groups.emplace_back(part, keys);
  return groups;
}

// The number of own rows that other ranks need, each counted for each rank.
Count rows_for_others(const Part& part) {
  Count rows = 0;
  for (int other = 0; other < part.plan().ranks; ++other) {
    if (other == part.rank()) continue;
    for (const Rows& run : part.plan().runs(part.rank(), other)) rows = rows + size_of_range(run);
  }
  return rows;
}

}  // namespace

KeyGroup::KeyGroup(const Part& part, const Heads& of_keys)
    : keys(of_keys),
      queries(queries_of(part.whole(), of_keys)),
      rows(part, size_of_range(of_keys)) {}

Gathered::Gathered(const Part& part)
    : part_(part),
      groups_(groups_of(part)),
      sinks_(part),
      keys_(range_of_keys(part)),
      spans_(document_spans(part.whole(), own_runs(), keys_)) {
  lay_out();
  for (const KeyGroup& group : groups_) {
    const CallOfHeads one = call(group, unmade_memory(), positions().data(), spans_.data());
    const std::int64_t bytes = part.pass() == Pass::forward
                                   ? part.workspace_of(one.a, one.outputs)
                                   : part.workspace_of(one.a, one.inputs, one.gradients);
    call_size_ = std::max(call_size_, bytes);
  }
}

std::vector<Rows> Gathered::gaps() const {
  const std::vector<bool>& needed = part_.plan().needs[std::size_t(part_.rank())];
  std::vector<Rows> found;
  for (std::int64_t begin = keys_.begin; begin < keys_.end; begin += kBlock) {
    if (needed[std::size_t(begin / kBlock)]) continue;
    found.push_back({begin, std::min(keys_.end, begin + kBlock)});
  }
  return found;
}

// Without keys, which lie in groups.
CallOfHeads Gathered::of_all_heads(std::byte* workspace, const void* positions,
                                   const void* spans) const {
  const Visibility visibility(part_.whole());
  CallOfHeads all{.a = part_.attention(),
                  .outputs = part_.outputs(),
                  .inputs = part_.inputs(),
                  .gradients = part_.gradients()};
  all.a.k = all.a.v = all.gradients.dk = all.gradients.dv = Tensor{};
  all.a.bias = columns(all.a.bias, keys_);
  all.a.mask = columns(all.a.mask, keys_);
  if (visibility.has_documents()) {
    all.a.row_spans = Tensor(spans, Type::i32, {1, 1, part_.rows(), 2});
  }
  all.a.q_positions = Tensor(positions, Type::i32, {std::int64_t(this->positions().size())});
  all.a.k_position = keys_.begin;
  all.a.window = visibility.band();
  if (part_.summed().dsink) all.gradients.dsink = sinks_.own(sinks_in(workspace));
  return all;
}

CallOfHeads Gathered::call(const KeyGroup& group, std::byte* workspace, const void* positions,
                           const void* spans) const {
  const std::int64_t count = size_of_range(keys_);
  const auto view = [&](std::int64_t at, Type type, Half half) {
    return group.rows.view(workspace + at, type, count, half);
  };
  CallOfHeads one =
      of_all_heads(workspace, positions, spans).of(group.queries, group.queries, group.keys);
  one.a.k = view(group.keys_at, part_.type(), Half::keys);
  one.a.v = view(group.keys_at, part_.type(), Half::values);
  const Summed summed = part_.summed();
  if (summed.dk) one.gradients.dk = view(group.sums_at, part_.sum_type(), Half::keys);
  if (summed.dv) one.gradients.dv = view(group.sums_at, part_.sum_type(), Half::values);
  return one;
}

void Gathered::lay_out() {
  MemoryLayout<kAlignment> memory;
  const Count rows = part_.rows(), keys = size_of_range(keys_), needed = rows_for_others(part_);
  for (KeyGroup& group : groups_) {
    group.keys_at = memory.take(keys * group.rows.bytes(part_.type()));
  }
  positions_at_ = memory.take(Count(std::int64_t(positions().size() * sizeof(std::int32_t))));
  spans_at_ = memory.take(Count(std::int64_t(spans_.size() * sizeof(std::int32_t))));
  if (part_.summed().keys()) {
    for (KeyGroup& group : groups_) {
      const Count bytes = group.rows.bytes(part_.sum_type());
      group.sums_at = memory.take(keys * bytes);
      group.parts_at = memory.take(needed * bytes);
      group.totals_at = memory.take(rows * bytes);
    }
  }
  if (part_.summed().dsink) sinks_at_ = memory.take(sinks_.bytes());
  call_at_ = memory.size();
  require(call_at_ < Count::kMost, "q", part_.attention().q, kTooLarge);
}

}  // namespace regard::distributed
