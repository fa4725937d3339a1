// `regard attend`: reads tensors, runs forward and backward, writes the results.
#include "attend.hpp"

#include <algorithm>
#include <array>
#include <limits>

#include "files/output_file.hpp"
#include "output/output.hpp"
#include "output/progress.hpp"
#include "tensors/mirror.hpp"

namespace regard::cli {

namespace {

Array zeros_like(const AttendInputs& in, const char* name) {
  const Array& array = in.arrays.at(name);
  return Array(array.type, array.sizes);
}

std::array<const Array*, 7> all_of(const AttendResults& r) {
  return {&r.out, &r.lse, &r.dq, &r.dk, &r.dv, &r.dbias, &r.dsink};
}

void give_dout(AttendInputs& in) {
  if (in.dout.given()) return;
  output::note("no dout given: ones");
  Array dout = in.like_q(in.attention.v.sizes[in.packed ? 2 : 3], in.attention.q.type);
  for (Index n = 0; n < dout.count(); ++n) dout.set(n, 1);
  in.dout = in.view(in.arrays.insert_or_assign("dout", std::move(dout)).first->second);
}

// Makes the plans, so that the library refuses what it must before memory is taken.
AttendResults planned(AttendInputs& in, bool backward, const Run& run) {
  AttendResults r;
  r.passes.push_back({.name = "forward", .plan = explain(in.attention, Pass::forward, run)});
  if (backward) {
    r.passes.push_back({.name = "backward", .plan = explain(in.attention, Pass::backward, run)});
    give_dout(in);
  } else if (in.dout.given() || in.dlse.given()) {
    output::note("dout and dlse are not used without --backward");
  }
  return r;
}

void make_arrays(AttendResults& r, const AttendInputs& in, bool backward) {
  const Attention& a = in.attention;
  r.out = in.like_q(a.v.sizes[in.packed ? 2 : 3], a.q.type);
  r.lse = in.like_lse();
  if (in.packed || a.seqused_q.given()) {  // rows of no sequence have no key
    constexpr double kHidden = -std::numeric_limits<double>::infinity();
    for (Index n = 0; n < r.lse.count(); ++n) r.lse.set(n, kHidden);
  }
  if (!backward) return;
  r.dq = zeros_like(in, "q");
  r.dk = zeros_like(in, "k");
  r.dv = zeros_like(in, "v");
  if (a.bias.given()) r.dbias = zeros_like(in, "bias");
  if (a.sink.given()) r.dsink = zeros_like(in, "sink");
}

void compute(AttendResults& r, const AttendInputs& in, Mirror& mirror, const Run& run, int repeat) {
  for (const auto& [name, array] : in.arrays) mirror.add(array.data(), array.byte_count());
  for (const Array* array : all_of(r)) mirror.add(array->data(), array->byte_count());
  mirror.upload();
  const Attention there = mirror.at(in.attention);
  const ForwardOutputs outputs =
      mirror.at(ForwardOutputs{.out = in.view(r.out), .lse = in.lse_view(r.lse)});
  {
    const Progress progress("forward");
    prepare(there, outputs, run);
    r.passes[0].seconds =
        median_device_seconds(run.device, repeat, [&] { forward(there, outputs, run); });
  }
  if (r.passes.size() > 1) {
    const BackwardInputs from{.out = outputs.out,
                              .lse = outputs.lse,
                              .dout = mirror.at(in.dout),
                              .dlse = mirror.at(in.dlse)};
    const Gradients to = mirror.at(Gradients{.dq = in.view(r.dq),
                                             .dk = in.view(r.dk),
                                             .dv = in.view(r.dv),
                                             .dbias = r.dbias.tensor(),
                                             .dsink = r.dsink.tensor()});
    const Progress progress("backward");
    prepare(there, from, to, run);
    r.passes[1].seconds =
        median_device_seconds(run.device, repeat, [&] { backward(there, from, to, run); });
  }
  mirror.download();
}

}  // namespace

std::size_t AttendResults::workspace() const {
  return std::max(passes[0].plan.workspace, passes.back().plan.workspace);
}

int run_attend(const AttendArguments& arguments) {
  if (!arguments.out.empty() && is_stdout(arguments.out)) output::give_stdout_to_data();
  AttendInputs in = read_inputs(arguments);
  const Run run = described_run(arguments.run);
  Mirror mirror(run.device);
  check_target(arguments, in);
  AttendResults r = planned(in, arguments.backward, run);
  AttendReport report(in, arguments);
  report.add_plans(r);
  make_arrays(r, in, arguments.backward);
  compute(r, in, mirror, run, arguments.repeat);
  report.add_passes(r);
  if (arguments.compare) report.add_comparison(compare_with_unfused(in, r, arguments), r);
  if (!arguments.out.empty()) report.add_written(write_results(arguments.out, r));
  report.finish();
  return 0;
}

}  // namespace regard::cli
