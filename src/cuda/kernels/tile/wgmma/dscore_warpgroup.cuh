// The warpgroup of a wide wgmma backward block that makes the gradients of scores and dk of its 64
// keys.
//
// For each tile of rows: dP^T = V dO^T, dS^T of it and of the weights that the other warpgroup
// brings, dS^T to shared memory for dq, and dk += dS^T Q with dS^T from registers. It loads Q.
#pragma once

#include "cuda/kernels/tile/wgmma/key_role.cuh"

namespace regard {

template <KernelConfig kConfig>
struct DscoreWarpgroup : KeyRole<kConfig> {
  using Role = KeyRole<kConfig>;
  using Role::memory, Role::params, Role::maps, Role::x;
  using typename Role::Elementwise, typename Role::Memory, typename Role::Operand;

  Accumulator dk[kConfig.dim / 8];
  Operand shares, ds;

  REGARD_DEVICE void multiply_douts(int stage) {
    this->template multiply_scores<kConfig.dim_v / 16, Elementwise::kAddsDelta>(
        memory.values(), memory.douts(stage), memory.delta(stage));
  }
  REGARD_DEVICE void await_queries(const BackwardTask& task, const BackwardStep& step,
                                   const Ring<Memory::kStages>& ring) const {
    mbarrier_wait(memory.barrier(Memory::kQueryFull, ring.stage), ring.parity);
    if constexpr (kConfig.varlen) {
      this->clear_foreign_rows(task, step, memory.queries(ring.stage), kConfig.dim);
    }
  }
  REGARD_DEVICE void await_douts(const BackwardTask& task, const BackwardStep& step,
                                 const Ring<Memory::kStages>& ring) const {
    mbarrier_wait(memory.barrier(Memory::kDoutFull, ring.stage), ring.parity);
    if constexpr (kConfig.varlen) {
      this->clear_foreign_rows(task, step, memory.douts(ring.stage), kConfig.dim_v);
    }
  }

  REGARD_DEVICE void take_weights(int use) {
    mbarrier_wait(memory.barrier(Memory::kWeightsFull, use & 1), parity_of(use));
    const SharedAddress from = this->handed(use);
#pragma unroll
    for (int k = 0; k < Memory::kRows / 16; ++k) {
      const Bits128 four = load_shared_128(from + k * 512);
#pragma unroll
      for (int i = 0; i < 4; ++i) shares[k][i] = four.word[i];
    }
  }
  // In place of the weights.
  REGARD_DEVICE void store_dscores(int use) const {
    sync_warp();
    const SharedAddress to = memory.dscores(Memory::own_dscores(use));
#pragma unroll
    for (int k = 0; k < Memory::kRows / 16; ++k) {
      stmatrix(to + (this->fragment ^ k << 5), ds[k]);
    }
  }
  // After the next products have begun: the fence takes a while where copies are under way.
  REGARD_DEVICE void hand_over(int use) const {
    fence_proxy_async();
    sync_warp();
    if (Memory::kEachHasRead || lane_index() == 0) {
      mbarrier_arrive(memory.barrier(Memory::kDscoreFull, use & 1));
    }
  }

  // Of this tile's place; that its weights were there says that the other warpgroup has done with
  // it.
  REGARD_DEVICE void load_queries(const BackwardTask& task, const BackwardStep& step, int use,
                                  const Ring<Memory::kStages>& ring) const {
    this->arrive_once(Memory::kQueryFree, ring.stage);
    if (!this->issues() || use + Memory::kStages >= task.steps) return;
    mbarrier_wait(memory.barrier(Memory::kQueryFree, ring.stage), ring.parity);
    this->loader(task).load_queries(task, Role::later_step(task, step), use + Memory::kStages);
  }

  REGARD_DEVICE void walk(const BackwardTask& task) {
    mbarrier_wait(memory.barrier(Memory::kValuesFull), 0);
    if constexpr (kConfig.varlen) this->clear_foreign_keys(task, memory.values(), kConfig.dim_v);
    this->set_factors(kConfig.cta_pair ? kRowTerms : 0);
    this->set_whole_rows(task);
    BackwardStep step{task.kv * int(params.problem.sizes.group()), task.first_tile};
    Ring<Memory::kStages> ring;
    await_queries(task, step, ring);
    await_douts(task, step, ring);
    multiply_douts(ring.stage);
    wgmma_wait<0>();
    fence_operand(x);
    const int last = task.steps - 1;
#pragma unroll 1
    for (int use = 0;; ++use) {  // dP^T is there, and Q
      make_opaque(memory.begin);
      if constexpr (Elementwise::kAddsDelta) this->arrive_once(Memory::kDoutFree, ring.stage);
      take_weights(use);
      // Only who made the weights knows whether the bias hides pairs.
      this->elementwise.make_dscores(ds, shares, x, memory, use,
                                     kConfig.features.bias || this->hides(step));
      // Delta, which comes with dO, has been read.
      if constexpr (!Elementwise::kAddsDelta) {
        mbarrier_arrive(memory.barrier(Memory::kDoutFree, ring.stage));
      }
      store_dscores(use);
      if constexpr (kConfig.wanted.dk) this->multiply_rows(dk, ds, memory.queries(ring.stage));
      if (use == last) {
        hand_over(use);
        break;
      }
      // Where rows are cleared the warpgroups wait for each other, and dS^T must not wait for that.
      if constexpr (kConfig.varlen) hand_over(use);
      const BackwardStep before = step;
      const Ring<Memory::kStages> done = ring;
      step.advance(task);
      ring.advance();
      await_queries(task, step, ring);
      await_douts(task, step, ring);
      multiply_douts(ring.stage);
      if constexpr (!kConfig.varlen) hand_over(use);
      wgmma_wait<1>();
      load_queries(task, before, use, done);
      wgmma_wait<0>();
      fence_operand(x);
    }
    wgmma_wait<0>();
  }

  REGARD_DEVICE void run() {
    if constexpr (Elementwise::kPlain) {
      run(uniform_task(memory.task()));
    } else {
      run(memory.task());
    }
  }
  REGARD_DEVICE void run(const BackwardTask& task) {
    Role::clear_sums(dk);
    if (task.steps > 0) walk(task);
    if constexpr (kConfig.wanted.dk) {
      fence_operand(dk);
      // Through the values, which nobody else reads.
      this->write_result(dk, KeyGradient::dk, task, memory.values(), maps.dk, params.problem.dk,
                         int(params.problem.sizes.dim), float(params.problem.score.scale));
    }
  }
};

}  // namespace regard
