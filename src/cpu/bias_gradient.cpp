// The sums of the bias gradient: in the result itself where its type allows, else in the workspace.
#include "cpu/bias_gradient.hpp"

#include "plan/cpu/plan.hpp"
#include "rows/element.hpp"
#include "threads/threads.hpp"

namespace regard::cpu_backend {
namespace {

// Calls each(offset in `a`, offset in `b`) for every element of the bias's sizes.
template <class Each>
void each_element(const Problem& p, const Strides& a, const Strides& b, int workers, const Run& run,
                  Each each) {
  const int64* n = p.bias_sizes;
  if (n[3] == 0) return;
  parallel_tasks(n[0] * n[1] * n[2], workers, run, [&](int64 row, int) {
    const int64 i = row % n[2], h = row / n[2] % n[1], batch = row / n[2] / n[1];
    const int64 from = offset_of(a, batch, h, 0, i), to = offset_of(b, batch, h, 0, i);
    for (int64 j = 0; j < n[3]; ++j) each(from + j * a.column, to + j * b.column);
  });
}

// Dense with the bias's sizes; a broadcast dimension has stride 0.
Strides dense_strides(const int64* n) {
  const auto step = [&](int axis, int64 stride) { return n[axis] == 1 ? 0 : stride; };
  return {.batch = step(0, n[1] * n[2] * n[3]),
          .head = step(1, n[2] * n[3]),
          .row = step(2, n[3]),
          .column = step(3, 1)};
}

}  // namespace

BiasGradient::BiasGradient(const Problem& p, void* workspace, int workers, const Run& run)
    : problem_(p) {
  if (!p.dbias.given()) return;
  in_place_ = sums_dbias_in_place(p);
  sums_ = in_place_ ? p.dbias.data : workspace;
  strides_ = in_place_ ? p.dbias.strides : dense_strides(p.bias_sizes);
  if (in_place_ && p.accumulate) return;
  const View sums{
      .data = sums_, .type = computes_in_f64(p) ? Type::f64 : Type::f32, .strides = strides_};
  each_element(p, strides_, strides_, workers, run,
               [&](int64 at, int64) { store_element(sums, at, 0); });
}

void BiasGradient::finish(int workers, const Run& run) const {
  if (!sums_ || in_place_) return;
  const Problem& p = problem_;
  const View sums{
      .data = sums_, .type = computes_in_f64(p) ? Type::f64 : Type::f32, .strides = strides_};
  each_element(p, strides_, p.dbias.strides, workers, run, [&](int64 from, int64 to) {
    const double old = p.accumulate ? load_element(p.dbias, to) : 0;
    store_element(p.dbias, to, old + load_element(sums, from));
  });
}

}  // namespace regard::cpu_backend
