// Runs the CPU's plans on the thread pool.
#include "cpu/backend.hpp"

#include <cstring>
#include <optional>

#include "cpu/batch.hpp"
#include "cpu/bias_gradient.hpp"
#include "cpu/fixup.hpp"
#include "cpu/heads_by_terms.hpp"
#include "cpu/kernels/kernels.h"
#include "cpu/memory.hpp"
#include "cpu/peak.hpp"
#include "cpu/span_sets.hpp"
#include "cpu/task_lists.hpp"
#include "rows/element.hpp"
#include "rows/rows.hpp"
#include "threads/threads.hpp"

namespace regard::cpu_backend {
namespace {

// With about how long one slow core takes, which does two multiplications and additions a
// nanosecond in each lane. Pairs that masks hide count.
Workers workers_of(const Problem& p, const Plan& plan) {
  constexpr int kOperations = 4;
  const Sizes& s = p.sizes;
  const Count pairs = Count(s.rows_q) * s.heads_q * s.len_k;
  const Count operations = pairs * (s.dim + s.dim_v) * (p.backward ? 5 : 2);
  return {plan.workers, operations.value() / (kOperations * plan.tiling.shape.lanes)};
}

void write_sink_gradient(const Problem& p, int workers, const Run& run) {
  parallel_tasks(p.sizes.heads_q, workers, run, [&](int64 h, int) {
    double sum = 0;
    for (int64 b = 0; b < p.sizes.batch; ++b) {
      const Head head(p, b, h);
      for (int64 i = 0; i < head.seq.len_q; ++i) {
        sum += sink_gradient_of_row(head, i, delta_of(head, i));
      }
    }
    const int64 at = h * p.dsink.strides.head;
    store_element(p.dsink, at, sum + (p.accumulate ? load_element(p.dsink, at) : 0));
  });
}

// The kernels of a backward task: sequences whose rows fill one vector at most have panels of one
// vector, and not all heads are computed by terms.
class ServingBackward {
 public:
  ServingBackward(const Problem& p, const Plan& plan, const CpuKernels& k, const Batch& batch,
                  bool has_tasks, const Run& run)
      : problem_(p), batch_(batch), tiling_(plan.tiling), kernels_(k) {
    if (tiling_.shape.terms == 1 || !has_tasks) return;
    in_f32_ = &kernels(kernels_for(plan.isa, Type::f32), p.type);
    by_terms_.emplace(p, batch, plan.workers, run);
  }

  void run(BackwardTask task, const BackwardShared& shared, uint8* nonfinite, char* scratch) const {
    const auto run_with = [&](const auto& kernel, const CpuTiling& tiling) {
      kernel(problem_, tiling, shared, task, nonfinite, scratch);
    };
    if (by_terms_ && (*by_terms_)(task.b, task.kv)) return run_with(kernels_.backward, tiling_);
    const BatchEntry& entry = batch_[task.b];
    CpuTiling tiling = without_terms(tiling_);
    if (by_terms_ && entry.chunk_count == 1 && !repays_terms(entry.seq.len_q, entry.seq.len_k)) {
      tiling = of_short_sequence(tiling_);
      task.reach = nullptr;  // of the plan's blocks
    }
    const CpuKernels& k = by_terms_ ? *in_f32_ : kernels_;
    if (fits_one_vector(tiling.shape, entry.seq.len_q, problem_.sizes.group())) {
      run_with(k.backward_of_one_vector, of_one_vector(tiling));
    } else {
      run_with(k.backward, tiling);
    }
  }

 private:
  const Problem& problem_;
  const Batch& batch_;
  const CpuTiling& tiling_;
  const CpuKernels& kernels_;
  const CpuKernels* in_f32_ = nullptr;
  std::optional<HeadsByTerms> by_terms_;  // where kernels_ are
};

}  // namespace

void forward(const Problem& p, const Plan& plan, const Run& run) {
  forward(p, plan, kernels(plan.isa, p.type), run);
}

void backward(const Problem& p, const Plan& plan, const Run& run) {
  backward(p, plan, kernels(plan.isa, p.type), run);
}

void forward(const Problem& p, const Plan& plan, const CpuKernels& k, const Run& run) {
  const CpuTiling& tiling = plan.tiling;
  const Memory memory(plan.workspace, run);
  const Batch batch(p, tiling);
  auto* const nonfinite = hides_pairs(p) ? memory.at<uint8>(plan.workspace.nonfinite_q) : nullptr;
  const auto nonfinite_of = [&](int64 b, int64 kv) {
    return nonfinite ? nonfinite + batch.first_q(b, kv) : nullptr;
  };
  const SpanSets spans(p, tiling, batch, plan.workers, run);
  const ForwardWork work =
      forward_work(p, tiling, batch, plan.workers, memory.at(plan.workspace.partials));
  // Few rows are multiplied in f32, whatever others are.
  const CpuKernels& few = kernels(kernels_for(plan.isa, Type::f32), p.type);
  const auto serving = [&](const auto& task) -> const CpuKernels& {
    return has_few_rows(tiling.shape, batch[task.b].seq.len_q, p.sizes.group()) ? few : k;
  };
  const Workers workers = workers_of(p, plan);
  parallel_tasks(int64(work.tasks.size()), workers, run, [&](int64 n, int worker) {
    ForwardTask task = work.tasks[std::size_t(n)];
    task.reach = spans.of(task.b, task.kv);
    serving(task).forward(p, tiling, task, nonfinite_of(task.b, task.kv), memory.scratch(worker));
  });
  parallel_tasks(int64(work.combines.size()), plan.workers, run, [&](int64 n, int worker) {
    const CombineTask& task = work.combines[std::size_t(n)];
    serving(task).combine(p, tiling, task, nonfinite_of(task.b, task.kv), memory.scratch(worker));
  });
  if (nonfinite) fix_up_forward(p, batch, nonfinite, plan.workers, run);
}

void backward(const Problem& p, const Plan& plan, const CpuKernels& k, const Run& run) {
  const CpuTiling& tiling = plan.tiling;
  const CpuWorkspace& w = plan.workspace;
  const Memory memory(w, run);
  const Batch batch(p, tiling);
  uint8* const nonfinite_q = hides_pairs(p) ? memory.at<uint8>(w.nonfinite_q) : nullptr;
  uint8* const nonfinite_k = hides_pairs(p) ? memory.at<uint8>(w.nonfinite_k) : nullptr;
  if (nonfinite_q) {
    std::memset(nonfinite_q, 0, std::size_t(batch.totals().rows_q * p.sizes.heads_q));
    std::memset(nonfinite_k, 0, std::size_t(batch.totals().rows_k * p.sizes.heads_kv));
  }
  auto* const next_chunk = memory.at<int32>(w.dq_semaphores);
  const int64 dq_blocks = p.dq.given() ? batch.totals().dq_blocks * p.sizes.heads_kv : 0;
  auto* const delta_states = memory.at<int32>(w.delta_states);
  for (int32* const states : {next_chunk, delta_states}) {
    std::memset(states, 0, std::size_t(dq_blocks) * sizeof(int32));
  }
  const bool wants_any = p.dq.given() || p.dk.given() || p.dv.given() || p.dbias.given();
  const TaskList list =
      wants_any ? backward_work(p, batch, plan.workers) : TaskList{.tasks = {}, .begins = {0}};
  const SpanSets spans(p, tiling, batch, plan.workers, run);
  const BiasGradient bias_gradient(p, memory.at(w.dbias), plan.workers, run);
  const int64 block_bytes =
      tiling.block_q * padded(tiling.shape, p.sizes.dim) * tiling.shape.real_size;
  const int64 delta_bytes = tiling.block_q * tiling.shape.real_size;
  const int64* const begins = list.begins.data();
  const ServingBackward serving(p, plan, k, batch, wants_any, run);
  const Workers workers = workers_of(p, plan);
  parallel_tasks(int64(list.begins.size()) - 1, workers, run, [&](int64 n, int worker) {
    for (int64 t = begins[n]; t < begins[n + 1]; ++t) {
      BackwardTask task = list.tasks[std::size_t(t)];
      task.reach = spans.of(task.b, task.kv);
      const int64 block = batch.first_dq_block(task.b, task.kv);
      const bool shares_deltas = p.dq.given() && !p.delta.given() && batch[task.b].chunk_count > 1;
      const BackwardShared shared{
          .dq = memory.at(w.dq + block * block_bytes),
          .next_chunk = next_chunk + block,
          .deltas = shares_deltas ? memory.at(w.deltas + block * delta_bytes) : nullptr,
          .delta_states = delta_states + block,
          .dbias = bias_gradient.sums(),
          .nonfinite_k = nonfinite_k ? nonfinite_k + batch.first_k(task.b, task.kv) : nullptr};
      uint8* const nonfinite = nonfinite_q ? nonfinite_q + batch.first_q(task.b, task.kv) : nullptr;
      serving.run(task, shared, nonfinite, memory.scratch(worker));
    }
  });
  if (p.dsink.given()) write_sink_gradient(p, plan.workers, run);
  bias_gradient.finish(plan.workers, run);
  if (nonfinite_q) fix_up_backward(p, batch, nonfinite_q, nonfinite_k, plan.workers, run);
}

double measured_peak(const Problem& p, const Plan& plan, const Run& run) {
  std::vector<double> rates(std::size_t(plan.workers), 0);
  parallel(plan.workers, run,
           [&](int worker) { rates[std::size_t(worker)] = spin_rate(plan.isa, p.type, 0.05); });
  double sum = 0;
  for (double rate : rates) sum += rate;
  return sum;
}

}  // namespace regard::cpu_backend
