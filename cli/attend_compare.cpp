// `regard attend --compare`: accuracy, time and memory of the library and of an unfused
// computation.
#include "attend.hpp"
#include "output/progress.hpp"
#include "tensors/geometry.hpp"
#include "tensors/timing.hpp"
#include "verify/float64.hpp"

namespace regard::cli {

namespace {

WantedTypes wanted_of(const Attention& a, bool backward) {
  WantedTypes wanted;
  wanted.out = a.q.type;
  if (!backward) return wanted;
  wanted.dq = wanted.dk = wanted.dv = a.q.type;
  wanted.dbias = a.bias.type;
  wanted.dsink = a.sink.type;
  return wanted;
}

UnfusedResults run_unfused(const AttendInputs& in, const WantedTypes& wanted, int threads,
                           UnfusedComparison& c) {
  const Progress progress("unfused computation");
  UnfusedResults results;
  UnfusedOptions options;
  options.wanted.out = wanted.out;
  options.round_scores = true;
  options.whole_batch = true;
  options.threads = c.threads = threads;
  const auto run = [&] { results = unfused_attention(in.attention, in.dout, in.dlse, options); };
  c.forward_seconds = seconds_of(run);
  options.wanted = wanted;
  if (wanted.backward()) c.both_seconds = seconds_of(run);
  c.bytes = results.matrix_bytes;
  return results;
}

}  // namespace

UnfusedComparison compare_with_unfused(const AttendInputs& in, const AttendResults& r,
                                       const AttendArguments& arguments) {
  const Attention& a = in.attention;
  const Shape shape = shape_of(a);
  const WantedTypes wanted = wanted_of(a, arguments.backward);
  const int threads = arguments.run.threads > 0 ? arguments.run.threads : machine().threads;
  Results want;
  {
    const Progress progress("float64 reference");
    want = float64_reference(a, in.dout, in.dlse, wanted, threads);
  }
  UnfusedComparison c;
  c.matrices = shape.pairs() * double(size_of(a.q.type)) * 3;
  UnfusedResults unfused;
  if (c.matrices < double(physical_memory()) / 2) unfused = run_unfused(in, wanted, threads, c);

  const auto compare = [&](const char* name, const Tensor& ours, const Array& exact,
                           const Array& theirs, Index row) {
    if (!ours.given()) return;
    auto& line =
        c.lines.emplace_back(UnfusedComparison::Line{name, plain_error(ours, exact, row), {}});
    if (c.fits()) line.unfused = plain_error(theirs.tensor(), exact, row);
  };
  compare("out", in.view(r.out), want.out, unfused.out, shape.dim_v);
  compare("lse", in.lse_view(r.lse), want.lse, unfused.lse, 1);
  compare("dq", in.view(r.dq), want.dq, unfused.dq, shape.dim);
  compare("dk", in.view(r.dk), want.dk, unfused.dk, shape.dim);
  compare("dv", in.view(r.dv), want.dv, unfused.dv, shape.dim_v);
  compare("dbias", r.dbias.tensor(), want.dbias, unfused.dbias, 1);
  compare("dsink", r.dsink.tensor(), want.dsink, unfused.dsink, 1);
  return c;
}

}  // namespace regard::cli
