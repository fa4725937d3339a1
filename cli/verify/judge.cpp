// Compares the outputs with float64, and all other bytes with what they were before the call.
#include "verify/judge.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "tensors/mirror.hpp"
#include "verify/comparison.hpp"
#include "verify/float64.hpp"

namespace regard::cli {

namespace {

Array held_before(const Slab& slab) {
  Array held(f64, {slab.tensor.sizes.begin(), slab.tensor.sizes.begin() + slab.tensor.rank});
  Index n = 0;
  for_each_offset(slab.tensor, [&](Index offset) { held.set(n++, slab.get_before(offset)); });
  return held;
}

}  // namespace

Verdict judge(RandomProblem& p, Run run) {
  Verdict verdict;
  const int threads = run.threads;
  const bool on_gpu = run.device.kind != Device::Kind::cpu;
  if (threads == 0) run.threads = p.threads;
  std::vector<std::vector<std::byte>> inputs;
  for (const Slab& slab : p.slabs) {
    inputs.push_back(slab.before.empty() ? slab.memory : std::vector<std::byte>{});
  }
  Mirror mirror(run.device);
  for (const Slab& slab : p.slabs) mirror.add(slab.memory.data(), slab.memory.size());
  mirror.upload();
  try {
    const Attention a = mirror.at(p.attention);
    const ForwardOutputs outputs = mirror.at(p.forward_outputs());
    const BackwardInputs from = mirror.at(p.backward_inputs());
    const Gradients gradients = mirror.at(p.gradients());
    if (on_gpu) {  // a workspace that is not cleared
      const std::size_t backward = p.dout ? workspace(a, from, gradients, run) : 0;
      run.workspace = mirror.workspace(std::max(workspace(a, outputs, run), backward));
    }
    forward(a, outputs, run);
    if (p.dout) backward(a, from, gradients, run);
  } catch (const Error& error) {
    const bool of_device =
        error.code() == Code::unavailable || error.code() == Code::device_failure;
    if (on_gpu && of_device) throw;
    if (on_gpu && error.code() == Code::unsupported) {
      verdict.left_out = error.what();
    } else {
      verdict.complaints.push_back(fmt::format("refused: {}", error.what()));
    }
    return verdict;
  }
  mirror.download();
  if (mirror.written_between()) {
    verdict.complaints.push_back("bytes outside every tensor's memory were written");
  }
  for (std::size_t n = 0; n < p.slabs.size(); ++n) {
    if (p.slabs[n].before.empty() && p.slabs[n].memory != inputs[n]) {
      verdict.complaints.push_back(fmt::format("{}: the input was written to", p.slabs[n].name));
    }
  }
  const WantedTypes wanted = p.wanted();
  const Tensor dout = p.dout ? p.dout->tensor : Tensor{};
  const Tensor dlse = p.dlse ? p.dlse->tensor : Tensor{};
  const Results want = float64_reference(p.attention, dout, dlse, wanted, threads);
  const Results unit = rounding_units(p.attention, dout, dlse, wanted, threads);

  constexpr double kOut = 5, kLse = 9, kGradient = 7;  // units
  struct Item {
    const Slab* slab;
    Reference reference;
  };
  const Index dim = p.shape().dim, dim_v = p.shape().dim_v;
  const Item items[] = {
      {p.out, {want.out, unit.out, dim_v, kOut}},
      {p.lse, {want.lse, unit.lse, 1, kLse}},
      {p.dq, {want.dq, unit.dq, dim, kGradient}},
      {p.dk, {want.dk, unit.dk, dim, kGradient}},
      {p.dv, {want.dv, unit.dv, dim_v, kGradient}},
      {p.dbias, {want.dbias, unit.dbias, 1, kGradient}},
      {p.dsink, {want.dsink, unit.dsink, 1, kGradient}},
  };
  for (std::size_t n = 0; n < kOutputNames.size(); ++n) {
    const Item& item = items[n];
    if (!item.slab) continue;
    const bool added = n >= 2 && p.accumulate;
    const Array held = added ? held_before(*item.slab) : Array{};
    const Comparison c = compare(item.slab->tensor, item.reference, added ? &held : nullptr);
    verdict.ratios[n] = c.ratio;
    verdict.compared[n] = true;
    if (c.failed()) verdict.complaints.push_back(fmt::format("{}{}", kOutputNames[n], c.complaint));
    if (item.slab->changed_outside()) {
      verdict.complaints.push_back(
          fmt::format("{}: bytes outside the tensor were written", kOutputNames[n]));
    }
  }
  return verdict;
}

}  // namespace regard::cli
