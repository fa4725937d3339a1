// The first warpgroup of a wide wgmma backward block: it makes dq, loads the first tiles, and
// copies bias and mask. Later tiles are loaded by the warpgroups that have done with those before.
#pragma once

#include "cuda/kernels/tile/wgmma/dq_warpgroup.cuh"
#include "cuda/kernels/tile/wgmma/paired_dq.cuh"

namespace regard {

template <KernelConfig kConfig>
struct DqRole {
  using Memory = BackwardMemory<kConfig>;

  const Memory memory;
  DqWarpgroup<kConfig> dq;

  // What the first tiles need, in the order in which they need it.
  REGARD_DEVICE void load_first(const BackwardTask& task, BackwardStep step) {
    dq.load_keys(task);
    dq.load_queries(task, step, 0);
    dq.load_values(task);
    if constexpr (kConfig.cta_pair) PairedDq<kConfig>{memory, dq}.load_peer_keys(task);
    dq.load_douts(task, step, 0);
#pragma unroll 1
    for (int use = 1; use < Memory::kStages && use < task.steps; ++use) {
      step.advance(task);
      dq.load_queries(task, step, use);
      dq.load_douts(task, step, use);
    }
  }

  REGARD_DEVICE void run() {
    const BackwardTask task = uniform_task(memory.task());
    if (task.steps == 0) return;
    dq.set_rows(task);
    BackwardStep step{task.kv * int(dq.params.problem.sizes.group()), task.first_tile};
    if (thread_index() == 0) load_first(task, step);
    sync_warp();
    if constexpr (kHasPairTerms<kConfig>) {
      dq.load_pair_terms(task, step, 0);
      dq.hand_over_pair_terms(0);
    }
    mbarrier_wait(memory.barrier(Memory::kKeysFull), 0);
    if constexpr (kConfig.cta_pair) mbarrier_wait(memory.barrier(Memory::kPeerKeysFull), 0);
    const int steps = task.steps;
    BackwardStep ahead = step;
#pragma unroll 1
    for (int use = 0; use < steps; ++use) {
      make_opaque(dq.memory.begin);
      ahead.advance(task);
      // The weights have been made: the one place of bias and mask is free.
      if constexpr (kHasPairTerms<kConfig>) {
        mbarrier_wait(dq.memory.barrier(Memory::kWeightsFull, use & 1), parity_of(use));
        if (use + 1 < steps) dq.load_pair_terms(task, ahead, use + 1);
      }
      mbarrier_wait(dq.memory.barrier(Memory::kDscoreFull, use & 1), parity_of(use));
      if constexpr (kConfig.cta_pair) {
        PairedDq<kConfig>{dq.memory, dq}.make(task, step, use);
      } else if constexpr (kConfig.wanted.dq) {
        dq.make_dq(task, step, use);
      } else {
        dq.free_dscores(use);
      }
      if constexpr (kHasPairTerms<kConfig>) {
        if (use + 1 < steps) dq.hand_over_pair_terms(use + 1);
      }
      step = ahead;
    }
    if constexpr (kConfig.ordered_dq) dq.turns.finish();
  }
};

}  // namespace regard
