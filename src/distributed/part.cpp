#include "distributed/part.hpp"

#include <utility>

#include "distributed/views.hpp"
#include "problem/overlap.hpp"
#include "problem/refuse.hpp"

namespace regard::distributed {
namespace {

constexpr const char* kByPlan = "is not taken here: the plan says which pairs are visible";

void refuse_tensor(const char* name, const Tensor& x, const char* reason) {
  if (x.given()) refuse(name, x, reason, Code::unsupported);
}

}  // namespace

Part::Part(Pass pass, const Attention& a, const Plan& plan, int rank, const Run& run)
    : pass_(pass),
      a_(a),
      plan_(PlanContents::of(plan)),
      rank_(rank),
      run_(run),
      rows_(plan.rows(rank)) {
  check_options();
  check_rows();
}

Part::Part(const Attention& a, const ForwardOutputs& to, const Plan& plan, int rank, const Run& run)
    : Part(Pass::forward, a, plan, rank, run) {
  outputs_ = to;
  workspace_of(checked_locally(), to);
  check_distinct(a_, to);  // in all columns
}

Part::Part(const Attention& a, const BackwardInputs& from, const Gradients& to, const Plan& plan,
           int rank, const Run& run)
    : Part(Pass::backward, a, plan, rank, run) {
  inputs_ = from;
  gradients_ = to;
  Gradients local = to;
  local.dbias = columns(to.dbias, {0, rows_});
  workspace_of(checked_locally(), from, local);
  if (is_over_keys(to.dbias) &&
      to.dbias.sizes[std::size_t(to.dbias.rank - 1)] != plan_.whole.length) {
    refuse("dbias", to.dbias, "must have the sizes of bias, " + to_string(a_.bias));
  }
  if (to.dbias.given()) check_overlap("dbias", to.dbias);
  check_distinct(a_, from, to);  // in all columns
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

Summed Part::summed() const {
  return {
      .dk = gradients_.dk.given(), .dv = gradients_.dv.given(), .dsink = gradients_.dsink.given()};
}

void Part::require_reachable(Memory& memory) const {
  const std::pair<const char*, const Tensor&> tensors[] = {{"q", a_.q},
                                                           {"k", a_.k},
                                                           {"v", a_.v},
                                                           {"bias", a_.bias},
                                                           {"mask", a_.mask},
                                                           {"alibi_slopes", a_.alibi_slopes},
                                                           {"sink", a_.sink},
                                                           {"out", outputs_.out},
                                                           {"lse", outputs_.lse},
                                                           {"out", inputs_.out},
                                                           {"lse", inputs_.lse},
                                                           {"dout", inputs_.dout},
                                                           {"dlse", inputs_.dlse},
                                                           {"delta", inputs_.delta},
                                                           {"dq", gradients_.dq},
                                                           {"dk", gradients_.dk},
                                                           {"dv", gradients_.dv},
                                                           {"dbias", gradients_.dbias},
                                                           {"dsink", gradients_.dsink}};
  for (const auto& [name, tensor] : tensors) memory.require_reachable(name, tensor);
}

std::int64_t Part::workspace_of(const Attention& a, const ForwardOutputs& to) const {
  return std::int64_t(regard::workspace(a, to, run_in(nullptr, 0)));
}

std::int64_t Part::workspace_of(const Attention& a, const BackwardInputs& from,
                                const Gradients& to) const {
  return std::int64_t(regard::workspace(a, from, to, run_in(nullptr, 0)));
}

Run Part::run_in(std::byte* memory, std::int64_t bytes) const {
  Run inner = run_;
  inner.workspace = {};
  if (bytes > 0) inner.workspace = {.data = memory, .size = std::size_t(bytes)};
  return inner;
}

std::string Part::facts() const {
  // A new option of Attention has to be named here: it is equal on all ranks, or refused above.
  const auto& [q, k, v, bias, mask, row_spans, key_spans, visible, alibi_slopes, sink, cu_seqlens_q,
               cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, q_positions,
               k_position, batch_begin, head_begin, scale, softcap, causal, window, dropout,
               precision, deterministic, continue_from] = a_;
  const WholeSequence& w = plan_.whole;
  std::string text = pass_ == Pass::backward ? "backward" : "forward";
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
  add("dk", summed().dk);
  add("dv", summed().dv);
  add("dbias", gradients_.dbias.given());
  add("dsink", summed().dsink);
  text += ", cu_seqlens";
  for (const std::int32_t cut : w.cu_seqlens) text += " " + std::to_string(cut);
  return text;
}

}  // namespace regard::distributed
