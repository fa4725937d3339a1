// Gather and halo: keys come in the order of the sequence, one call computes all of the rank's
// rows, and sums of dk and dv return to the owners of the keys.
//
// Keys come again for the backward pass, so that a rank keeps no more than its own between the two.
#include <algorithm>
#include <utility>
#include <vector>

#include "distributed/key_rows.hpp"
#include "distributed/scheme_call.hpp"
#include "distributed/sink_sums.hpp"
#include "distributed/views.hpp"
#include "distributed/visibility.hpp"
#include "problem/refuse.hpp"

namespace regard::distributed {
namespace {

// Offsets in the workspace, each a multiple of kAlignment.
struct GatherLayout {
  std::int64_t keys = 0;       // (keys, B, Hkv, D + Dv): the received keys with their values
  std::int64_t positions = 0;  // of own rows, where a GPU reads them
  std::int64_t spans = 0;      // of documents, likewise
  std::int64_t sums = 0;       // (keys, B, Hkv, D + Dv): this rank's dk and dv for these keys
  std::int64_t parts = 0;      // (rows that other ranks need, ...): theirs for own keys
  std::int64_t totals = 0;     // (rows, B, Hkv, D + Dv): sums over ranks
  std::int64_t sinks = 0;      // SinkSums
  std::int64_t call = 0;       // the workspace of the call
  std::int64_t call_size = 0;
};

// The call over the keys that this rank needs, and where everything lies.
class Gathered {
 public:
  explicit Gathered(const Part& part)
      : part_(part),
        key_rows_(part),
        sinks_(part),
        keys_(range_of_keys(part)),
        spans_(document_spans(part.whole(), own_runs(), keys_)) {
    lay_out();
    std::byte* const memory = unmade_memory();
    const Attention a = attention(memory, positions().data(), spans_.data());
    at_.call_size = part.pass() == Pass::forward
                        ? part.workspace_of(a, part.outputs())
                        : part.workspace_of(a, part.inputs(), gradients(memory));
  }

  const GatherLayout& layout() const { return at_; }
  const KeyRows& key_rows() const { return key_rows_; }
  const SinkSums& sinks() const { return sinks_; }
  const Rows& keys() const { return keys_; }  // the range that the call has
  std::vector<Rows> own_runs() const { return part_.plan().runs(part_.rank(), part_.rank()); }
  const std::vector<std::int32_t>& spans() const { return spans_; }
  const std::vector<std::int32_t>& positions() const {
    return part_.plan().first_positions[std::size_t(part_.rank())];
  }

  // The keys that no row needs.
  std::vector<Rows> gaps() const {
    const std::vector<bool>& needed = part_.plan().needs[std::size_t(part_.rank())];
    std::vector<Rows> found;
    for (std::int64_t begin = keys_.begin; begin < keys_.end; begin += kBlock) {
      if (needed[std::size_t(begin / kBlock)]) continue;
      found.push_back({begin, std::min(keys_.end, begin + kBlock)});
    }
    return found;
  }

  // The tables are where kernels read them.
  Attention attention(std::byte* workspace, const void* positions, const void* spans) const {
    const Visibility visibility(part_.whole());
    const std::int64_t count = size_of_range(keys_);
    Attention a = part_.attention();
    a.k = key_rows_.view(workspace + at_.keys, part_.type(), count, Half::keys);
    a.v = key_rows_.view(workspace + at_.keys, part_.type(), count, Half::values);
    a.bias = columns(a.bias, keys_);
    a.mask = columns(a.mask, keys_);
    if (visibility.has_documents()) {
      a.row_spans = Tensor(spans, Type::i32, {1, 1, part_.rows(), 2});
    }
    a.q_positions = Tensor(positions, Type::i32, {std::int64_t(this->positions().size())});
    a.k_position = keys_.begin;
    a.window = visibility.band();
    return a;
  }

  Gradients gradients(std::byte* workspace) const {
    const std::int64_t count = size_of_range(keys_);
    const Summed summed = part_.summed();
    Gradients inner = part_.gradients();
    std::byte* const sums = workspace + at_.sums;
    if (summed.dk) inner.dk = key_rows_.view(sums, part_.sum_type(), count, Half::keys);
    if (summed.dv) inner.dv = key_rows_.view(sums, part_.sum_type(), count, Half::values);
    if (summed.dsink) inner.dsink = sinks_.own(workspace + at_.sinks);
    return inner;
  }

 private:
  static Rows range_of_keys(const Part& part) {
    // With a dbias over all keys the call writes the whole gradient.
    if (is_over_keys(part.gradients().dbias)) return {0, part.whole().length};
    return part.plan().keys(part.rank());
  }

  void lay_out() {
    MemoryLayout<kAlignment> memory;
    const Count rows = part_.rows(), keys = size_of_range(keys_);
    const Count sum_bytes = key_rows_.bytes(part_.sum_type());
    at_.keys = memory.take(keys * key_rows_.bytes(part_.type()));
    at_.positions = memory.take(Count(std::int64_t(positions().size() * sizeof(std::int32_t))));
    at_.spans = memory.take(Count(std::int64_t(spans_.size() * sizeof(std::int32_t))));
    if (part_.summed().keys()) {
      Count needed = 0;
      for (int other = 0; other < part_.plan().ranks; ++other) {
        if (other == part_.rank()) continue;
        for (const Rows& run : part_.plan().runs(part_.rank(), other)) {
          needed = needed + size_of_range(run);
        }
      }
      at_.sums = memory.take(keys * sum_bytes);
      at_.parts = memory.take(needed * sum_bytes);
      at_.totals = memory.take(rows * sum_bytes);
    }
    if (part_.summed().dsink) at_.sinks = memory.take(sinks_.bytes());
    at_.call = memory.size();
    require(at_.call < Count::kMost, "q", part_.attention().q, kTooLarge);
  }

  const Part& part_;
  const KeyRows key_rows_;
  const SinkSums sinks_;
  const Rows keys_;
  const std::vector<std::int32_t> spans_;
  GatherLayout at_{};
};

// The work, once the arguments of all ranks are known to be right.
class GatherPass {
 public:
  GatherPass(const Part& part, const Gathered& gathered, const Collectives& ranks, Memory& memory)
      : part_(part),
        gathered_(gathered),
        rows_(gathered.key_rows()),
        at_(gathered.layout()),
        ranks_(ranks),
        memory_(memory),
        keys_(memory.workspace() + at_.keys),
        sums_(memory.workspace() + at_.sums),
        parts_(memory.workspace() + at_.parts),
        sinks_(memory.workspace() + at_.sinks) {}

  void run() {
    const Attention& given = part_.attention();
    const Attention a = with_tables();  // first: a copy from the host may wait for the stream
    place_own(given);
    receive_keys();
    const Run run = part_.run_in(memory_.workspace() + at_.call, at_.call_size);
    if (part_.pass() == Pass::forward) {
      regard::forward(a, part_.outputs(), run);
      return;
    }
    clear_sums();
    regard::backward(a, part_.inputs(), gathered_.gradients(memory_.workspace()), run);
    sum_over_ranks();
  }

 private:
  Attention with_tables() {
    std::byte* const workspace = memory_.workspace();
    const auto table = [&](const std::vector<std::int32_t>& numbers, std::int64_t at) {
      return memory_.table(numbers, workspace + at);
    };
    return gathered_.attention(workspace, table(gathered_.positions(), at_.positions),
                               table(gathered_.spans(), at_.spans));
  }

  std::size_t bytes_of(const Rows& rows, Type type) const {
    return std::size_t(size_of_range(rows) * rows_.bytes(type));
  }
  // Where a key of the sequence lies in `keys` or `sums`.
  std::byte* at(std::byte* memory, std::int64_t key, Type type) const {
    return memory + (key - gathered_.keys().begin) * rows_.bytes(type);
  }
  Tensor view(std::byte* memory, const Rows& rows, Type type, Half half) const {
    return rows_.view(memory, type, size_of_range(rows), half);
  }

  void place_own(const Attention& a) {
    const Type type = part_.type();
    std::int64_t first = 0;
    for (const Rows& run : gathered_.own_runs()) {
      const Rows local{first, first + size_of_range(run)};
      for (const Half half : kHalves) {
        memory_.write(rows_of(half == Half::keys ? a.k : a.v, local),
                      view(at(keys_, run.begin, type), run, type, half), false);
      }
      first = local.end;
    }
    for (const Rows& gap : gathered_.gaps()) {
      memory_.zero(at(keys_, gap.begin, type), bytes_of(gap, type));
    }
  }

  void receive_keys() {
    Messages messages;
    const Type type = part_.type();
    if (rows_.bytes(type) == 0) return;
    for (int other = 0; other < ranks_.size; ++other) {
      if (other == ranks_.rank) continue;
      for (const Rows& run : part_.plan().runs(ranks_.rank, other)) {
        messages.sends.push_back({other, at(keys_, run.begin, type), bytes_of(run, type)});
      }
      for (const Rows& run : part_.plan().runs(other, ranks_.rank)) {
        messages.receives.push_back({other, at(keys_, run.begin, type), bytes_of(run, type)});
      }
    }
    exchange(ranks_, messages, part_.run().stream);
  }

  // What the call adds to, or does not write.
  void clear_sums() {
    const Summed summed = part_.summed();
    const bool accumulate = part_.gradients().accumulate;
    if (summed.keys() && (accumulate || !summed.dk || !summed.dv)) {
      memory_.zero(sums_, bytes_of(gathered_.keys(), part_.sum_type()));
    }
    if (summed.dsink && accumulate) gathered_.sinks().clear(sinks_, memory_);
  }

  void sum_over_ranks() {
    const Gradients& to = part_.gradients();
    Messages messages;
    if (part_.summed().keys()) add_sum_messages(messages);
    if (part_.summed().dsink) gathered_.sinks().add_messages(sinks_, messages);
    exchange(ranks_, messages, part_.run().stream);
    if (part_.summed().keys()) sum_keys(to);
    if (part_.summed().dsink) gathered_.sinks().sum(sinks_, memory_, to.dsink, to.accumulate);
  }

  void add_sum_messages(Messages& messages) const {
    const Type type = part_.sum_type();
    if (rows_.bytes(type) == 0) return;
    std::byte* to = parts_;
    for (int other = 0; other < ranks_.size; ++other) {
      if (other == ranks_.rank) continue;
      for (const Rows& run : part_.plan().runs(other, ranks_.rank)) {
        messages.sends.push_back({other, at(sums_, run.begin, type), bytes_of(run, type)});
      }
      for (const Rows& run : part_.plan().runs(ranks_.rank, other)) {
        messages.receives.push_back({other, to, bytes_of(run, type)});
        to += bytes_of(run, type);
      }
    }
  }

  // Adds the parts of dk and dv in the order of ranks, this one among them.
  void sum_keys(const Gradients& to) {
    const Type type = part_.sum_type();
    std::byte* const totals = memory_.workspace() + at_.totals;
    const Rows all{0, part_.rows()};
    memory_.zero(totals, bytes_of(all, type));
    const std::byte* came = parts_;
    for (int other = 0; other < ranks_.size; ++other) {
      for (const Rows& run : part_.plan().runs(ranks_.rank, other)) {
        const bool is_own = other == ranks_.rank;
        add_part(is_own ? at(sums_, run.begin, type) : came, run, totals);
        if (!is_own) came += bytes_of(run, type);
      }
    }
    const Summed summed = part_.summed();
    const auto write = [&](Half half, const Tensor& gradient) {
      memory_.write(view(totals, all, type, half), gradient, to.accumulate);
    };
    if (summed.dk) write(Half::keys, to.dk);
    if (summed.dv) write(Half::values, to.dv);
  }

  void add_part(const std::byte* from, const Rows& run, std::byte* totals) {
    const Type type = part_.sum_type();
    const auto& own = part_.plan().blocks[std::size_t(ranks_.rank)];
    const auto block = std::lower_bound(own.begin(), own.end(), run.begin / kBlock);
    const std::int64_t first = (block - own.begin()) * kBlock;  // its local row
    std::byte* const sum = totals + first * rows_.bytes(type);
    for (const Half half : kHalves) {
      memory_.write(view(const_cast<std::byte*>(from), run, type, half), view(sum, run, type, half),
                    true);
    }
  }

  const Part& part_;
  const Gathered& gathered_;
  const KeyRows& rows_;
  const GatherLayout& at_;
  const Collectives& ranks_;
  Memory& memory_;
  std::byte *keys_, *sums_, *parts_, *sinks_;
};

class GatherCall final : public SchemeCall {
 public:
  explicit GatherCall(const Part& part) : part_(part), gathered_(part) {}

  std::int64_t workspace() const override {
    return gathered_.layout().call + gathered_.layout().call_size;
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
