#include "distributed/part.hpp"

#include <algorithm>

#include "distributed/memory.hpp"
#include "distributed/visibility.hpp"
#include "plan/count.h"
#include "problem/refuse.hpp"

namespace regard::distributed {
namespace {

constexpr const char* kByPlan = "is not taken here: the plan says which pairs are visible";

void refuse_tensor(const char* name, const Tensor& x, const char* reason) {
  if (x.given()) refuse(name, x, reason, Code::unsupported);
}

// Columns [begin, end) of what broadcasts over all keys.
Tensor columns(Tensor x, const Rows& keys) {
  if (!x.given() || x.rank < 1 || x.rank > Tensor::kMaxRank) return x;
  const auto last = std::size_t(x.rank - 1);
  if (x.sizes[last] == 1) return x;
  x.sizes[last] = keys.end - keys.begin;
  if (x.data && keys.begin > 0) {
    x.data = static_cast<std::byte*>(x.data) +
             keys.begin * x.strides[last] * std::int64_t(size_of(x.type));
  }
  return x;
}

bool is_over_keys(const Tensor& x) {
  const bool has_columns = x.given() && x.rank >= 1 && x.rank <= Tensor::kMaxRank;
  return has_columns && x.sizes[std::size_t(x.rank - 1)] != 1;
}

// Memory that does not exist yet: no caller's tensor lies there.
std::byte* unmade_memory() { return reinterpret_cast<std::byte*>(std::uintptr_t(1) << 62); }

}  // namespace

Part::Part(const Attention& a, const Plan& plan, int rank, const Run& run)
    : a_(a),
      plan_(PlanContents::of(plan)),
      rank_(rank),
      run_(run),
      rows_(plan.rows(rank)),
      keys_(plan.keys(rank)) {
  check_options();
  check_rows();
}

void Part::check_options() const {
  refuse_tensor("row_spans", a_.row_spans, kByPlan);
  refuse_tensor("key_spans", a_.key_spans, kByPlan);
  if (a_.visible.given()) refuse("visible", "a Mask", kByPlan, Code::unsupported);
  refuse_tensor("cu_seqlens_q", a_.cu_seqlens_q, kByPlan);
  refuse_tensor("cu_seqlens_k", a_.cu_seqlens_k, kByPlan);
  refuse_tensor("seqused_q", a_.seqused_q, "is not taken here: give a mask (B, 1, 1, S)");
  refuse_tensor("seqused_k", a_.seqused_k, "is not taken here: give a mask (B, 1, 1, S)");
  require(a_.max_seqlen_q == 0, "max_seqlen_q", a_.max_seqlen_q, "is for packed sequences");
  require(a_.max_seqlen_k == 0, "max_seqlen_k", a_.max_seqlen_k, "is for packed sequences");
  refuse_tensor("q_positions", a_.q_positions, "is not taken here: the plan has the positions");
  require(a_.k_position == 0, "k_position", a_.k_position,
          "is not taken here: the plan has the positions");
  if (a_.causal != Causal::none) {
    refuse("causal", a_.causal == Causal::top_left ? "top_left" : "bottom_right", kByPlan,
           Code::unsupported);
  }
  if (a_.window.left != -1) refuse("window.left", a_.window.left, kByPlan, Code::unsupported);
  if (a_.window.right != -1) refuse("window.right", a_.window.right, kByPlan, Code::unsupported);
}

void Part::check_rows() const {
  const WholeSequence& w = plan_.whole;
  const auto check = [&](const char* name, const Tensor& x, std::int64_t heads, std::int64_t size) {
    require(x.given(), name, "none", "must be given");
    const std::int64_t batch = a_.q.sizes[0];
    const bool fits = x.rank == 4 && x.sizes[0] == batch && x.sizes[1] == heads &&
                      x.sizes[2] == rows_ && x.sizes[3] == size;
    if (fits) return;
    refuse(name, x,
           "must be [" + std::to_string(batch) + ", " + std::to_string(heads) + ", " +
               std::to_string(rows_) + ", " + std::to_string(size) + "]: rank " +
               std::to_string(rank_) + " has " + std::to_string(rows_) + " rows of the plan");
  };
  check("q", a_.q, w.heads_q, w.head_size);
  check("k", a_.k, w.heads_kv, w.head_size);
  check("v", a_.v, w.heads_kv, w.head_size_v);
  for (const auto& [name, x] : {std::pair{"bias", &a_.bias}, std::pair{"mask", &a_.mask}}) {
    if (!is_over_keys(*x)) continue;
    if (x->sizes[std::size_t(x->rank - 1)] == w.length) continue;
    refuse(
        name, *x,
        "its last size must be " + std::to_string(w.length) + ", all keys of the sequence, or 1");
  }
}

// The caller's own tensors, with as many keys as rows, for the library's checks of types, shapes
// and shared memory.
Attention Part::checked_locally() const {
  Attention a = a_;
  a.bias = columns(a.bias, {0, rows_});
  a.mask = columns(a.mask, {0, rows_});
  return a;
}

void Part::describe_forward(const ForwardOutputs& to) {
  regard::workspace(checked_locally(), to, inner(nullptr));
  make_spans();
  lay_out();
  const Attention a = gathered(unmade_memory(), positions().data(), spans_.data());
  layout_.size += std::int64_t(regard::workspace(a, to, inner(nullptr)));
}

void Part::describe_backward(const BackwardInputs& from, const Gradients& to) {
  is_backward_ = true;
  summed_ = {.dk = to.dk.given(), .dv = to.dv.given(), .dsink = to.dsink.given()};
  Gradients local = to;
  local.dbias = columns(to.dbias, {0, rows_});
  regard::workspace(checked_locally(), from, local, inner(nullptr));
  if (is_over_keys(to.dbias)) {
    if (to.dbias.sizes[std::size_t(to.dbias.rank - 1)] != plan_.whole.length) {
      refuse("dbias", to.dbias, "must have the sizes of bias, " + to_string(a_.bias));
    }
    keys_ = {0, plan_.whole.length};  // the call writes the whole gradient
  }
  make_spans();
  lay_out();
  std::byte* const memory = unmade_memory();
  const Attention a = gathered(memory, positions().data(), spans_.data());
  layout_.size += std::int64_t(regard::workspace(a, from, gathered(memory, to), inner(nullptr)));
}

void Part::make_spans() {
  const Visibility visibility(plan_.whole);
  if (!visibility.has_documents()) return;
  const std::int64_t count = keys_.end - keys_.begin;
  spans_.clear();
  for (const Rows& run : own_runs()) {
    for (std::int64_t row = run.begin; row < run.end; ++row) {
      const Rows document = visibility.document_of(row);
      for (const std::int64_t bound : {document.begin, document.end}) {
        spans_.push_back(std::int32_t(std::clamp<std::int64_t>(bound - keys_.begin, 0, count)));
      }
    }
  }
}

std::int64_t Part::row_bytes(Type type) const {
  const WholeSequence& w = plan_.whole;
  const Count bytes = Count(a_.q.sizes[0]) * w.heads_kv * (w.head_size + w.head_size_v) *
                      std::int64_t(size_of(type));
  return bytes.value();
}

void Part::lay_out() {
  MemoryLayout<kAlignment> memory;
  const Count rows = rows_, keys = keys_.end - keys_.begin;
  const Count sum_bytes = row_bytes(sum_type());
  layout_.keys = memory.take(keys * row_bytes(type()));
  layout_.positions = memory.take(Count(std::int64_t(positions().size() * sizeof(std::int32_t))));
  layout_.spans = memory.take(Count(std::int64_t(spans_.size() * sizeof(std::int32_t))));
  if (summed_.keys()) {
    Count needed = 0;
    for (int other = 0; other < plan_.ranks; ++other) {
      if (other == rank_) continue;
      for (const Rows& run : plan_.runs(rank_, other)) needed = needed + (run.end - run.begin);
    }
    layout_.sums = memory.take(keys * sum_bytes);
    layout_.parts = memory.take(needed * sum_bytes);
    layout_.totals = memory.take(rows * sum_bytes);
  }
  if (summed_.dsink) {
    layout_.sinks =
        memory.take(Count(plan_.ranks + 1) * plan_.whole.heads_q * std::int64_t(sizeof(float)));
  }
  layout_.call = memory.size();
  require(layout_.call < Count::kMost, "q", a_.q, kTooLarge);
  layout_.size =
      layout_.call + std::int64_t(kAlignment);  // memory of the caller's may begin anywhere
}

std::vector<Rows> Part::gaps() const {
  const std::vector<bool>& needed = plan_.needs[std::size_t(rank_)];
  std::vector<Rows> found;
  for (std::int64_t begin = keys_.begin; begin < keys_.end; begin += kBlock) {
    if (needed[std::size_t(begin / kBlock)]) continue;
    found.push_back({begin, std::min(keys_.end, begin + kBlock)});
  }
  return found;
}

Tensor Part::rows_at(void* memory, Type type, std::int64_t n, Half half) const {
  const WholeSequence& w = plan_.whole;
  const std::int64_t batch = a_.q.sizes[0], heads = w.heads_kv;
  const std::int64_t width = w.head_size + w.head_size_v;
  auto* const first = static_cast<std::byte*>(memory) +
                      (half == Half::keys ? 0 : w.head_size) * std::int64_t(size_of(type));
  return {first,
          type,
          {batch, heads, n, half == Half::keys ? w.head_size : w.head_size_v},
          {heads * width, width, batch * heads * width, 1}};
}

Attention Part::gathered(std::byte* workspace, const void* positions, const void* spans) const {
  const Window band = Visibility(plan_.whole).band();
  const std::int64_t count = keys_.end - keys_.begin;
  Attention a = a_;
  a.k = rows_at(workspace + layout_.keys, type(), count, Half::keys);
  a.v = rows_at(workspace + layout_.keys, type(), count, Half::values);
  a.bias = columns(a.bias, keys_);
  a.mask = columns(a.mask, keys_);
  if (Visibility(plan_.whole).has_documents()) {
    a.row_spans = Tensor(spans, Type::i32, {1, 1, rows_, 2});
  }
  a.q_positions = Tensor(positions, Type::i32, {std::int64_t(this->positions().size())});
  a.k_position = keys_.begin;
  a.window = band;
  return a;
}

Gradients Part::gathered(std::byte* workspace, const Gradients& to) const {
  const std::int64_t count = keys_.end - keys_.begin;
  Gradients inner = to;
  std::byte* const sums = workspace + layout_.sums;
  if (summed_.dk) inner.dk = rows_at(sums, sum_type(), count, Half::keys);
  if (summed_.dv) inner.dv = rows_at(sums, sum_type(), count, Half::values);
  if (summed_.dsink) {
    const std::int64_t heads = plan_.whole.heads_q;
    std::byte* const own = workspace + layout_.sinks + rank_ * heads * std::int64_t(sizeof(float));
    inner.dsink = Tensor(own, Type::f32, {heads});
  }
  return inner;
}

Run Part::inner(std::byte* workspace) const {
  Run inner = run_;
  inner.workspace = {};
  const std::int64_t size = layout_.size - layout_.call - std::int64_t(kAlignment);
  if (workspace && size > 0) {
    inner.workspace = {.data = workspace + layout_.call, .size = std::size_t(size)};
  }
  return inner;
}

std::string Part::facts() const {
  // A new option of Attention has to be named here: it is equal on all ranks, or refused above.
  const auto& [q, k, v, bias, mask, row_spans, key_spans, visible, alibi_slopes, sink, cu_seqlens_q,
               cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, q_positions,
               k_position, batch_begin, head_begin, scale, softcap, causal, window, dropout,
               precision, deterministic, continue_from] = a_;
  const WholeSequence& w = plan_.whole;
  std::string text = is_backward_ ? "backward" : "forward";
  const auto add = [&](const char* name, const auto& value) {
    text += std::string(", ") + name + " " + printed(value);
  };
  add("plan", plan_.title());
  add("batch", q.sizes[0]);
  add("heads_q", w.heads_q);
  add("heads_kv", w.heads_kv);
  add("head_size", w.head_size);
  add("head_size_v", w.head_size_v);
  add("causal", int(w.causal));
  add("window.left", w.window.left);
  add("window.right", w.window.right);
  add("type", q.type);
  add("bias", bias.type);
  add("mask", mask.type);
  add("alibi_slopes", alibi_slopes.type);
  add("sink", sink.type);
  add("batch_begin", batch_begin);
  add("head_begin", head_begin);
  add("scale", scale ? printed(*scale) : std::string("default"));
  add("softcap", softcap);
  add("dropout.p", dropout.p);
  add("dropout.seed", dropout.seed_words ? std::string("in memory") : printed(dropout.seed));
  add("dropout.offset", dropout.offset);
  add("precision", int(precision));
  add("continue_from", continue_from);
  add("dk", summed_.dk);
  add("dv", summed_.dv);
  add("dsink", summed_.dsink);
  text += ", cu_seqlens";
  for (const std::int32_t cut : w.cu_seqlens) text += " " + std::to_string(cut);
  return text;
}

}  // namespace regard::distributed
