// `regard attend`: reads tensors, runs forward and backward, writes the results.
#include "attend.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <filesystem>

#include "command_line/parse.hpp"
#include "files/npy.hpp"
#include "files/safetensors.hpp"
#include "output/progress.hpp"
#include "output/table.hpp"
#include "tensors/mirror.hpp"

namespace regard::cli {

namespace {

using Named = std::vector<std::pair<std::string, Tensor>>;

Array zeros_like(const AttendInputs& in, const char* name) {
  const Array& array = in.arrays.at(name);
  return Array(array.type, array.sizes);
}

std::array<const Array*, 7> all_of(const AttendResults& r) {
  return {&r.out, &r.lse, &r.dq, &r.dk, &r.dv, &r.dbias, &r.dsink};
}

Named named(const AttendResults& r) {
  Named list;
  const std::pair<const char*, const Array*> all[] = {
      {"out", &r.out}, {"lse", &r.lse},     {"dq", &r.dq},      {"dk", &r.dk},
      {"dv", &r.dv},   {"dbias", &r.dbias}, {"dsink", &r.dsink}};
  for (const auto& [name, array] : all) {
    if (array->given()) list.emplace_back(name, array->tensor());
  }
  return list;
}

void write_results(const std::string& target, const Named& results) {
  if (target.ends_with(".safetensors")) {
    write_safetensors(target, results);
  } else {
    std::error_code failure;
    std::filesystem::create_directories(target, failure);
    if (failure) {
      throw UsageError(fmt::format("--out = {}: {}", target, failure.message()));
    }
    for (const auto& [name, tensor] : results) write_npy(target + "/" + name + ".npy", tensor);
  }
  std::string list;
  for (const auto& [name, tensor] : results) list += (list.empty() ? "" : ", ") + name;
  fmt::print("wrote {}: {}\n", target, list);
}

// Refuses before hours of work what would fail after them.
void check_target(const std::string& target, const AttendInputs& in) {
  if (target.empty() || target.ends_with(".safetensors")) return;
  if (in.attention.q.type == bf16 || in.attention.bias.type == bf16) {
    throw UsageError(
        fmt::format("--out = {}: .npy has no bf16; name a .safetensors file, for "
                    "example --out {}.safetensors",
                    target, target.substr(0, target.find_last_not_of('/') + 1)));
  }
  if (std::filesystem::exists(target) && !std::filesystem::is_directory(target)) {
    throw UsageError(
        fmt::format("--out = {}: is a file; name a directory or NAME.safetensors", target));
  }
}

void give_dout(AttendInputs& in) {
  if (in.dout.given()) return;
  fmt::print(stderr, "note: no dout given: ones\n");
  Array dout = in.like_q(in.attention.v.sizes[in.packed ? 2 : 3], in.attention.q.type);
  for (Index n = 0; n < dout.count(); ++n) dout.set(n, 1);
  in.dout = in.view(in.arrays.insert_or_assign("dout", std::move(dout)).first->second);
}

}  // namespace

int run_attend(const AttendArguments& arguments) {
  AttendInputs in = read_inputs(arguments);
  const Attention& a = in.attention;
  const Run run = described_run(arguments.run);
  Mirror mirror(run.device);
  check_target(arguments.out, in);
  const Explanation forward_plan = explain(a, Pass::forward, run);
  Explanation backward_plan;
  if (arguments.backward) {
    backward_plan = explain(a, Pass::backward, run);
    give_dout(in);
  } else if (in.dout.given() || in.dlse.given()) {
    fmt::print(stderr, "note: dout and dlse are not used without --backward\n");
  }
  if (arguments.explain) fmt::print("{}\n", forward_plan.text);
  if (arguments.explain && arguments.backward) fmt::print("{}\n", backward_plan.text);
  std::fflush(stdout);

  AttendResults r;
  r.out = in.like_q(a.v.sizes[in.packed ? 2 : 3], a.q.type);
  r.lse = in.like_lse();
  r.workspace = std::max(forward_plan.workspace, backward_plan.workspace);
  if (arguments.backward) {
    r.dq = zeros_like(in, "q");
    r.dk = zeros_like(in, "k");
    r.dv = zeros_like(in, "v");
    if (a.bias.given()) r.dbias = zeros_like(in, "bias");
    if (a.sink.given()) r.dsink = zeros_like(in, "sink");
  }
  for (const auto& [name, array] : in.arrays) mirror.add(array.data(), array.byte_count());
  for (const Array* array : all_of(r)) mirror.add(array->data(), array->byte_count());
  mirror.upload();

  Table table({"<pass", "time", "GFLOP/s", "workspace", "<  kernel"});
  const auto add = [&](const char* pass, double seconds, const Explanation& plan) {
    table.add({pass, duration_text(seconds), fmt::format("{:.1f}", plan.flops / seconds / 1e9),
               bytes_text(double(plan.workspace)), "  " + plan.backend + ": " + plan.kernel});
  };
  const Attention there = mirror.at(a);
  const ForwardOutputs outputs =
      mirror.at(ForwardOutputs{.out = in.view(r.out), .lse = in.lse_view(r.lse)});
  {
    const Progress progress("forward");
    prepare(there, outputs, run);
    r.forward_seconds =
        median_device_seconds(run.device, arguments.repeat, [&] { forward(there, outputs, run); });
  }
  add("forward", r.forward_seconds, forward_plan);
  if (arguments.backward) {
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
    r.backward_seconds = median_device_seconds(run.device, arguments.repeat,
                                               [&] { backward(there, from, to, run); });
    add("backward", r.backward_seconds, backward_plan);
  }
  mirror.download();
  fmt::print("q {}\nk {}\nv {}\n\n{}", to_string(a.q), to_string(a.k), to_string(a.v),
             table.text());
  std::fflush(stdout);
  if (arguments.compare) compare_with_unfused(in, r, arguments);
  if (!arguments.out.empty()) write_results(arguments.out, named(r));
  return 0;
}

}  // namespace regard::cli
