// Ulysses: each rank receives all rows of some query heads and the keys that they read, attends to
// them as one process would, and sends the results' rows back.
//
// Inputs come again for the backward pass. Where query heads do not divide by ranks, a rank has
// more of them than another, or none.
#include <algorithm>
#include <utility>
#include <vector>

#include "distributed/call_of_heads.hpp"
#include "distributed/dealt_heads.hpp"
#include "distributed/heads.hpp"
#include "distributed/scheme_call.hpp"
#include "distributed/sink_sums.hpp"
#include "distributed/views.hpp"
#include "distributed/visibility.hpp"
#include "problem/refuse.hpp"

namespace regard::distributed {
namespace {

// A tensor that moves: to the call's, by heads, and from there to the caller's, by rows.
struct Moving {
  DealtHeads dealt;
  Tensor* by_heads;  // a member of a CallOfHeads
  bool has_columns;  // unlike the lse
  bool comes;        // is an input
  Tensor by_rows{};  // where it is a result
};

class UlyssesCall final : public SchemeCall {
 public:
  explicit UlyssesCall(const Part& part);
  UlyssesCall(const UlyssesCall&) = delete;
  UlyssesCall& operator=(const UlyssesCall&) = delete;

  std::int64_t workspace() const override { return call_at_ + call_size_; }
  std::string facts() const override;
  void run(const Collectives&, Memory&) override;

 private:
  enum class Way { to_heads, to_rows, both };
  using HeadsOfRanks = std::vector<Heads>;

  Heads own() const { return query_heads(part_.whole(), part_.plan().ranks, part_.rank()); }
  HeadsOfRanks of_queries() const;
  HeadsOfRanks of_keys() const;
  HeadsOfRanks of_scores(const Tensor& x) const;  // what broadcasts to (B, Hq, rows, S)

  void move(const char* name, const Tensor&, Type, HeadsOfRanks, Tensor& by_heads, Way);
  void move_lse(const char* name, const Tensor&, Tensor& by_heads, Way);
  void move_inputs();
  void move_outputs();
  void move_gradients();

  void lay_out();
  void place(std::byte* workspace, const void* spans);
  CallOfHeads of_heads(const Heads&) const;
  void compute(std::byte* workspace, Memory&);
  void add_sink_messages(std::byte* workspace, Messages&) const;

  const Part& part_;
  const std::vector<Heads> runs_;  // a call for each
  const std::vector<std::int32_t> spans_;
  std::vector<Moving> moving_;
  CallOfHeads call_{};  // of all own heads
  std::int64_t spans_at_ = 0, sinks_at_ = 0, call_at_ = 0, call_size_ = 0;
};

UlyssesCall::UlyssesCall(const Part& part)
    : part_(part),
      runs_(runs_of_heads(part.whole(), own())),
      spans_(document_spans(part.whole(), {{0, part.whole().length}}, {0, part.whole().length})) {
  call_.a = part.attention();
  call_.a.causal = part.whole().causal;
  call_.a.window = part.whole().window;
  const bool is_forward = part.pass() == Pass::forward;
  move_inputs();
  is_forward ? move_outputs() : move_gradients();
  lay_out();
  place(unmade_memory(), spans_.data());
  for (const Heads& run : runs_) {
    const CallOfHeads one = of_heads(run);
    const std::int64_t bytes = is_forward ? part.workspace_of(one.a, one.outputs)
                                          : part.workspace_of(one.a, one.inputs, one.gradients);
    call_size_ = std::max(call_size_, bytes);
  }
}

// ------------------------------------------------------------------------------------- what moves

UlyssesCall::HeadsOfRanks UlyssesCall::of_queries() const {
  HeadsOfRanks found;
  for (int rank = 0; rank < part_.plan().ranks; ++rank) {
    found.push_back(query_heads(part_.whole(), part_.plan().ranks, rank));
  }
  return found;
}

UlyssesCall::HeadsOfRanks UlyssesCall::of_keys() const {
  HeadsOfRanks found;
  for (const Heads& queries : of_queries()) found.push_back(key_heads(part_.whole(), queries));
  return found;
}

// One head for all goes to each rank that has heads.
UlyssesCall::HeadsOfRanks UlyssesCall::of_scores(const Tensor& x) const {
  HeadsOfRanks found = of_queries();
  if (in_four_dimensions(x).sizes[1] > 1) return found;
  for (Heads& own : found) own = {0, std::min<std::int64_t>(1, size_of_range(own))};
  return found;
}

void UlyssesCall::move(const char* name, const Tensor& x, Type type, HeadsOfRanks heads,
                       Tensor& by_heads, Way way) {
  if (!x.given()) return;
  moving_.push_back({.dealt = DealtHeads(name, part_, x, type, std::move(heads)),
                     .by_heads = &by_heads,
                     .has_columns = true,
                     .comes = way != Way::to_rows,
                     .by_rows = way == Way::to_heads ? Tensor{} : x});
}

void UlyssesCall::move_lse(const char* name, const Tensor& x, Tensor& by_heads, Way way) {
  if (!x.given()) return;
  move(name, with_one_column(x), x.type, of_queries(), by_heads, way);
  moving_.back().has_columns = false;
}

void UlyssesCall::move_inputs() {
  const Attention& a = part_.attention();
  const BackwardInputs& from = part_.inputs();
  move("q", a.q, a.q.type, of_queries(), call_.a.q, Way::to_heads);
  move("k", a.k, a.k.type, of_keys(), call_.a.k, Way::to_heads);
  move("v", a.v, a.v.type, of_keys(), call_.a.v, Way::to_heads);
  move("bias", a.bias, a.bias.type, of_scores(a.bias), call_.a.bias, Way::to_heads);
  move("mask", a.mask, a.mask.type, of_scores(a.mask), call_.a.mask, Way::to_heads);
  move("out", from.out, from.out.type, of_queries(), call_.inputs.out, Way::to_heads);
  move("dout", from.dout, from.dout.type, of_queries(), call_.inputs.dout, Way::to_heads);
  move_lse("lse", from.lse, call_.inputs.lse, Way::to_heads);
  move_lse("dlse", from.dlse, call_.inputs.dlse, Way::to_heads);
  move_lse("delta", from.delta, call_.inputs.delta, Way::to_heads);
}

void UlyssesCall::move_outputs() {
  const ForwardOutputs& to = part_.outputs();
  const Way way = part_.attention().continue_from ? Way::both : Way::to_rows;
  move("out", to.out, to.out.type, of_queries(), call_.outputs.out, way);
  move_lse("lse", to.lse, call_.outputs.lse, way);
}

// What is added, to what several ranks have or to what the caller has, is rounded to a narrow type
// once, after that.
void UlyssesCall::move_gradients() {
  const Gradients& to = part_.gradients();
  const Type sum = part_.sum_type(), q = to.accumulate ? sum : to.dq.type;
  const Type bias = to.dbias.type == Type::f64 ? Type::f64 : Type::f32;
  move("dq", to.dq, q, of_queries(), call_.gradients.dq, Way::to_rows);
  move("dk", to.dk, sum, of_keys(), call_.gradients.dk, Way::to_rows);
  move("dv", to.dv, sum, of_keys(), call_.gradients.dv, Way::to_rows);
  move("dbias", to.dbias, bias, of_scores(to.dbias), call_.gradients.dbias, Way::to_rows);
}

std::string UlyssesCall::facts() const {
  std::string text;
  for (const Moving& one : moving_) text += one.dealt.facts();
  return text;
}

// ----------------------------------------------------------------------------- layout in memory

// Messages of the results lie where those of the inputs were.
void UlyssesCall::lay_out() {
  DealtHeads::Layout memory;
  spans_at_ = memory.take(Count(std::int64_t(spans_.size() * sizeof(std::int32_t))));
  if (part_.summed().dsink) {
    sinks_at_ = memory.take(Count(part_.whole().heads_q) * std::int64_t(sizeof(float)));
  }
  for (Moving& one : moving_) one.dealt.take_heads(memory);
  DealtHeads::Layout packed = memory, parts = memory;
  for (Moving& one : moving_) {
    if (one.comes) one.dealt.take_packed(packed);
    if (one.by_rows.given()) one.dealt.take_parts(parts);
  }
  call_at_ = std::max(packed.size(), parts.size());
  require(call_at_ < Count::kMost, "q", part_.attention().q, kTooLarge);
}

void UlyssesCall::place(std::byte* workspace, const void* spans) {
  for (const Moving& one : moving_) {
    const Tensor x = one.dealt.by_heads(workspace);
    *one.by_heads = one.has_columns ? x : without_column(x);
  }
  const WholeSequence& whole = part_.whole();
  if (!whole.cu_seqlens.empty()) {
    call_.a.row_spans = Tensor(spans, Type::i32, {1, 1, whole.length, 2});
  }
  if (part_.summed().dsink) {
    call_.gradients.dsink = Tensor(workspace + sinks_at_, Type::f32, {whole.heads_q});
  }
}

// The part of the call that has a run of own query heads.
CallOfHeads UlyssesCall::of_heads(const Heads& run) const {
  const auto counted_from = [](const Heads& heads, std::int64_t first) {
    return Heads{heads.begin - first, heads.end - first};
  };
  const WholeSequence& whole = part_.whole();
  CallOfHeads one = call_.of(run, counted_from(run, own().begin),
                             counted_from(key_heads(whole, run), key_heads(whole, own()).begin));
  // Runs may share a head of dbias.
  one.gradients.accumulate = runs_.size() > 1;
  return one;
}

// ---------------------------------------------------------------------------------------- the pass

void UlyssesCall::run(const Collectives& ranks, Memory& memory) {
  std::byte* const workspace = memory.workspace();
  place(workspace, memory.table(spans_, workspace + spans_at_));
  Messages inputs, results;
  for (const Moving& one : moving_) {
    if (one.comes) one.dealt.send_rows(workspace, memory, inputs);
  }
  exchange(ranks, inputs, part_.run().stream);
  compute(workspace, memory);
  for (const Moving& one : moving_) {
    if (one.by_rows.given()) one.dealt.send_heads(workspace, results);
  }
  if (part_.summed().dsink) add_sink_messages(workspace, results);
  exchange(ranks, results, part_.run().stream);
  for (const Moving& one : moving_) {
    if (!one.by_rows.given()) continue;
    one.dealt.write_rows(workspace, memory, one.by_rows, part_.gradients().accumulate);
  }
  if (part_.summed().dsink) {
    write_sinks(memory, workspace + sinks_at_, part_.gradients().dsink, part_.whole().heads_q,
                part_.gradients().accumulate);
  }
}

void UlyssesCall::compute(std::byte* workspace, Memory& memory) {
  const bool is_forward = part_.pass() == Pass::forward;
  if (!is_forward && runs_.size() > 1) {
    for (const Moving& one : moving_) {
      if (one.by_rows.given()) one.dealt.clear(workspace, memory);
    }
    const Tensor& dsink = call_.gradients.dsink;
    if (dsink.given()) memory.zero(dsink.data, std::size_t(dsink.sizes[0]) * sizeof(float));
  }
  const Run run = part_.run_in(workspace + call_at_, call_size_);
  for (const Heads& heads : runs_) {
    const CallOfHeads one = of_heads(heads);
    is_forward ? regard::forward(one.a, one.outputs, run)
               : regard::backward(one.a, one.inputs, one.gradients, run);
  }
}

// Each rank has the gradients of its heads' sinks; every rank gets all.
void UlyssesCall::add_sink_messages(std::byte* workspace, Messages& messages) const {
  const HeadsOfRanks heads = of_queries();
  const auto place = [&](int rank) {
    const Heads& of_rank = heads[std::size_t(rank)];
    const auto data = workspace + sinks_at_ + of_rank.begin * std::int64_t(sizeof(float));
    return std::pair(data, std::size_t(size_of_range(of_rank)) * sizeof(float));
  };
  const auto [own, own_bytes] = place(part_.rank());
  for (int other = 0; other < part_.plan().ranks; ++other) {
    if (other == part_.rank()) continue;
    const auto [data, bytes] = place(other);
    if (own_bytes > 0) messages.sends.push_back({other, own, own_bytes});
    if (bytes > 0) messages.receives.push_back({other, data, bytes});
  }
}

}  // namespace

std::unique_ptr<SchemeCall> ulysses_call(const Part& part) {
  return std::make_unique<UlyssesCall>(part);
}

}  // namespace regard::distributed
