// Warpgroups 1 and 2 of a wgmma backward block of f32 up to 64 columns, with 64 keys each: P^T,
// dS^T, dk and dv.
//
// Registers are short. S^T and dP^T share registers, as do P^T and dS^T, and P^T waits in shared
// memory until dS^T takes its place. Exponentials run during dk's product of the tile before; dS^T
// is made during dv's.
#pragma once

#include "cuda/kernels/tile/wgmma/backward/f32_key_warpgroup.cuh"

namespace regard {

template <KernelConfig kConfig>
struct F32DkDvWarpgroup : F32KeyWarpgroup<kConfig> {
  using Base = F32KeyWarpgroup<kConfig>;
  using Base::memory, Base::params, Base::scores;
  using typename Base::Memory, typename Base::Operand;

  Accumulator dk[kConfig.dim / 8], dv[kConfig.dim_v / 8];
  Operand operand;  // P^T, then dS^T
  float key_factors[2], value_factors[2];
  Ring<Memory::kQueryStages> queries;

  REGARD_DEVICE void await_queries() const {
    mbarrier_wait(memory.barrier(Memory::kQueryFull, queries.stage), queries.parity);
  }
  REGARD_DEVICE void await_douts(int iteration) const {
    memory.await_full(Memory::kDoutFull, iteration);
  }
  REGARD_DEVICE void multiply_queries() {
    this->template multiply_scores<kConfig.dim, false>(memory.keys(), memory.queries(queries.stage),
                                                       0);
  }

  // Makes S^T of the first tile, and returns the tile.
  REGARD_DEVICE RowWalk<kConfig> begin(const BackwardTask& task) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const KeyFactors own = this->factors_of(task, half);
      key_factors[half] = own.key;
      value_factors[half] = own.value;
    }
    this->set_whole_rows(task);
    RowWalk<kConfig> tile = this->first_tile(task);
    mbarrier_wait(memory.barrier(Memory::kKeysFull), 0);
    await_queries();
    this->receive_tile(tile, 0);
    wgmma_fence();
    multiply_queries();
    mbarrier_wait(memory.barrier(Memory::kValuesFull), 0);
    wgmma_wait<0>();
    fence_operand(scores);
    return tile;
  }

  REGARD_DEVICE void mainloop(const BackwardTask& task) {
    Accumulator of_dv[kConfig.dim_v / 8], of_dk[kConfig.dim / 8];  // what a tile adds
    float factors[2] = {};
    Base::clear_sums(of_dk);
    RowWalk<kConfig> tile = begin(task);
    const int last = task.iterations - 1;
#pragma unroll 1
    for (int iteration = 0;; ++iteration) {  // S^T is complete, and dk's last product runs
      make_opaque(memory.begin);
      float largest[2];
      this->make_probs(largest, key_factors, task, tile, iteration, queries.stage);
      // The barrier completed long ago. Waiting for it is a branch, and the compiler does not move
      // the wait for dk across one.
      await_queries();
      wgmma_wait<0>();
      fence_operand(of_dk);
      Base::add_tile(dk, of_dk, factors);
      this->split_probs(operand, factors, largest);
      const int stage = iteration & 1;
      await_douts(iteration);
      wgmma_fence();
      this->template multiply_scores<kConfig.dim_v, false>(memory.values(), memory.douts(stage), 0);
      Base::multiply_rows(of_dv, operand, memory.douts(stage));
      wgmma_wait<1>();
      fence_operand(scores);
      this->make_dscores(largest, key_factors, value_factors, tile, iteration, stage);
      await_douts(iteration);  // a branch, as above
      wgmma_wait<0>();
      fence_operand(of_dv);
      Base::add_tile(dv, of_dv, factors);
      this->split_dscores(operand, factors, largest, stage);
      this->store_dscores(key_factors, iteration);
      const SharedAddress rows = memory.queries(queries.stage);
      queries.advance();
      if (iteration == last) {
        wgmma_fence();
        Base::multiply_rows(of_dk, operand, rows);
        this->hand_over_dscores(iteration);
        break;
      }
      this->next_tile(tile, task);
      await_queries();
      this->receive_tile(tile, iteration + 1);
      wgmma_fence();
      multiply_queries();
      Base::multiply_rows(of_dk, operand, rows);
      this->hand_over_dscores(iteration);
      wgmma_wait<1>();
      fence_operand(scores);
    }
    wgmma_wait<0>();
    fence_operand(of_dk);
    Base::add_tile(dk, of_dk, factors);
  }

  REGARD_DEVICE void run() {
    const BackwardTask& task = memory.task();  // there are no registers for a copy
    Base::clear_sums(dk);
    Base::clear_sums(dv);
    if (task.iterations > 0) mainloop(task);
    const KeyGradients<kConfig> results = this->results(task, 0);
    if constexpr (kConfig.wanted.dv) this->write_dv(dv, results);
    if constexpr (kConfig.wanted.dk) this->write_dk(dk, results);
  }
};

}  // namespace regard
