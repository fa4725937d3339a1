// Ring: keys and values pass from rank to rank, and each rank attends to those of one owner at a
// time, its own first.
//
// Each call continues the result of those before it, in f32 or wider. In backward each call has the
// final out and lse; its sums for dk and dv travel with the keys, in f32 or wider, and are home
// after a full turn.
#include <algorithm>
#include <utility>
#include <vector>

#include "distributed/key_rows.hpp"
#include "distributed/ring_pieces.hpp"
#include "distributed/scheme_call.hpp"
#include "distributed/sink_sums.hpp"
#include "distributed/views.hpp"
#include "distributed/visibility.hpp"
#include "problem/refuse.hpp"

namespace regard::distributed {
namespace {

// Offsets in the workspace, each a multiple of kAlignment.
struct RingLayout {
  std::int64_t keys[2] = {};   // (most rows, B, Hkv, D + Dv): the keys that are here, or come
  std::int64_t sums[2] = {};   // as keys: their dk and dv
  std::int64_t positions = 0;  // of own rows, where a GPU reads them
  std::int64_t spans = 0;      // RingPieces::spans, likewise
  std::int64_t run_spans = 0;  // (rows, 2), of one run, likewise
  std::int64_t out = 0;        // (B, Hq, rows, Dv), where the caller's is narrow
  std::int64_t lse = 0;        // (B, Hq, rows), where the caller has none
  std::int64_t dq = 0;         // (B, Hq, rows, D)
  std::int64_t dbias = 0;      // one that broadcasts over keys
  std::int64_t sinks = 0;      // SinkSums
  std::int64_t zero = 0;       // one element
  std::int64_t call = 0;       // the workspace of a call
  std::int64_t call_size = 0;
};

class RingCall final : public SchemeCall {
 public:
  explicit RingCall(const Part& part);

  std::int64_t workspace() const override { return at_.call + at_.call_size; }
  void run(const Collectives&, Memory&) override;

 private:
  int owner_at(int step) const {
    return (part_.rank() - step + part_.plan().ranks) % part_.plan().ranks;
  }
  std::int64_t rows_at(int step) const { return part_.plan().rows(owner_at(step)); }
  bool is_forward() const { return part_.pass() == Pass::forward; }
  bool sums_keys() const { return part_.summed().keys(); }
  Type bias_sum_type() const {
    return part_.gradients().dbias.type == Type::f64 ? Type::f64 : Type::f32;
  }

  void lay_out();
  void find_call_size();
  Attention attention(std::byte* workspace, int step, const RingPiece&, bool is_first,
                      const RingTables&) const;
  ForwardOutputs outputs(std::byte* workspace) const;
  Gradients gradients(std::byte* workspace, int step, const RingPiece&, bool is_first) const;

  void begin(std::byte* workspace, Memory&) const;
  void pass_on(const Collectives&, std::byte* workspace, const std::int64_t (&at)[2], Type,
               int step) const;
  RingTables tables(std::byte* workspace, Memory&) const;
  void attend(std::byte* workspace, Memory&, int step, RingTables) const;
  void end(std::byte* workspace, Memory&) const;

  const Part& part_;
  const KeyRows rows_;
  const SinkSums sinks_;
  const RingPieces pieces_;
  RingLayout at_{};
};

RingCall::RingCall(const Part& part) : part_(part), rows_(part), sinks_(part), pieces_(part) {
  lay_out();
  find_call_size();
}

// ----------------------------------------------------------------------------- layout in memory

void RingCall::lay_out() {
  const ForwardOutputs& to = part_.outputs();
  const Gradients& gradients = part_.gradients();
  const WholeSequence& whole = part_.whole();
  MemoryLayout<kAlignment> memory;
  std::int64_t most = 0;
  for (int step = 0; step < part_.plan().ranks; ++step) most = std::max(most, rows_at(step));
  const Count heads_and_rows = Count(part_.batch()) * whole.heads_q * part_.rows();
  const Count one_column = heads_and_rows * std::int64_t(size_of(part_.sum_type()));
  for (std::int64_t& at : at_.keys) at = memory.take(Count(most) * rows_.bytes(part_.type()));
  if (sums_keys()) {
    for (std::int64_t& at : at_.sums) at = memory.take(Count(most) * rows_.bytes(part_.sum_type()));
  }
  at_.positions = memory.take(divide_up(part_.rows(), kBlock) * std::int64_t(sizeof(std::int32_t)));
  at_.spans = memory.take(std::int64_t(pieces_.spans().size() * sizeof(std::int32_t)));
  if (!whole.cu_seqlens.empty()) {
    at_.run_spans = memory.take(2 * part_.rows() * std::int64_t(sizeof(std::int32_t)));
  }
  if (is_forward() && to.out.type != part_.sum_type()) {
    at_.out = memory.take(one_column * whole.head_size_v);
  }
  if (is_forward() && !to.lse.given()) at_.lse = memory.take(one_column);
  if (gradients.dq.given()) at_.dq = memory.take(one_column * whole.head_size);
  if (gradients.dbias.given() && !is_over_keys(gradients.dbias)) {
    at_.dbias = memory.take(bytes_of(dense(nullptr, bias_sum_type(), gradients.dbias)));
  }
  if (part_.summed().dsink) at_.sinks = memory.take(sinks_.bytes());
  at_.zero = memory.take(sizeof(float));
  at_.call = memory.size();
  require(at_.call < Count::kMost, "q", part_.attention().q, kTooLarge);
}

void RingCall::find_call_size() {
  std::byte* const memory = unmade_memory();
  RingTables tables{.positions = part_.plan().first_positions[std::size_t(part_.rank())].data(),
                    .spans = pieces_.spans().data()};
  for (int step = 0; step < part_.plan().ranks; ++step) {
    bool is_first = step == 0;
    for (const RingPiece& piece : pieces_.of(owner_at(step))) {
      std::vector<std::int32_t> spans;
      if (piece.is_run) spans = pieces_.spans_of_run(piece);
      tables.spans_of_run = spans.data();
      const Attention a = attention(memory, step, piece, is_first, tables);
      const std::int64_t bytes =
          is_forward()
              ? part_.workspace_of(a, outputs(memory))
              : part_.workspace_of(a, part_.inputs(), gradients(memory, step, piece, is_first));
      at_.call_size = std::max(at_.call_size, bytes);
      is_first = false;
    }
  }
}

Attention RingCall::attention(std::byte* workspace, int step, const RingPiece& piece, bool is_first,
                              const RingTables& tables) const {
  const Type type = part_.type();
  const std::int64_t count = size_of_range(piece.places);
  std::byte* const keys = workspace + at_.keys[step % 2] + piece.places.begin * rows_.bytes(type);
  Attention a = pieces_.attention(piece, tables);
  a.k = rows_.view(keys, type, count, Half::keys);
  a.v = rows_.view(keys, type, count, Half::values);
  if (is_first) return a;
  a.sink = {};
  a.continue_from = true;
  return a;
}

ForwardOutputs RingCall::outputs(std::byte* workspace) const {
  ForwardOutputs to = part_.outputs();
  const Type sum = part_.sum_type();
  const std::int64_t heads = part_.whole().heads_q;
  if (to.out.type != sum) to.out = dense(workspace + at_.out, sum, to.out);
  if (!to.lse.given()) {
    to.lse = Tensor(workspace + at_.lse, sum, {part_.batch(), heads, part_.rows()});
  }
  return to;
}

// All are added to what calls before have left. Each column of a dbias over keys is one call's.
Gradients RingCall::gradients(std::byte* workspace, int step, const RingPiece& piece,
                              bool is_first) const {
  const Gradients& to = part_.gradients();
  const Type sum = part_.sum_type();
  const std::int64_t count = size_of_range(piece.places);
  std::byte* const sums = workspace + at_.sums[step % 2] + piece.places.begin * rows_.bytes(sum);
  Gradients one{.accumulate = true};
  if (to.dq.given()) one.dq = dense(workspace + at_.dq, sum, to.dq);
  if (to.dk.given()) one.dk = rows_.view(sums, sum, count, Half::keys);
  if (to.dv.given()) one.dv = rows_.view(sums, sum, count, Half::values);
  if (is_over_keys(to.dbias)) {
    one.dbias = columns(to.dbias, {piece.first_key, piece.first_key + count});
  } else if (to.dbias.given()) {
    one.dbias = dense(workspace + at_.dbias, bias_sum_type(), to.dbias);
  }
  if (to.dsink.given() && is_first) one.dsink = sinks_.own(workspace + at_.sinks);
  return one;
}

// ---------------------------------------------------------------------------------------- the pass

void RingCall::run(const Collectives& ranks, Memory& memory) {
  std::byte* const workspace = memory.workspace();
  const RingTables tables = this->tables(workspace, memory);
  begin(workspace, memory);
  for (int step = 0; step < ranks.size; ++step) {
    if (step + 1 < ranks.size) pass_on(ranks, workspace, at_.keys, part_.type(), step);
    attend(workspace, memory, step, tables);
    if (sums_keys()) pass_on(ranks, workspace, at_.sums, part_.sum_type(), step);
  }
  if (part_.summed().dsink) {
    Messages messages;
    sinks_.add_messages(workspace + at_.sinks, messages);
    exchange(ranks, messages, part_.run().stream);
  }
  end(workspace, memory);
}

// Own keys, and what calls add to.
void RingCall::begin(std::byte* workspace, Memory& memory) const {
  const Attention& a = part_.attention();
  const Gradients& to = part_.gradients();
  for (const Half half : kHalves) {
    memory.write(half == Half::keys ? a.k : a.v,
                 rows_.view(workspace + at_.keys[0], part_.type(), part_.rows(), half), false);
  }
  const auto zero = [&](std::int64_t at, std::int64_t bytes) {
    memory.zero(workspace + at, std::size_t(bytes));
  };
  if (sums_keys()) zero(at_.sums[0], part_.rows() * rows_.bytes(part_.sum_type()));
  if (to.dq.given()) {
    zero(at_.dq, bytes_of(dense(nullptr, part_.sum_type(), to.dq)).value());
  }
  if (to.dsink.given()) sinks_.clear(workspace + at_.sinks, memory);
  if (is_over_keys(to.dbias) && !to.accumulate) {
    zero(at_.zero, sizeof(float));
    const Tensor all = in_four_dimensions(to.dbias);
    Tensor from = all;
    from.data = workspace + at_.zero;
    from.type = Type::f32;
    from.strides = {};
    memory.write(from, all, false);
  } else if (to.dbias.given() && !is_over_keys(to.dbias)) {
    zero(at_.dbias, bytes_of(dense(nullptr, bias_sum_type(), to.dbias)).value());
  }
}

// To the next rank what is here, from the one before what the next step has.
void RingCall::pass_on(const Collectives& ranks, std::byte* workspace, const std::int64_t (&at)[2],
                       Type type, int step) const {
  if (ranks.size == 1) return;
  const auto bytes = [&](int n) { return std::size_t(rows_at(n) * rows_.bytes(type)); };
  const int next = (ranks.rank + 1) % ranks.size;
  const int before = (ranks.rank + ranks.size - 1) % ranks.size;
  Messages messages;
  if (bytes(step) > 0) messages.sends.push_back({next, workspace + at[step % 2], bytes(step)});
  if (bytes(step + 1) > 0) {
    messages.receives.push_back({before, workspace + at[(step + 1) % 2], bytes(step + 1)});
  }
  exchange(ranks, messages, part_.run().stream);
}

RingTables RingCall::tables(std::byte* workspace, Memory& memory) const {
  const auto table = [&](const std::vector<std::int32_t>& numbers, std::int64_t at) {
    return memory.table(numbers, workspace + at);
  };
  const auto& positions = part_.plan().first_positions[std::size_t(part_.rank())];
  return {.positions = table(positions, at_.positions),
          .spans = static_cast<const std::int32_t*>(table(pieces_.spans(), at_.spans))};
}

void RingCall::attend(std::byte* workspace, Memory& memory, int step, RingTables tables) const {
  const Run run = part_.run_in(workspace + at_.call, at_.call_size);
  bool is_first = step == 0;
  for (const RingPiece& piece : pieces_.of(owner_at(step))) {
    std::vector<std::int32_t> spans;
    if (piece.is_run) spans = pieces_.spans_of_run(piece);
    tables.spans_of_run = memory.table(spans, workspace + at_.run_spans);
    const Attention a = attention(workspace, step, piece, is_first, tables);
    if (is_forward()) {
      regard::forward(a, outputs(workspace), run);
    } else {
      regard::backward(a, part_.inputs(), gradients(workspace, step, piece, is_first), run);
    }
    is_first = false;
  }
}

// To the caller's tensors. Sums of own keys are home.
void RingCall::end(std::byte* workspace, Memory& memory) const {
  const Tensor& out = part_.outputs().out;
  const Gradients& to = part_.gradients();
  const Type sum = part_.sum_type();
  if (is_forward()) {
    if (out.type != sum) memory.write(outputs(workspace).out, out, false);
    return;
  }
  const auto write = [&](const Tensor& from, const Tensor& gradient) {
    if (!gradient.given()) return;
    memory.write(in_four_dimensions(from), in_four_dimensions(gradient), to.accumulate);
  };
  const int ranks = part_.plan().ranks;
  std::byte* const home = workspace + at_.sums[ranks == 1 ? 0 : ranks % 2];
  write(dense(workspace + at_.dq, sum, to.dq), to.dq);
  write(rows_.view(home, sum, part_.rows(), Half::keys), to.dk);
  write(rows_.view(home, sum, part_.rows(), Half::values), to.dv);
  if (!is_over_keys(to.dbias)) {
    write(dense(workspace + at_.dbias, bias_sum_type(), to.dbias), to.dbias);
  }
  if (to.dsink.given()) sinks_.sum(workspace + at_.sinks, memory, to.dsink, to.accumulate);
}

}  // namespace

std::unique_ptr<SchemeCall> ring_call(const Part& part) { return std::make_unique<RingCall>(part); }

}  // namespace regard::distributed
