// The warpgroup of a wgmma backward block of f32 that makes weights and dv of its 64 keys: as
// WeightWarpgroup, with pairs of f16 planes. P^T leaves for the other warpgroup in f32.
#pragma once

#include "cuda/kernels/tile/wgmma/plane_key_role.cuh"

namespace regard {

template <KernelConfig kConfig>
struct PlaneWeightWarpgroup : PlaneKeyRole<kConfig> {
  using Role = PlaneKeyRole<kConfig>;
  using Role::memory, Role::params, Role::x;
  using typename Role::Memory, typename Role::Planes;

  Accumulator dv[kConfig.dim_v / 8], of_tile[kConfig.dim_v / 8];
  Planes weights;
  float key_factors[2];

  REGARD_DEVICE void multiply_queries(int stage) {
    this->template multiply_scores<kConfig.dim>(memory.keys(), memory.queries(stage));
  }

  REGARD_DEVICE void multiply_weights(int stage) {
    if constexpr (kConfig.wanted.dv) {
      Role::multiply_rows(of_tile, weights, memory.douts(stage));
    } else {
      wgmma_commit();
    }
  }

  // Of this tile's place, when both warpgroups have done with it.
  REGARD_DEVICE void load_douts(const BackwardTask& task, const BackwardStep& step, int use,
                                const Ring<Memory::kStages>& ring) const {
    this->arrive_once(Memory::kDoutFree, ring.stage);
    if (!this->issues() || use + Memory::kStages >= task.steps) return;
    mbarrier_wait(memory.barrier(Memory::kDoutFree, ring.stage), ring.parity);
    this->loads().load_douts(task, Role::later_step(task, step), ring.stage);
  }

  REGARD_DEVICE void walk(const BackwardTask& task, Ring<Memory::kStages>& ring) {
#pragma unroll
    for (int half = 0; half < 2; ++half) key_factors[half] = this->factors_of(task, half).key;
    this->set_whole_rows(task);
    BackwardStep step{task.kv * int(params.problem.sizes.group()), task.first_tile};
    mbarrier_wait(memory.barrier(Memory::kKeysFull), 0);
    mbarrier_wait(memory.barrier(Memory::kQueryFull, ring.stage), ring.parity);
    wgmma_fence();
    multiply_queries(ring.stage);
    wgmma_wait<0>();
    fence_operand(x);
    const int last = task.steps - 1;
#pragma unroll 1
    for (int use = 0;; ++use) {  // S^T is there
      make_opaque(memory.begin);
      float most[2], factors[2];
      this->make_weights(most, key_factors, task, step, use, ring.stage);
      sync_warp();
      if (Memory::kEachHandsOver || lane_index() == 0) {
        mbarrier_arrive(memory.barrier(Memory::kWeightsFull, use & 1));
      }
      if constexpr (kConfig.wanted.dv) this->split_weights(weights, factors, most);
      mbarrier_wait(memory.barrier(Memory::kDoutFull, ring.stage), ring.parity);
      if (use == last) {
        wgmma_fence();
        multiply_weights(ring.stage);
        wgmma_wait<0>();
        add(factors);
        break;
      }
      const BackwardStep before = step;
      const Ring<Memory::kStages> done = ring;
      step.advance(task);
      ring.advance();
      mbarrier_wait(memory.barrier(Memory::kQueryFull, ring.stage), ring.parity);
      wgmma_fence();
      multiply_weights(done.stage);
      multiply_queries(ring.stage);
      wgmma_wait<1>();
      add(factors);
      load_douts(task, before, use, done);
      wgmma_wait<0>();
      fence_operand(x);
    }
  }
  REGARD_DEVICE void add(const float (&factors)[2]) {
    if constexpr (kConfig.wanted.dv) {
      fence_operand(of_tile);
      Role::add_tile(dv, of_tile, factors);
    }
  }

  REGARD_DEVICE void run() {
    const BackwardTask& task = memory.task();  // there are no registers for it
    Role::clear_sums(dv);
    Ring<Memory::kStages> ring;
    if (task.steps > 0) walk(task, ring);
    if constexpr (kConfig.wanted.dv) {
      this->write_result(
          dv, KeyGradient::dv, task, 0, Role::maps.dv, params.problem.dv,
          int(params.problem.sizes.dim_v),
          kConfig.features.dropout ? float(keep_scale(params.problem.dropout)) : 1.0f);
    }
  }
};

}  // namespace regard
