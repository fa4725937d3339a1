// `regard attend --compare`: what fusing costs in accuracy and saves in time and memory.
#include <fmt/core.h>

#include "attend.hpp"
#include "output/progress.hpp"
#include "output/table.hpp"
#include "tensors/geometry.hpp"
#include "tensors/timing.hpp"
#include "verify/comparison.hpp"
#include "verify/float64.hpp"

namespace regard::cli {

namespace {

struct Line {
  const char* name;
  Tensor ours;
  const Array& want;
  const Array* unfused;
  Index row;
};

std::string error_text(double error) { return fmt::format("{:.2e}", error); }

}  // namespace

void compare_with_unfused(const AttendInputs& in, const AttendResults& r,
                          const AttendArguments& arguments) {
  const Attention& a = in.attention;
  const Shape shape = shape_of(a);
  WantedTypes wanted;
  wanted.out = a.q.type;
  if (arguments.backward) {
    wanted.dq = wanted.dk = wanted.dv = a.q.type;
    wanted.dbias = a.bias.type;
    wanted.dsink = a.sink.type;
  }
  const int threads = arguments.run.threads > 0 ? arguments.run.threads : machine().threads;
  Results want;
  {
    const Progress progress("float64 reference");
    want = float64_reference(a, in.dout, in.dlse, wanted, threads);
  }
  const double matrix = shape.pairs() * double(size_of(a.q.type));
  const bool fits = matrix * 3 < double(physical_memory()) / 2;
  UnfusedResults unfused;
  double unfused_forward = 0, unfused_both = 0;
  if (fits) {
    const Progress progress("unfused computation");
    UnfusedOptions options;
    options.wanted.out = wanted.out;
    options.round_scores = true;
    options.whole_batch = true;
    options.threads = threads;
    unfused_forward =
        seconds_of([&] { unfused = unfused_attention(a, in.dout, in.dlse, options); });
    options.wanted = wanted;
    if (arguments.backward) {
      unfused_both = seconds_of([&] { unfused = unfused_attention(a, in.dout, in.dlse, options); });
    }
  }
  const auto maybe = [&](const Array& array) { return fits ? &array : nullptr; };
  const Line lines[] = {
      {"out", in.view(r.out), want.out, maybe(unfused.out), shape.dim_v},
      {"lse", in.lse_view(r.lse), want.lse, maybe(unfused.lse), 1},
      {"dq", in.view(r.dq), want.dq, maybe(unfused.dq), shape.dim},
      {"dk", in.view(r.dk), want.dk, maybe(unfused.dk), shape.dim},
      {"dv", in.view(r.dv), want.dv, maybe(unfused.dv), shape.dim_v},
      {"dbias", r.dbias.tensor(), want.dbias, maybe(unfused.dbias), 1},
      {"dsink", r.dsink.tensor(), want.dsink, maybe(unfused.dsink), 1},
  };
  fmt::print("\nerrors against float64 on the same inputs\n");
  Table errors({"<output", "ours: norm", "worst row", "unfused: norm", "worst row"});
  for (const Line& line : lines) {
    if (!line.ours.given()) continue;
    const PlainError ours = plain_error(line.ours, line.want, line.row);
    std::vector<std::string> cells{line.name, error_text(ours.relative_norm),
                                   error_text(ours.worst_row), "-", "-"};
    if (line.unfused) {
      const PlainError theirs = plain_error(line.unfused->tensor(), line.want, line.row);
      cells[3] = error_text(theirs.relative_norm);
      cells[4] = error_text(theirs.worst_row);
    }
    errors.add(cells);
  }
  fmt::print("{}\n", errors.text());
  if (!fits) {
    fmt::print("unfused: left out, its score matrices alone need {}\n", bytes_text(matrix * 3));
    return;
  }
  fmt::print("unfused: plain C++ loops, every score held in {}, {} threads\n", name_of(a.q.type),
             threads);
  Table costs({"<", "forward", "forward + backward", "memory beside the tensors"});
  const auto both = [&](double seconds) {
    return arguments.backward ? duration_text(seconds) : std::string("-");
  };
  costs.add({"ours", duration_text(r.forward_seconds), both(r.forward_seconds + r.backward_seconds),
             bytes_text(double(r.workspace))});
  costs.add({"unfused", duration_text(unfused_forward), both(unfused_both),
             bytes_text(double(unfused.matrix_bytes))});
  fmt::print("{}", costs.text());
}

}  // namespace regard::cli
