// Compares the outputs with float64, and all other bytes with what they were before the call.
#include "verify/judge.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "tensors/mirror.hpp"
#include "verify/comparison.hpp"
#include "verify/float64.hpp"
#include "verify/rounding.hpp"

namespace regard::cli {

namespace {

// Marks the units of rows past the sequences' ends: q's rows or k's rows of `heads` heads.
void mark_rows(Array& unit, const Attention& a, bool of_q, bool is_lse) {
  if (!unit.given()) return;
  const Shape shape = shape_of(a);
  const Tensor t = unit.tensor();
  std::vector<char> real(static_cast<std::size_t>(unit.count()));
  const Index heads = of_q ? shape.heads_q : shape.heads_kv;
  const Index width = is_lse ? 1 : unit.sizes.back();
  for (Index b = 0; b < shape.batch; ++b) {
    const Sequence s = sequence_of(a, shape, b);
    for (Index h = 0; h < heads; ++h) {
      for (Index row = 0; row < (of_q ? s.len_q : s.len_k); ++row) {
        const Index first = of_q ? s.first_q : s.first_k;
        const Index at = is_lse ? lse_offset(t, shape.packed, b, h, first, row)
                                : row_offset(t, shape.packed, b, h, first, row);
        for (Index d = 0; d < width; ++d) real[static_cast<std::size_t>(at + d)] = 1;
      }
    }
  }
  for (Index n = 0; n < unit.count(); ++n) {
    if (!real[static_cast<std::size_t>(n)]) unit.set(n, kUntouched);
  }
}

Array held_before(const Slab& slab) {
  Array held(f64, {slab.tensor.sizes.begin(), slab.tensor.sizes.begin() + slab.tensor.rank});
  Index n = 0;
  for_each_offset(slab.tensor, [&](Index offset) { held.set(n++, slab.get_before(offset)); });
  return held;
}

// The bytes of what a call only reads; empty for outputs.
std::vector<std::vector<std::byte>> inputs_of(const RandomProblem& p) {
  std::vector<std::vector<std::byte>> inputs;
  for (const Slab& slab : p.slabs) {
    inputs.push_back(slab.before.empty() ? slab.memory : std::vector<std::byte>{});
  }
  return inputs;
}

// The calls, where the tensors are on the device. Their workspace there is not cleared.
void compute(const RandomProblem& p, Run run, Mirror& mirror) {
  const Attention a = mirror.at(p.attention);
  const ForwardOutputs outputs = mirror.at(p.forward_outputs());
  const BackwardInputs from = mirror.at(p.backward_inputs());
  const Gradients gradients = mirror.at(p.gradients());
  if (run.device.kind != Device::Kind::cpu) {
    const std::size_t backward = p.dout ? workspace(a, from, gradients, run) : 0;
    run.workspace = mirror.workspace(std::max(workspace(a, outputs, run), backward));
  }
  forward(a, outputs, run);
  if (p.dout) backward(a, from, gradients, run);
}

// Whether the calls were made; else the verdict says why not. A device that fails is no verdict.
bool is_computed(const RandomProblem& p, const Run& run, Mirror& mirror, Verdict& verdict) {
  try {
    compute(p, run, mirror);
    return true;
  } catch (const Error& error) {
    const bool on_gpu = run.device.kind != Device::Kind::cpu;
    const bool of_device =
        error.code() == Code::unavailable || error.code() == Code::device_failure;
    if (on_gpu && of_device) throw;
    if (on_gpu && error.code() == Code::unsupported) {
      verdict.left_out = error.what();
    } else {
      verdict.complaints.push_back(fmt::format("refused: {}", error.what()));
    }
    return false;
  }
}

void look_for_writes(const RandomProblem& p, const std::vector<std::vector<std::byte>>& inputs,
                     const Mirror& mirror, Verdict& verdict) {
  if (mirror.written_between()) {
    verdict.complaints.push_back("bytes outside every tensor's memory were written");
  }
  for (std::size_t n = 0; n < p.slabs.size(); ++n) {
    if (p.slabs[n].before.empty() && p.slabs[n].memory != inputs[n]) {
      verdict.complaints.push_back(fmt::format("{}: the input was written to", p.slabs[n].name));
    }
  }
}

// What results are compared with: in float64, by an unfused computation, and units of rounding.
struct References {
  Results want, unfused, unit;
};
References references_of(const RandomProblem& p, int threads) {
  const WantedTypes wanted = p.wanted();
  const Tensor dout = p.dout ? p.dout->tensor : Tensor{};
  const Tensor dlse = p.dlse ? p.dlse->tensor : Tensor{};
  UnfusedOptions options;
  options.wanted = wanted;
  References of{float64_reference(p.attention, dout, dlse, wanted, threads),
                unfused_attention(p.attention, dout, dlse, options),
                rounding_units(p.attention, dout, dlse, wanted)};
  mark_rows(of.unit.out, p.attention, true, false);
  mark_rows(of.unit.lse, p.attention, true, true);
  mark_rows(of.unit.dq, p.attention, true, false);
  mark_rows(of.unit.dk, p.attention, false, false);
  mark_rows(of.unit.dv, p.attention, false, false);
  return of;
}

void compare_results(const RandomProblem& p, const References& of, Verdict& verdict) {
  const Tolerance of_out{.factor = 2, .slack = 4}, of_lse{.factor = 2, .slack = 8};
  const Tolerance of_gradient{.factor = 3, .slack = 6};
  struct Item {
    const Slab* slab;
    Reference reference;
    Tolerance tolerance;
  };
  const auto& [want, unfused, unit] = of;
  const Index dim = p.shape().dim, dim_v = p.shape().dim_v;
  const Item items[] = {
      {p.out, {want.out, unfused.out, unit.out, dim_v}, of_out},
      {p.lse, {want.lse, unfused.lse, unit.lse, 1}, of_lse},
      {p.dq, {want.dq, unfused.dq, unit.dq, dim}, of_gradient},
      {p.dk, {want.dk, unfused.dk, unit.dk, dim}, of_gradient},
      {p.dv, {want.dv, unfused.dv, unit.dv, dim_v}, of_gradient},
      {p.dbias, {want.dbias, unfused.dbias, unit.dbias, 1}, of_gradient},
      {p.dsink, {want.dsink, unfused.dsink, unit.dsink, 1}, of_gradient},
  };
  for (std::size_t n = 0; n < kOutputNames.size(); ++n) {
    const Item& item = items[n];
    if (!item.slab) continue;
    const bool added = n >= 2 && p.accumulate;
    const Array held = added ? held_before(*item.slab) : Array{};
    Comparison c =
        compare(item.slab->tensor, item.reference, item.tolerance, added ? &held : nullptr);
    verdict.ratios[n] = c.ratio;
    verdict.compared[n] = true;
    if (c.failed()) verdict.complaints.push_back(fmt::format("{}{}", kOutputNames[n], c.complaint));
    if (item.slab->changed_outside()) {
      verdict.complaints.push_back(
          fmt::format("{}: bytes outside the tensor were written", kOutputNames[n]));
    }
  }
}

}  // namespace

Verdict judge(RandomProblem& p, Run run) {
  Verdict verdict;
  const int threads = run.threads;
  if (threads == 0) run.threads = p.threads;
  const std::vector<std::vector<std::byte>> inputs = inputs_of(p);
  Mirror mirror(run.device);
  for (const Slab& slab : p.slabs) mirror.add(slab.memory.data(), slab.memory.size());
  mirror.upload();
  if (!is_computed(p, run, mirror, verdict)) return verdict;
  mirror.download();
  look_for_writes(p, inputs, mirror, verdict);
  compare_results(p, references_of(p, threads), verdict);
  return verdict;
}

}  // namespace regard::cli
