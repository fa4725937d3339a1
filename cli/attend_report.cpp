// The tables of `regard attend`, and the same as JSON.
#include <fmt/core.h>
#include <fmt/format.h>

#include "attend.hpp"
#include "output/output.hpp"
#include "output/table.hpp"

namespace regard::cli {

namespace {

double gflops(const TimedPass& pass) { return pass.plan.flops / pass.seconds / 1e9; }

Json json_of(const Tensor& tensor) {
  return Fields{{"type", name_of(tensor.type)},
                {"sizes", Sizes(tensor.sizes.begin(), tensor.sizes.begin() + tensor.rank)}};
}

Json json_of(const TimedPass& pass, bool with_text) {
  Fields fields{{"pass", pass.name},
                {"backend", pass.plan.backend},
                {"kernel", pass.plan.kernel},
                {"ms", pass.seconds * 1e3},
                {"gflops", gflops(pass)},
                {"flops", pass.plan.flops},
                {"workspace", pass.plan.workspace}};
  if (with_text) fields.emplace_back("text", pass.plan.text);
  return fields;
}

Json json_of(const UnfusedComparison& c, bool backward) {
  std::vector<Json> lines;
  for (const auto& line : c.lines) {
    Fields one{{"output", line.output},
               {"norm", line.ours.relative_norm},
               {"worst_row", line.ours.worst_row}};
    if (line.unfused) {
      one.emplace_back("unfused_norm", line.unfused->relative_norm);
      one.emplace_back("unfused_worst_row", line.unfused->worst_row);
    }
    lines.emplace_back(one);
  }
  Fields fields{{"errors", lines}, {"unfused_fits", c.fits()}};
  if (!c.fits()) return fields;
  fields.emplace_back("unfused_forward_ms", c.forward_seconds * 1e3);
  if (backward) fields.emplace_back("unfused_both_ms", c.both_seconds * 1e3);
  fields.emplace_back("unfused_bytes", c.bytes);
  return fields;
}

std::string passes_text(const AttendResults& r) {
  Table table({"<pass", "time", "GFLOP/s", "workspace", "<  kernel"});
  for (const TimedPass& pass : r.passes) {
    table.add({pass.name, duration_text(pass.seconds), fmt::format("{:.1f}", gflops(pass)),
               bytes_text(double(pass.plan.workspace)),
               "  " + pass.plan.backend + ": " + pass.plan.kernel});
  }
  return table.text();
}

std::string errors_text(const UnfusedComparison& c) {
  const auto cell = [](double error) { return fmt::format("{:.2e}", error); };
  Table table({"<output", "ours: norm", "worst row", "unfused: norm", "worst row"});
  for (const auto& line : c.lines) {
    table.add({line.output, cell(line.ours.relative_norm), cell(line.ours.worst_row),
               line.unfused ? cell(line.unfused->relative_norm) : "-",
               line.unfused ? cell(line.unfused->worst_row) : "-"});
  }
  return table.text();
}

std::string costs_text(const UnfusedComparison& c, const AttendResults& r, bool backward) {
  const auto both = [&](double seconds) { return backward ? duration_text(seconds) : "-"; };
  Table table({"<", "forward", "forward + backward", "memory in addition to the tensors"});
  table.add({"ours", duration_text(r.forward_seconds()), both(r.both_seconds()),
             bytes_text(double(r.workspace()))});
  table.add({"unfused", duration_text(c.forward_seconds), both(c.both_seconds),
             bytes_text(double(c.bytes))});
  return table.text();
}

}  // namespace

void AttendReport::add_plans(const AttendResults& r) {
  if (arguments_.json || !arguments_.explain) return;
  for (const TimedPass& pass : r.passes) output::print("{}\n", pass.plan.text);
  output::flush();
}

void AttendReport::add_passes(const AttendResults& r) {
  const Attention& a = inputs_.attention;
  if (arguments_.json) {
    std::vector<Json> passes;
    for (const TimedPass& pass : r.passes) passes.push_back(json_of(pass, arguments_.explain));
    json_ = {{"q", json_of(a.q)}, {"k", json_of(a.k)}, {"v", json_of(a.v)}, {"passes", passes}};
    return;
  }
  output::print("q {}\nk {}\nv {}\n\n{}", to_string(a.q), to_string(a.k), to_string(a.v),
                passes_text(r));
  output::flush();
}

void AttendReport::add_comparison(const UnfusedComparison& c, const AttendResults& r) {
  if (arguments_.json) {
    json_.emplace_back("comparison", json_of(c, arguments_.backward));
    return;
  }
  output::print("\nerrors against float64 on the same inputs\n{}\n", errors_text(c));
  if (!c.fits()) {
    output::print("unfused: left out, its score matrices alone need {}\n", bytes_text(c.matrices));
    return;
  }
  output::print("unfused: plain C++ loops, every score held in {}, {} threads\n{}",
                name_of(inputs_.attention.q.type), c.threads,
                costs_text(c, r, arguments_.backward));
}

void AttendReport::add_written(const std::vector<std::string>& tensors) {
  if (!arguments_.json) {
    output::print("wrote {}: {}\n", arguments_.out, fmt::join(tensors, ", "));
    return;
  }
  json_.emplace_back("wrote", Fields{{"path", arguments_.out}, {"tensors", tensors}});
}

void AttendReport::finish() const {
  if (arguments_.json) output::print("{}\n", Json(json_).text());
}

}  // namespace regard::cli
