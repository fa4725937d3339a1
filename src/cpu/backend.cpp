// Runs the CPU's plans on the thread pool.
#include "cpu/backend.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "cpu/batch.hpp"
#include "cpu/bias_gradient.hpp"
#include "cpu/fixup.hpp"
#include "cpu/kernels/kernels.h"
#include "cpu/memory.hpp"
#include "cpu/peak.hpp"
#include "rows/element.hpp"
#include "rows/rows.hpp"
#include "threads/threads.hpp"

namespace regard::cpu_backend {
namespace {

// ---------------------------------------------------------------------------------------- forward

struct ForwardWork {
  std::vector<ForwardTask> tasks;
  std::vector<CombineTask> combines;
};

// A sequence of few rows and many keys becomes one task per chunk of keys, merged afterwards.
void split_task(const Problem& p, const CpuTiling& tiling, const ForwardTask& whole,
                const BatchEntry& entry, char*& partials, ForwardWork& work) {
  const int64 size = partial_layout(tiling, {p.sizes.dim, p.sizes.dim_v}).size;
  work.combines.push_back({.b = whole.b,
                           .kv = whole.kv,
                           .block = whole.block,
                           .chunks = entry.chunk_count,
                           .partial = partials,
                           .partial_stride = size});
  for (int64 chunk = 0; chunk < entry.chunk_count; ++chunk, partials += size) {
    ForwardTask task = whole;
    task.keys = {chunk * tiling.chunk_k, std::min((chunk + 1) * tiling.chunk_k, entry.seq.len_k)};
    task.partial = partials;
    work.tasks.push_back(task);
  }
}

std::vector<int64> longest_first(const Batch& batch) {
  std::vector<int64> order(std::size_t(batch.size()));
  std::iota(order.begin(), order.end(), 0);
  const auto longer = [&](int64 a, int64 b) { return batch[a].block_count > batch[b].block_count; };
  if (!std::is_sorted(order.begin(), order.end(), longer)) {
    std::stable_sort(order.begin(), order.end(), longer);
  }
  return order;
}

ForwardWork forward_work(const Problem& p, const CpuTiling& tiling, const Batch& batch,
                         char* partials) {
  const int64 heads = p.sizes.heads_kv;
  ForwardWork work;
  work.tasks.reserve(std::size_t(batch.blocks() * heads));
  const auto add = [&](int64 b, int64 kv, int64 block) {
    const BatchEntry& entry = batch[b];
    const ForwardTask task{.b = b, .kv = kv, .block = block, .keys = {0, entry.seq.len_k}};
    if (splits_keys(tiling, p.sizes.group() * entry.seq.len_q, entry.seq.len_k)) {
      split_task(p, tiling, task, entry, partials, work);
    } else {
      work.tasks.push_back(task);
    }
  };
  if (p.features.interval) {
    // The last rows see the most keys under a causal mask: heaviest first.
    const std::vector<int64> longest = longest_first(batch);
    const int64* const order = longest.data();
    int64 reached = 0;  // entries that have the block
    for (int64 block = longest.empty() ? -1 : batch[order[0]].block_count - 1; block >= 0;
         --block) {
      while (reached < batch.size() && batch[order[reached]].block_count > block) ++reached;
      for (int64 n = 0; n < reached * heads; ++n) add(order[n / heads], n % heads, block);
    }
  } else {
    for (int64 head = 0; head < batch.size() * heads; ++head) {
      const int64 blocks = batch[head / heads].block_count;
      for (int64 block = 0; block < blocks; ++block) add(head / heads, head % heads, block);
    }
  }
  return work;
}

// --------------------------------------------------------------------------------------- backward

// Tasks that one worker runs one after another, because they add to the same bias gradient.
struct TaskList {
  std::vector<BackwardTask> tasks;
  std::vector<int64> begins;  // of each run of tasks; one more at the end
};

TaskList backward_work(const Problem& p, const Batch& batch) {
  const Sizes& s = p.sizes;
  const bool summed = p.dbias.given();
  const bool across_batch = summed && p.bias_sizes[0] == 1;
  const bool across_heads = summed && p.bias_sizes[1] == 1;
  const bool across_keys = summed && p.bias_sizes[3] == 1;
  TaskList list;
  const auto most = std::size_t(batch.chunks() * s.heads_kv);
  list.tasks.reserve(most);
  list.begins.reserve(most + 1);
  std::vector<int64> entries;  // that have the chunk
  const auto add_chunk = [&](int64 first_kv, int64 chunk) {
    for (const int64 b : entries) {
      for (int64 kv = first_kv; kv < (across_heads ? s.heads_kv : first_kv + 1); ++kv) {
        list.tasks.push_back({.b = b, .kv = kv, .chunk = chunk});
      }
    }
  };
  list.begins.push_back(0);
  const auto end_run = [&] {
    const auto count = int64(list.tasks.size());
    if (count > list.begins.back()) list.begins.push_back(count);
  };
  for (int64 b = 0; b < (across_batch ? std::min<int64>(1, s.batch) : s.batch); ++b) {
    for (int64 kv = 0; kv < (across_heads ? 1 : s.heads_kv); ++kv) {
      entries.resize(across_batch ? std::size_t(s.batch) : 1);
      std::iota(entries.begin(), entries.end(), b);
      for (int64 chunk = 0; !entries.empty(); ++chunk) {
        add_chunk(kv, chunk);
        if (!across_keys) end_run();
        std::erase_if(entries, [&](int64 e) { return batch[e].chunk_count <= chunk + 1; });
      }
      end_run();
    }
  }
  return list;
}

void write_sink_gradient(const Problem& p, int workers, const Run& run) {
  parallel_tasks(p.sizes.heads_q, workers, run, [&](int64 h, int) {
    double sum = 0;
    for (int64 b = 0; b < p.sizes.batch; ++b) {
      const Head head(p, b, h);
      std::vector<double> deltas;
      for (int64 i = 0; i < head.seq.len_q; ++i) deltas.push_back(delta_of(head, i));
      sum += sink_gradient(head, deltas.data());
    }
    const int64 at = h * p.dsink.strides.head;
    store_element(p.dsink, at, sum + (p.accumulate ? load_element(p.dsink, at) : 0));
  });
}

}  // namespace

void forward(const Problem& p, const Plan& plan, const Run& run) {
  const CpuTiling& tiling = plan.tiling;
  const Memory memory(plan.workspace, run);
  const Batch batch(p, tiling);
  const CpuKernels& k = kernels(plan.isa, p.type);
  auto* const nonfinite = hides_pairs(p) ? memory.at<uint8>(plan.workspace.nonfinite_q) : nullptr;
  const auto nonfinite_of = [&](int64 b, int64 kv) {
    return nonfinite ? nonfinite + batch.first_q(b, kv) : nullptr;
  };
  const ForwardWork work = forward_work(p, tiling, batch, memory.at(plan.workspace.partials));
  parallel_tasks(int64(work.tasks.size()), plan.workers, run, [&](int64 n, int worker) {
    const ForwardTask& task = work.tasks[std::size_t(n)];
    k.forward(p, tiling, task, nonfinite_of(task.b, task.kv), memory.scratch(worker));
  });
  parallel_tasks(int64(work.combines.size()), plan.workers, run, [&](int64 n, int worker) {
    const CombineTask& task = work.combines[std::size_t(n)];
    k.combine(p, tiling, task, nonfinite_of(task.b, task.kv), memory.scratch(worker));
  });
  if (nonfinite) fix_up_forward(p, batch, nonfinite, plan.workers, run);
}

void backward(const Problem& p, const Plan& plan, const Run& run) {
  const CpuTiling& tiling = plan.tiling;
  const CpuWorkspace& w = plan.workspace;
  const Memory memory(w, run);
  const Batch batch(p, tiling);
  const CpuKernels& k = kernels(plan.isa, p.type);
  uint8* const nonfinite_q = hides_pairs(p) ? memory.at<uint8>(w.nonfinite_q) : nullptr;
  uint8* const nonfinite_k = hides_pairs(p) ? memory.at<uint8>(w.nonfinite_k) : nullptr;
  if (nonfinite_q) {
    std::memset(nonfinite_q, 0, std::size_t(p.sizes.rows_q * p.sizes.heads_q));
    std::memset(nonfinite_k, 0, std::size_t(p.sizes.rows_k * p.sizes.heads_kv));
  }
  auto* const next_chunk = memory.at<int32>(w.dq_semaphores);
  if (p.dq.given())
    std::memset(next_chunk, 0, std::size_t(row_blocks_bound(p, tiling)) * sizeof(int32));
  const bool wants_any = p.dq.given() || p.dk.given() || p.dv.given() || p.dbias.given();
  const TaskList list = wants_any ? backward_work(p, batch) : TaskList{.tasks = {}, .begins = {0}};
  const BiasGradient bias_gradient(p, memory.at(w.dbias), plan.workers, run);
  const int64 block_bytes = tiling.block_q * p.sizes.dim * tiling.shape.real_size;
  const int64* const begins = list.begins.data();
  parallel_tasks(int64(list.begins.size()) - 1, plan.workers, run, [&](int64 n, int worker) {
    for (int64 t = begins[n]; t < begins[n + 1]; ++t) {
      const BackwardTask& task = list.tasks[std::size_t(t)];
      const int64 block = batch.first_block(task.b, task.kv);
      const BackwardShared shared{
          .dq = memory.at(w.dq + block * block_bytes),
          .next_chunk = next_chunk + block,
          .dbias = bias_gradient.sums(),
          .dbias_strides = bias_gradient.strides(),
          .nonfinite_k = nonfinite_k ? nonfinite_k + batch.first_k(task.b, task.kv) : nullptr};
      uint8* const nonfinite = nonfinite_q ? nonfinite_q + batch.first_q(task.b, task.kv) : nullptr;
      k.backward(p, tiling, shared, task, nonfinite, memory.scratch(worker));
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
