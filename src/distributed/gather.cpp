// Gather and halo: keys come in the order of the sequence, one call computes all of the rank's
// rows, or one for each group of heads, and sums of dk and dv return to the owners of the keys.
//
// Keys come again for the backward pass, so that a rank keeps no more than its own between the two.
// Keys and sums of one group travel while other groups are computed.
#include <algorithm>
#include <string>
#include <vector>

#include "distributed/gathered.hpp"
#include "distributed/scheme_call.hpp"
#include "distributed/views.hpp"
#include "distributed/visibility.hpp"

namespace regard::distributed {
namespace {

// The work, once the arguments of all ranks are known to be right.
class GatherPass {
 public:
  GatherPass(const Part& part, const Gathered& gathered, const Collectives& ranks, Memory& memory)
      : part_(part),
        gathered_(gathered),
        ranks_(ranks),
        memory_(memory),
        workspace_(memory.workspace()),
        // One group has nothing to travel beside.
        travel_(gathered.groups().size() > 1 ? Lane::beside : Lane::call) {}

  void run() {
    // First: a copy from the host may wait for the stream.
    positions_ = memory_.table(gathered_.positions(), gathered_.positions_in(workspace_));
    spans_ = memory_.table(gathered_.spans(), gathered_.spans_in(workspace_));
    for (const KeyGroup& group : gathered_.groups()) place_own(group);
    order(Lane::call);
    part_.pass() == Pass::forward ? forward() : backward();
  }

 private:
  using Groups = std::vector<KeyGroup>;

  void forward() {
    const Groups& groups = gathered_.groups();
    for (const KeyGroup& group : groups) {
      receive_keys(group);
      if (&group == &groups.front()) order(Lane::beside);
    }
    for (const KeyGroup& group : groups) {
      if (&group != &groups.front()) order(Lane::beside);
      const CallOfHeads call = call_of(group);
      regard::forward(call.a, call.outputs, gathered_.run_in(workspace_));
    }
  }

  // The sums of a group travel while the next one is computed.
  void backward() {
    const Groups& groups = gathered_.groups();
    clear_sums();
    for (const KeyGroup& group : groups) {
      receive_keys(group);
      if (&group == &groups.front()) order(Lane::beside);
    }
    for (const KeyGroup& group : groups) {
      const CallOfHeads call = call_of(group);
      regard::backward(call.a, call.inputs, call.gradients, gathered_.run_in(workspace_));
      if (&group == &groups.front()) order(Lane::beside);  // for all other keys
      order(Lane::call);
      send_sums(group, &group == &groups.back());
    }
    order(Lane::beside);
    for (const KeyGroup& group : groups) sum_keys(group);
    const Gradients& to = part_.gradients();
    if (part_.summed().dsink) {
      gathered_.sinks().sum(gathered_.sinks_in(workspace_), memory_, to.dsink, to.accumulate);
    }
  }

  // The other lane waits for what is on this one.
  void order(Lane first) {
    if (travel_ == Lane::beside) memory_.let_other_wait_for(first);
  }

  CallOfHeads call_of(const KeyGroup& group) const {
    return gathered_.call(group, workspace_, positions_, spans_);
  }

  static std::size_t bytes_of(const KeyGroup& group, const Rows& rows, Type type) {
    return std::size_t(size_of_range(rows) * group.rows.bytes(type));
  }
  // Where a key of the sequence lies in the group's keys or sums, which begin at `first`.
  std::byte* at(const KeyGroup& group, std::int64_t first, std::int64_t key, Type type) const {
    return workspace_ + first + (key - gathered_.keys().begin) * group.rows.bytes(type);
  }
  static Tensor view(const KeyGroup& group, std::byte* memory, const Rows& rows, Type type,
                     Half half) {
    return group.rows.view(memory, type, size_of_range(rows), half);
  }

  void place_own(const KeyGroup& group) {
    const Attention& a = part_.attention();
    const Type type = part_.type();
    std::int64_t first = 0;
    for (const Rows& run : gathered_.own_runs()) {
      const Rows local{first, first + size_of_range(run)};
      std::byte* const to = at(group, group.keys_at, run.begin, type);
      for (const Half half : kHalves) {
        const Tensor from = heads_of(half == Half::keys ? a.k : a.v, group.keys);
        memory_.write(rows_of(from, local), view(group, to, run, type, half), false);
      }
      first = local.end;
    }
    for (const Rows& gap : gathered_.gaps()) {
      memory_.zero(at(group, group.keys_at, gap.begin, type), bytes_of(group, gap, type));
    }
  }

  void receive_keys(const KeyGroup& group) {
    Messages messages;
    const Type type = part_.type();
    if (group.rows.bytes(type) == 0) return;
    const auto add = [&](auto& to, int other, const Rows& run) {
      to.push_back({other, at(group, group.keys_at, run.begin, type), bytes_of(group, run, type)});
    };
    for (int other = 0; other < ranks_.size; ++other) {
      if (other == ranks_.rank) continue;
      for (const Rows& run : part_.plan().runs(ranks_.rank, other)) add(messages.sends, other, run);
      for (const Rows& run : part_.plan().runs(other, ranks_.rank)) {
        add(messages.receives, other, run);
      }
    }
    exchange(ranks_, messages, memory_.stream(travel_));
  }

  // What the calls add to, or do not write.
  void clear_sums() {
    const Summed summed = part_.summed();
    const bool accumulate = part_.gradients().accumulate;
    if (summed.keys() && (accumulate || !summed.dk || !summed.dv)) {
      for (const KeyGroup& group : gathered_.groups()) {
        memory_.zero(workspace_ + group.sums_at,
                     bytes_of(group, gathered_.keys(), part_.sum_type()));
      }
    }
    if (summed.dsink && accumulate) {
      gathered_.sinks().clear(gathered_.sinks_in(workspace_), memory_);
    }
  }

  // is_last: the sinks' gradients, which are complete then, travel too.
  void send_sums(const KeyGroup& group, bool is_last) {
    Messages messages;
    if (part_.summed().keys()) add_sum_messages(group, messages);
    if (is_last && part_.summed().dsink) {
      gathered_.sinks().add_messages(gathered_.sinks_in(workspace_), messages);
    }
    exchange(ranks_, messages, memory_.stream(travel_));
  }

  void add_sum_messages(const KeyGroup& group, Messages& messages) const {
    const Type type = part_.sum_type();
    if (group.rows.bytes(type) == 0) return;
    std::byte* to = workspace_ + group.parts_at;
    for (int other = 0; other < ranks_.size; ++other) {
      if (other == ranks_.rank) continue;
      for (const Rows& run : part_.plan().runs(other, ranks_.rank)) {
        messages.sends.push_back(
            {other, at(group, group.sums_at, run.begin, type), bytes_of(group, run, type)});
      }
      for (const Rows& run : part_.plan().runs(ranks_.rank, other)) {
        messages.receives.push_back({other, to, bytes_of(group, run, type)});
        to += bytes_of(group, run, type);
      }
    }
  }

  // Adds the parts of dk and dv in the order of ranks, this one among them.
  void sum_keys(const KeyGroup& group) {
    const Summed summed = part_.summed();
    if (!summed.keys()) return;
    const Type type = part_.sum_type();
    std::byte* const totals = workspace_ + group.totals_at;
    const Rows all{0, part_.rows()};
    memory_.zero(totals, bytes_of(group, all, type));
    const std::byte* came = workspace_ + group.parts_at;
    for (int other = 0; other < ranks_.size; ++other) {
      for (const Rows& run : part_.plan().runs(ranks_.rank, other)) {
        const bool is_own = other == ranks_.rank;
        add_part(group, is_own ? at(group, group.sums_at, run.begin, type) : came, run);
        if (!is_own) came += bytes_of(group, run, type);
      }
    }
    const Gradients& to = part_.gradients();
    const auto write = [&](Half half, const Tensor& gradient) {
      memory_.write(view(group, totals, all, type, half), heads_of(gradient, group.keys),
                    to.accumulate);
    };
    if (summed.dk) write(Half::keys, to.dk);
    if (summed.dv) write(Half::values, to.dv);
  }

  void add_part(const KeyGroup& group, const std::byte* from, const Rows& run) {
    const Type type = part_.sum_type();
    const auto& own = part_.plan().blocks[std::size_t(ranks_.rank)];
    const auto block = std::lower_bound(own.begin(), own.end(), run.begin / kBlock);
    const std::int64_t first = (block - own.begin()) * kBlock;  // its local row
    std::byte* const sum = workspace_ + group.totals_at + first * group.rows.bytes(type);
    for (const Half half : kHalves) {
      memory_.write(view(group, const_cast<std::byte*>(from), run, type, half),
                    view(group, sum, run, type, half), true);
    }
  }

  const Part& part_;
  const Gathered& gathered_;
  const Collectives& ranks_;
  Memory& memory_;
  std::byte* const workspace_;
  const Lane travel_;
  const void *positions_ = nullptr, *spans_ = nullptr;
};

class GatherCall final : public SchemeCall {
 public:
  explicit GatherCall(const Part& part) : part_(part), gathered_(part) {}

  std::int64_t workspace() const override { return gathered_.workspace(); }
  // A message has the keys, or the sums, of one group.
  std::string facts() const override {
    std::string text = ", groups of key heads";
    for (const KeyGroup& group : gathered_.groups()) {
      text += " " + std::to_string(size_of_range(group.keys));
    }
    return text;
  }
  void run(const Collectives& ranks, Memory& memory) override {
    GatherPass(part_, gathered_, ranks, memory).run();
  }

 private:
  const Part& part_;
  const Gathered gathered_;
};

}  // namespace

std::unique_ptr<SchemeCall> gather_call(const Part& part) {
  return std::make_unique<GatherCall>(part);
}

}  // namespace regard::distributed
