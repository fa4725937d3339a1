// A key warpgroup of a wgmma backward block of f32 up to 64 columns: dk and dv of 64 keys. As
// KeyWarpgroup, with pairs of f16 planes.
//
// S^T and dP^T follow one another in the same registers, as what a tile adds to dv and to dk do;
// P^T waits in shared memory, where dS^T takes its place. Exponentials run under dk's product of
// the tile before, dS^T is made under dv's.
#pragma once

#include "cuda/kernels/tile/wgmma/plane_key_role.cuh"

namespace regard {

template <KernelConfig kConfig>
struct PlaneKeyWarpgroup : PlaneKeyRole<kConfig> {
  using Role = PlaneKeyRole<kConfig>;
  using Role::memory, Role::params, Role::maps, Role::x;
  using typename Role::Memory, typename Role::Planes;

  Accumulator dk[kConfig.dim / 8], dv[kConfig.dim_v / 8];
  Planes operand;  // P^T, then dS^T
  float key_factors[2], value_factors[2];
  Ring<Memory::kQueryStages> queries;

  REGARD_DEVICE void multiply_queries() {
    this->template multiply_scores<kConfig.dim>(memory.keys(), memory.queries(queries.stage));
  }

  REGARD_DEVICE void walk(const BackwardTask& task) {
    Accumulator of_dv[kConfig.dim_v / 8], of_dk[kConfig.dim / 8];  // what a tile adds
    float factors[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const KeyFactors own = this->factors_of(task, half);
      key_factors[half] = own.key;
      value_factors[half] = own.value;
    }
    this->set_whole_rows(task);
    Role::clear_sums(of_dk);
    BackwardStep step{task.kv * int(params.problem.sizes.group()), task.first_tile};
    mbarrier_wait(memory.barrier(Memory::kKeysFull), 0);
    mbarrier_wait(memory.barrier(Memory::kQueryFull, queries.stage), queries.parity);
    wgmma_fence();
    multiply_queries();
    mbarrier_wait(memory.barrier(Memory::kValuesFull), 0);
    wgmma_wait<0>();
    fence_operand(x);
    const int last = task.steps - 1;
#pragma unroll 1
    for (int use = 0;; ++use) {  // S^T is there, and dk's product of the tile before under way
      make_opaque(memory.begin);
      float most[2];
      this->make_weights(most, key_factors, task, step, use, queries.stage);
      // Long over: a branch, across which the compiler does not move the wait for dk.
      mbarrier_wait(memory.barrier(Memory::kQueryFull, queries.stage), queries.parity);
      wgmma_wait<0>();
      fence_operand(of_dk);
      Role::add_tile(dk, of_dk, factors);
      this->split_weights(operand, factors, most);
      const int stage = use & 1;
      mbarrier_wait(memory.barrier(Memory::kDoutFull, stage), parity_of(use));
      wgmma_fence();
      this->template multiply_scores<kConfig.dim_v>(memory.values(), memory.douts(stage));
      Role::multiply_rows(of_dv, operand, memory.douts(stage));
      wgmma_wait<1>();
      fence_operand(x);
      this->make_dscores(most, key_factors, value_factors, step, use, stage);
      mbarrier_wait(memory.barrier(Memory::kDoutFull, stage), parity_of(use));  // likewise
      wgmma_wait<0>();
      fence_operand(of_dv);
      Role::add_tile(dv, of_dv, factors);
      this->split_dscores(operand, factors, most, stage);
      this->store_dscores(key_factors, use);
      const SharedAddress rows = memory.queries(queries.stage);
      queries.advance();
      if (use == last) {
        wgmma_fence();
        Role::multiply_rows(of_dk, operand, rows);
        this->hand_over_dscores(use);
        break;
      }
      step.advance(task);
      mbarrier_wait(memory.barrier(Memory::kQueryFull, queries.stage), queries.parity);
      wgmma_fence();
      multiply_queries();
      Role::multiply_rows(of_dk, operand, rows);
      this->hand_over_dscores(use);
      wgmma_wait<1>();
      fence_operand(x);
    }
    wgmma_wait<0>();
    fence_operand(of_dk);
    Role::add_tile(dk, of_dk, factors);
  }

  REGARD_DEVICE void run() {
    const BackwardTask& task = memory.task();  // there are no registers for it
    Role::clear_sums(dk);
    Role::clear_sums(dv);
    if (task.steps > 0) walk(task);
    const Sizes& s = params.problem.sizes;
    if constexpr (kConfig.wanted.dv) {
      this->write_result(
          dv, KeyGradient::dv, task, 0, maps.dv, params.problem.dv, int(s.dim_v),
          kConfig.features.dropout ? float(keep_scale(params.problem.dropout)) : 1.0f);
    }
    if constexpr (kConfig.wanted.dk) {
      this->write_result(dk, KeyGradient::dk, task, 0, maps.dk, params.problem.dk, int(s.dim),
                         float(params.problem.score.scale));
    }
  }
};

}  // namespace regard
