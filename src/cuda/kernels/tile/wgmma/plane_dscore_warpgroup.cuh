// The warpgroup of a wgmma backward block of f32 that makes the gradients of scores and dk of its
// 64 keys: as DscoreWarpgroup, with pairs of f16 planes.
#pragma once

#include "cuda/kernels/tile/wgmma/plane_key_role.cuh"

namespace regard {

template <KernelConfig kConfig>
struct PlaneDscoreWarpgroup : PlaneKeyRole<kConfig> {
  using Role = PlaneKeyRole<kConfig>;
  using Role::memory, Role::params, Role::x;
  using typename Role::Memory, typename Role::Planes;

  Accumulator dk[kConfig.dim / 8], of_tile[kConfig.dim / 8];
  Planes ds;
  float key_factors[2], value_factors[2];

  REGARD_DEVICE void multiply_douts(int stage) {
    this->template multiply_scores<kConfig.dim_v>(memory.values(), memory.douts(stage));
  }

  REGARD_DEVICE void multiply_dscores(int stage) {
    if constexpr (kConfig.wanted.dk) {
      Role::multiply_rows(of_tile, ds, memory.queries(stage));
    } else {
      wgmma_commit();
    }
  }

  // Of this tile's place; that its weights were there says that the other warpgroup has done with
  // it.
  REGARD_DEVICE void load_queries(const BackwardTask& task, const BackwardStep& step, int use,
                                  const Ring<Memory::kStages>& ring) const {
    this->arrive_once(Memory::kQueryFree, ring.stage);
    if (!this->issues() || use + Memory::kStages >= task.steps) return;
    mbarrier_wait(memory.barrier(Memory::kQueryFree, ring.stage), ring.parity);
    this->loads().load_queries(task, Role::later_step(task, step), ring.stage);
  }

  REGARD_DEVICE void walk(const BackwardTask& task) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const KeyFactors factors = this->factors_of(task, half);
      key_factors[half] = factors.key;
      value_factors[half] = factors.value;
    }
    this->set_whole_rows(task);
    BackwardStep step{task.kv * int(params.problem.sizes.group()), task.first_tile};
    Ring<Memory::kStages> ring;
    mbarrier_wait(memory.barrier(Memory::kValuesFull), 0);
    mbarrier_wait(memory.barrier(Memory::kDoutFull, ring.stage), ring.parity);
    wgmma_fence();
    multiply_douts(ring.stage);
    wgmma_wait<0>();
    fence_operand(x);
    const int last = task.steps - 1;
#pragma unroll 1
    for (int use = 0;; ++use) {  // dP^T is there
      make_opaque(memory.begin);
      float most[2], factors[2];
      mbarrier_wait(memory.barrier(Memory::kWeightsFull, use & 1), parity_of(use));
      this->make_dscores(most, key_factors, value_factors, step, use, ring.stage);
      if constexpr (kConfig.wanted.dk) this->split_dscores(ds, factors, most, ring.stage);
      sync_warp();
      mbarrier_arrive(memory.barrier(Memory::kDoutFree, ring.stage));  // delta has been read
      this->store_dscores(key_factors, use);
      mbarrier_wait(memory.barrier(Memory::kQueryFull, ring.stage), ring.parity);
      if (use == last) {
        wgmma_fence();
        multiply_dscores(ring.stage);
        this->hand_over_dscores(use);
        wgmma_wait<0>();
        add(factors);
        break;
      }
      const BackwardStep before = step;
      const Ring<Memory::kStages> done = ring;
      step.advance(task);
      ring.advance();
      mbarrier_wait(memory.barrier(Memory::kDoutFull, ring.stage), ring.parity);
      wgmma_fence();
      multiply_dscores(done.stage);
      multiply_douts(ring.stage);
      this->hand_over_dscores(use);
      wgmma_wait<1>();
      add(factors);
      load_queries(task, before, use, done);
      wgmma_wait<0>();
      fence_operand(x);
    }
  }
  REGARD_DEVICE void add(const float (&factors)[2]) {
    if constexpr (kConfig.wanted.dk) {
      fence_operand(of_tile);
      Role::add_tile(dk, of_tile, factors);
    }
  }

  REGARD_DEVICE void run() {
    const BackwardTask& task = memory.task();  // there are no registers for it
    Role::clear_sums(dk);
    if (task.steps > 0) walk(task);
    if constexpr (kConfig.wanted.dk) {
      this->write_result(dk, KeyGradient::dk, task, 0, Role::maps.dk, params.problem.dk,
                         int(params.problem.sizes.dim), float(params.problem.score.scale));
    }
  }
};

}  // namespace regard
