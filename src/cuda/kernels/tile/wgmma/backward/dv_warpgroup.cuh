// Warpgroup 1 of a wide wgmma backward block: S^T, P^T and dv of the block's 64 keys. Signed P^T
// passes through shared memory to warpgroup 2. Warpgroup 1 reloads dO.
#pragma once

#include "cuda/kernels/tile/wgmma/backward/f32_key_warpgroup.cuh"

namespace regard {

template <KernelConfig kConfig>
struct DvWarpgroup : KeyWarpgroupOf<kConfig> {
  using Base = KeyWarpgroupOf<kConfig>;
  using Base::memory, Base::params, Base::scores, Base::kF32;
  using typename Base::Elementwise, typename Base::Memory, typename Base::Operand;
  using Stages = Ring<Memory::kStages>;

  Accumulator dv[kConfig.dim_v / 8];
  Operand probs, signed_probs;
  // f32
  Accumulator of_tile[kConfig.dim_v / 8];  // what a tile adds to dv, in units of `factors`
  float factors[2], key_factors[2];

  REGARD_DEVICE void multiply_queries(int stage) {
    this->template multiply_scores<kConfig.dim, Elementwise::kAddsLse>(
        memory.keys(), memory.queries(stage), memory.lse(stage));
  }
  REGARD_DEVICE void multiply_probs(int stage) {
    if constexpr (kConfig.wanted.dv) {
      this->multiply_rows(kF32 ? of_tile : dv, probs, memory.douts(stage));
    } else if constexpr (kF32) {
      wgmma_commit();
    }
  }
  REGARD_DEVICE void add_tile() {
    if constexpr (kF32 && kConfig.wanted.dv) {
      fence_operand(of_tile);
      Base::add_tile(dv, of_tile, factors);
    }
  }

  // Lane to lane, because warpgroup 2 has the same fragments.
  REGARD_DEVICE void store_probs(int iteration) const {
    const Operand& given = Elementwise::kHasSignedProbs ? signed_probs : probs;
    if constexpr (Memory::kDscoreTurns == 1) {  // dS^T of the tile before has been read
      if (iteration > 0) {
        memory.await_full(Memory::kDscoreEmpty, iteration - 1);
      }
    } else {
      memory.await_empty(Memory::kDscoreEmpty, iteration);
    }
    const SharedAddress to = this->probs_of_lane(iteration);
#pragma unroll
    for (int k = 0; k < Memory::kRows / 16; ++k) {
      store_shared_128(to + k * 512,
                       {{given[0][k][0], given[0][k][1], given[0][k][2], given[0][k][3]}});
    }
  }
  REGARD_DEVICE void hand_over_probs(int iteration) const {
    sync_warp();
    if (Memory::kThreadsArrive || lane_index() == 0) {
      mbarrier_arrive(memory.barrier(Memory::kProbsFull, iteration & 1));
    }
  }
  REGARD_DEVICE void make_probs(const BackwardTask& task, const RowTile& tile, int iteration,
                                int stage) {
    if constexpr (kF32) {
      float largest[2];
      Base::make_probs(largest, key_factors, task, tile, iteration, stage);
      hand_over_probs(iteration);
      if constexpr (kConfig.wanted.dv) this->split_probs(probs, factors, largest);
    } else {
      if constexpr (kHasPairTerms<kConfig>) {
        memory.await_full(Memory::kPairTermsFull, iteration);
      }
      this->elementwise.make_probs(probs, signed_probs, scores, task, tile, memory, stage,
                                   iteration, this->hides(tile));
      store_probs(iteration);
      hand_over_probs(iteration);
    }
  }

  // Replaces a tile of dO once both warpgroups have finished with it.
  REGARD_DEVICE void reload_douts(const BackwardTask& task, const RowWalk<kConfig>& tile,
                                  int iteration, const Stages& ring) const {
    this->arrive_once(Memory::kDoutEmpty, ring.stage);
    if (!this->issues() || iteration + Memory::kStages >= task.iterations) return;
    mbarrier_wait(memory.barrier(Memory::kDoutEmpty, ring.stage), ring.parity);
    this->loads(task).load_douts(task, this->tile_after_stages(task, tile), ring.stage);
  }

  // Makes S^T of the first tile, and returns the tile.
  REGARD_DEVICE RowWalk<kConfig> begin(const BackwardTask& task, const Stages& ring) {
    if constexpr (kF32) {
#pragma unroll
      for (int half = 0; half < 2; ++half) key_factors[half] = this->factors_of(task, half).key;
    }
    this->await_keys(task);
    if constexpr (!kF32) this->template set_term_factors<0>();
    this->set_whole_rows(task);
    RowWalk<kConfig> tile = row_walk<kConfig>(params, task);
    this->await_queries(task, tile, 0, ring.stage, ring.parity);
    wgmma_fence();
    multiply_queries(ring.stage);
    wgmma_wait<0>();
    fence_operand(scores);
    return tile;
  }

  REGARD_DEVICE void mainloop(const BackwardTask& task, Stages& ring) {
    RowWalk<kConfig> tile = begin(task, ring);
    const int last = task.iterations - 1;
#pragma unroll 1
    for (int iteration = 0;; ++iteration) {  // S^T is complete
      make_opaque(memory.begin);
      make_probs(task, tile, iteration, ring.stage);
      this->await_douts(task, tile, ring.stage, ring.parity);
      // f32: one fence for dv's product and the next scores. With a wait between them the compiler
      // would run them one after another.
      if (!kF32 || iteration == last) {
        wgmma_fence();
        multiply_probs(ring.stage);
      }
      if (iteration == last) break;
      const RowWalk<kConfig> before = tile;
      const Stages done = ring;
      advance<kConfig>(tile, params, task);
      ring.advance();
      this->await_queries(task, tile, iteration + 1, ring.stage, ring.parity);
      wgmma_fence();
      if constexpr (kF32) multiply_probs(done.stage);
      multiply_queries(ring.stage);
      wgmma_wait<1>();
      add_tile();
      reload_douts(task, before, iteration, done);
      wgmma_wait<0>();
      fence_operand(scores);
    }
    wgmma_wait<0>();
    add_tile();
    if constexpr (!kF32) {  // the last tile of dO becomes dv's staging
      this->arrive_once(Memory::kDoutEmpty, ring.stage);
      mbarrier_wait(memory.barrier(Memory::kDoutEmpty, ring.stage), ring.parity);
    }
  }

  REGARD_DEVICE void run() {
    this->with_task([&](const BackwardTask& task) {
      Stages ring;
      Base::clear_sums(dv);
      if (task.iterations > 0) mainloop(task, ring);
      if constexpr (kConfig.wanted.dv) {
        if constexpr (!kF32) fence_operand(dv);
        const auto results = this->results(task, memory.douts(ring.stage));
        this->write_dv(dv, results);
        results.finish();
      }
    });
  }
};

}  // namespace regard
