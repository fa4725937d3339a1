// The sums of the bias gradient: in the result itself where that rounds no more, else in the
// workspace.
#include "cpu/bias_gradient.hpp"

#include <cstring>

#include "plan/cpu/plan.hpp"
#include "rows/element.hpp"
#include "threads/threads.hpp"

namespace regard::cpu_backend {
namespace {

// Calls each(offset in `a`, offset in `b`) for the first element of every row of the bias's sizes.
template <class Each>
void each_row(const Problem& p, const Strides& a, const Strides& b, int workers, const Run& run,
              Each each) {
  const int64* n = p.bias_sizes;
  if (n[3] == 0) return;
  parallel_tasks(n[0] * n[1] * n[2], workers, run, [&](int64 row, int) {
    const int64 i = row % n[2], h = row / n[2] % n[1], batch = row / n[2] / n[1];
    each(offset_of(a, batch, h, 0, i), offset_of(b, batch, h, 0, i));
  });
}

void clear_row(const View& to, int64 offset, int64 count) {
  if (to.strides.column == 1) {  // zeros of every type are bytes of 0
    const std::size_t size = size_of(to.type);
    std::memset(static_cast<char*>(to.data) + std::size_t(offset) * size, 0,
                std::size_t(count) * size);
    return;
  }
  for (int64 j = 0; j < count; ++j) store_element(to, offset + j * to.strides.column, 0);
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
  sums_ = in_place_ ? p.dbias
                    : View{.data = workspace,
                           .type = computes_in_f64(p) ? Type::f64 : Type::f32,
                           .strides = dense_strides(p.bias_sizes)};
  if (in_place_ && p.accumulate) return;
  each_row(p, sums_.strides, sums_.strides, workers, run,
           [&](int64 at, int64) { clear_row(sums_, at, p.bias_sizes[3]); });
}

void BiasGradient::finish(int workers, const Run& run) const {
  if (in_place_) return;
  const Problem& p = problem_;
  each_row(p, sums_.strides, p.dbias.strides, workers, run, [&](int64 from, int64 to) {
    for (int64 j = 0; j < p.bias_sizes[3]; ++j) {
      const int64 at = to + j * p.dbias.strides.column;
      const double old = p.accumulate ? load_element(p.dbias, at) : 0;
      store_element(p.dbias, at, old + load_element(sums_, from + j * sums_.strides.column));
    }
  });
}

}  // namespace regard::cpu_backend
