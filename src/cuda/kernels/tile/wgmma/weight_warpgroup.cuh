// The warpgroup of a wide wgmma backward block that makes weights and dv of its 64 keys.
//
// For each tile of rows: S^T = K Q^T, P^T, which the warpgroup of dk takes over through shared
// memory, and dv += P^T dO with P^T from registers. It loads dO.
#pragma once

#include "cuda/kernels/tile/wgmma/key_role.cuh"

namespace regard {

template <KernelConfig kConfig>
struct WeightWarpgroup : KeyRole<kConfig> {
  using Role = KeyRole<kConfig>;
  using Role::memory, Role::params, Role::maps, Role::x;
  using typename Role::Elementwise, typename Role::Memory, typename Role::Operand;

  Accumulator dv[kConfig.dim_v / 8];
  Operand weights, shares;

  REGARD_DEVICE void multiply_queries(int stage) {
    this->template multiply_scores<kConfig.dim / 16, Elementwise::kAddsLse>(
        memory.keys(), memory.queries(stage), memory.lse(stage));
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

  REGARD_DEVICE void hand_over_weights(int use) const {
    const Operand& given = Elementwise::kHasShares ? shares : weights;
    if constexpr (kConfig.cta_pair) {  // what is there is of the tile before
      if (use > 0) {
        mbarrier_wait(memory.barrier(Memory::kDscoreEmpty, (use - 1) & 1), parity_of(use - 1));
      }
    } else {
      mbarrier_wait(memory.barrier(Memory::kDscoreEmpty, use & 1), parity_of(use) ^ 1);
    }
    const SharedAddress to = this->handed(use);
#pragma unroll
    for (int k = 0; k < Memory::kRows / 16; ++k) {
      store_shared_128(to + k * 512, {{given[k][0], given[k][1], given[k][2], given[k][3]}});
    }
    sync_warp();
    if (Memory::kEachHandsOver || lane_index() == 0) {
      mbarrier_arrive(memory.barrier(Memory::kWeightsFull, use & 1));
    }
  }

  // Of this tile's place, when both warpgroups have done with it.
  REGARD_DEVICE void load_douts(const BackwardTask& task, const BackwardStep& step, int use,
                                const Ring<Memory::kStages>& ring) const {
    this->arrive_once(Memory::kDoutFree, ring.stage);
    if (!this->issues() || use + Memory::kStages >= task.steps) return;
    mbarrier_wait(memory.barrier(Memory::kDoutFree, ring.stage), ring.parity);
    this->loader(task).load_douts(task, Role::later_step(task, step), use + Memory::kStages);
  }

  REGARD_DEVICE void walk(const BackwardTask& task, Ring<Memory::kStages>& ring) {
    mbarrier_wait(memory.barrier(Memory::kKeysFull), 0);
    if constexpr (kConfig.varlen) this->clear_foreign_keys(task, memory.keys(), kConfig.dim);
    this->set_factors(0);
    this->set_whole_rows(task);
    BackwardStep step{task.kv * int(params.problem.sizes.group()), task.first_tile};
    await_queries(task, step, ring);
    multiply_queries(ring.stage);
    wgmma_wait<0>();
    fence_operand(x);
    const int last = task.steps - 1;
#pragma unroll 1
    for (int use = 0;; ++use) {  // S^T is there
      make_opaque(memory.begin);
      if constexpr (kHasPairTerms<kConfig>) {
        mbarrier_wait(memory.barrier(Memory::kPairTermsFull, use & 1), parity_of(use));
      }
      this->elementwise.make_weights(weights, shares, x, task, step, memory, ring.stage, use,
                                     this->hides(step));
      hand_over_weights(use);
      await_douts(task, step, ring);
      if constexpr (kConfig.wanted.dv) this->multiply_rows(dv, weights, memory.douts(ring.stage));
      if (use == last) break;
      const BackwardStep before = step;
      const Ring<Memory::kStages> done = ring;
      step.advance(task);
      ring.advance();
      await_queries(task, step, ring);
      multiply_queries(ring.stage);
      wgmma_wait<1>();
      load_douts(task, before, use, done);
      wgmma_wait<0>();
      fence_operand(x);
    }
    wgmma_wait<0>();
    this->arrive_once(Memory::kDoutFree, ring.stage);
    mbarrier_wait(memory.barrier(Memory::kDoutFree, ring.stage), ring.parity);
  }

  REGARD_DEVICE void run() {
    if constexpr (Elementwise::kPlain) {
      run(uniform_task(memory.task()));
    } else {
      run(memory.task());
    }
  }
  REGARD_DEVICE void run(const BackwardTask& task) {
    Role::clear_sums(dv);
    Ring<Memory::kStages> ring;
    if (task.steps > 0) walk(task, ring);
    if constexpr (kConfig.wanted.dv) {
      fence_operand(dv);
      // Through the last tile of dO.
      this->write_result(
          dv, KeyGradient::dv, task, memory.douts(ring.stage), maps.dv, params.problem.dv,
          int(params.problem.sizes.dim_v),
          kConfig.features.dropout ? float(keep_scale(params.problem.dropout)) : 1.0f);
    }
  }
};

}  // namespace regard
