// The tasks of a call, in the order in which workers take them.
//
// Entries is Batch, or what a test counts with: a list is made in steps of one entry or one task.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "cpu/batch.hpp"
#include "cpu/kernels/tasks.h"

namespace regard::cpu_backend {

struct ForwardWork {
  std::vector<ForwardTask> tasks;
  std::vector<CombineTask> combines;
};

// A sequence of few rows and many keys becomes one task per chunk of keys, merged afterwards. The
// first one begins at key 0, wherever its visible keys begin, and counts the sink.
inline void split_task(const Problem& p, const CpuTiling& tiling, const ForwardTask& whole,
                       Interval chunks, char*& partials, ForwardWork& work) {
  const int64 size = partial_layout(tiling, {p.sizes.dim, p.sizes.dim_v}).size;
  work.combines.push_back({.b = whole.b,
                           .kv = whole.kv,
                           .block = whole.block,
                           .chunks = chunks.end - chunks.begin,
                           .partial = partials,
                           .partial_stride = size});
  for (int64 chunk = chunks.begin; chunk < chunks.end; ++chunk, partials += size) {
    ForwardTask task = whole;
    if (chunk > chunks.begin) task.keys.begin = chunk * tiling.chunk_k;
    task.keys.end = std::min(whole.keys.end, (chunk + 1) * tiling.chunk_k);
    task.partial = partials;
    work.tasks.push_back(task);
  }
}

template <class Entries>
std::vector<int64> longest_first(const Entries& batch) {
  std::vector<int64> order(std::size_t(batch.size()));
  std::iota(order.begin(), order.end(), 0);
  const auto longer = [&](int64 a, int64 b) { return batch[a].block_count > batch[b].block_count; };
  if (!std::is_sorted(order.begin(), order.end(), longer)) {
    std::stable_sort(order.begin(), order.end(), longer);
  }
  return order;
}

// Blocks of rows for each worker among which the heaviest come first.
inline constexpr int64 kBlocksEach = 4;

template <class Entries>
ForwardWork forward_work(const Problem& p, const CpuTiling& tiling, const Entries& batch,
                         int64 workers, char* partials) {
  const int64 heads = p.sizes.heads_kv;
  ForwardWork work;
  work.tasks.reserve(std::size_t(batch.totals().blocks * heads));
  const auto add = [&](int64 b, int64 kv, int64 block) {
    const BatchEntry& entry = batch[b];
    const ForwardTask task{.b = b, .kv = kv, .block = block, .keys = {0, entry.seq.len_k}};
    const Interval chunks = split_chunks(p, tiling, entry.seq);
    if (chunks.empty()) {
      work.tasks.push_back(task);
    } else {
      split_task(p, tiling, task, chunks, partials, work);
    }
  };
  if (p.features.interval) {
    // The last rows see the most keys under a causal mask: heaviest first, of as few heads at once
    // as keep the workers busy, whose keys and values stay in their caches.
    const std::vector<int64> longest = longest_first(batch);
    const auto entry_of = [&](int64 n) { return longest[std::size_t(n / heads)]; };
    const auto blocks_of = [&](int64 n) { return batch[entry_of(n)].block_count; };
    const int64 count = batch.size() * heads;
    int64 left = batch.totals().blocks * heads;
    for (int64 first = 0, end = 0; first < count; first = end) {
      int64 blocks = 0;
      while (end < count && (blocks < kBlocksEach * workers || left < kBlocksEach * workers)) {
        blocks += blocks_of(end);
        left -= blocks_of(end++);
      }
      int64 reached = first;  // heads that have the block
      for (int64 block = blocks_of(first) - 1; block >= 0; --block) {
        while (reached < end && blocks_of(reached) > block) ++reached;
        for (int64 n = first; n < reached; ++n) add(entry_of(n), n % heads, block);
      }
    }
  } else {
    for (int64 head = 0; head < batch.size() * heads; ++head) {
      const int64 blocks = batch[head / heads].block_count;
      for (int64 block = 0; block < blocks; ++block) add(head / heads, head % heads, block);
    }
  }
  return work;
}

// Tasks that one worker runs one after another, because they add to the same bias gradient.
struct TaskList {
  std::vector<BackwardTask> tasks;
  std::vector<int64> begins;  // of each run of tasks; one more at the end
};

// The chunks of a head add to its dq one after the other: those of as many heads as there are
// workers come in turns, so that workers seldom wait for each other.
template <class Entries>
TaskList chunks_in_turns(const Problem& p, const Entries& batch, int64 workers) {
  const int64 heads = p.sizes.heads_kv, count = batch.size() * heads;
  TaskList list;
  list.tasks.reserve(std::size_t(batch.totals().chunks * heads));
  std::vector<int64> turns;  // heads that have the chunk
  for (int64 first = 0; first < count; first += workers) {
    turns.resize(std::size_t(std::min(workers, count - first)));
    std::iota(turns.begin(), turns.end(), first);
    for (int64 chunk = 0; !turns.empty(); ++chunk) {
      for (const int64 n : turns) {
        list.tasks.push_back({.b = n / heads, .kv = n % heads, .chunk = chunk});
      }
      std::erase_if(turns, [&](int64 n) { return batch[n / heads].chunk_count <= chunk + 1; });
    }
  }
  list.begins.resize(list.tasks.size() + 1);
  std::iota(list.begins.begin(), list.begins.end(), 0);
  return list;
}

template <class Entries>
TaskList backward_work(const Problem& p, const Entries& batch, int64 workers) {
  if (!p.dbias.given()) return chunks_in_turns(p, batch, workers);
  const Sizes& s = p.sizes;
  const bool across_batch = p.bias_sizes[0] == 1;
  const bool across_heads = p.bias_sizes[1] == 1;
  const bool across_keys = p.bias_sizes[3] == 1;
  TaskList list;
  const auto most = std::size_t(batch.totals().chunks * s.heads_kv);
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

}  // namespace regard::cpu_backend
