// Warpgroup 2 of a wide wgmma backward block: dP^T, dS^T and dk of the block's 64 keys, from the
// signed P^T that warpgroup 1 makes. dS^T goes to shared memory for dq. Warpgroup 2 reloads Q.
#pragma once

#include "cuda/kernels/tile/wgmma/backward/f32_key_warpgroup.cuh"

namespace regard {

template <KernelConfig kConfig>
struct DkWarpgroup : KeyWarpgroupOf<kConfig> {
  using Base = KeyWarpgroupOf<kConfig>;
  using Base::memory, Base::params, Base::scores, Base::kF32, Base::kClears;
  using typename Base::Elementwise, typename Base::Memory, typename Base::Operand;
  using Stages = Ring<Memory::kStages>;

  Accumulator dk[kConfig.dim / 8];
  Operand dscores;
  // f32
  Accumulator of_tile[kConfig.dim / 8];  // what a tile adds to dk, in units of `factors`
  float factors[2], key_factors[2], value_factors[2];

  REGARD_DEVICE void multiply_douts(int stage) {
    this->template multiply_scores<kConfig.dim_v, Elementwise::kAddsDelta>(
        memory.values(), memory.douts(stage), memory.delta(stage));
  }
  REGARD_DEVICE void multiply_dscores(int stage) {
    if constexpr (kConfig.wanted.dk) {
      this->multiply_rows(kF32 ? of_tile : dk, dscores, memory.queries(stage));
    } else if constexpr (kF32) {
      wgmma_commit();
    }
  }
  REGARD_DEVICE void add_tile() {
    if constexpr (kF32 && kConfig.wanted.dk) {
      fence_operand(of_tile);
      Base::add_tile(dk, of_tile, factors);
    }
  }

  REGARD_DEVICE void read_probs(Operand& signed_probs, int iteration) const {
    const SharedAddress from = this->probs_of_lane(iteration);
#pragma unroll
    for (int k = 0; k < Memory::kRows / 16; ++k) {
      const Bits128 four = load_shared_128(from + k * 512);
#pragma unroll
      for (int i = 0; i < 4; ++i) signed_probs[0][k][i] = four.word[i];
    }
  }
  // From dP^T to dS^T, which takes the place of P^T in shared memory.
  REGARD_DEVICE void make_dscores(const BackwardTask& task, const RowTile& tile, int iteration,
                                  int stage) {
    if constexpr (!kF32 && Elementwise::kAddsDelta) this->arrive_once(Memory::kDoutEmpty, stage);
    memory.await_full(Memory::kProbsFull, iteration);
    if constexpr (kF32) {
      float largest[2];
      Base::make_dscores(largest, key_factors, value_factors, tile, iteration, stage);
      if constexpr (kConfig.wanted.dk) this->split_dscores(dscores, factors, largest, stage);
      sync_warp();
      mbarrier_arrive(memory.barrier(Memory::kDoutEmpty, stage));  // delta has been read
      Base::store_dscores(key_factors, iteration);
    } else {
      Operand signed_probs;
      read_probs(signed_probs, iteration);
      // Only warpgroup 1 knows whether the bias hides pairs.
      this->elementwise.make_dscores(dscores, signed_probs, scores, memory, iteration,
                                     kConfig.features.bias || this->hides(tile));
      if constexpr (!Elementwise::kAddsDelta) {
        mbarrier_arrive(memory.barrier(Memory::kDoutEmpty, stage));  // delta has been read
      }
      sync_warp();
      Base::store_dscores(dscores, iteration);
    }
  }

  // Replaces a tile of Q. Warpgroup 1 has finished with it, because P^T was complete.
  REGARD_DEVICE void reload_queries(const BackwardTask& task, const RowWalk<kConfig>& tile,
                                    int iteration, const Stages& ring) const {
    this->arrive_once(Memory::kQueryEmpty, ring.stage);
    if (!this->issues() || iteration + Memory::kStages >= task.iterations) return;
    mbarrier_wait(memory.barrier(Memory::kQueryEmpty, ring.stage), ring.parity);
    this->loads(task).load_queries(task, this->tile_after_stages(task, tile), ring.stage);
  }

  // Makes dP^T of the first tile, and returns the tile.
  REGARD_DEVICE RowWalk<kConfig> begin(const BackwardTask& task, const Stages& ring) {
    if constexpr (kF32) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const KeyFactors own = this->factors_of(task, half);
        key_factors[half] = own.key;
        value_factors[half] = own.value;
      }
    }
    this->await_values(task);
    if constexpr (!kF32) this->template set_term_factors<kConfig.cta_pair ? kRowTerms : 0>();
    this->set_whole_rows(task);
    RowWalk<kConfig> tile = row_walk<kConfig>(params, task);
    if constexpr (!kF32) this->await_queries(task, tile, 0, ring.stage, ring.parity);
    this->await_douts(task, tile, ring.stage, ring.parity);
    wgmma_fence();
    multiply_douts(ring.stage);
    wgmma_wait<0>();
    fence_operand(scores);
    return tile;
  }

  REGARD_DEVICE void mainloop(const BackwardTask& task) {
    Stages ring;
    RowWalk<kConfig> tile = begin(task, ring);
    const int last = task.iterations - 1;
#pragma unroll 1
    for (int iteration = 0;; ++iteration) {  // dP^T is complete; except in f32, Q is there
      make_opaque(memory.begin);
      make_dscores(task, tile, iteration, ring.stage);
      if constexpr (kF32) this->await_queries(task, tile, iteration, ring.stage, ring.parity);
      if (!kF32 || iteration == last) {  // f32: one fence for both products, as in DvWarpgroup
        wgmma_fence();
        multiply_dscores(ring.stage);
      }
      if (iteration == last) break;
      // Where rows are cleared the warpgroups wait for each other, and dq must not wait for that.
      if constexpr (kClears) this->hand_over_dscores(iteration);
      const RowWalk<kConfig> before = tile;
      const Stages done = ring;
      advance<kConfig>(tile, params, task);
      ring.advance();
      if constexpr (!kF32) this->await_queries(task, tile, iteration + 1, ring.stage, ring.parity);
      this->await_douts(task, tile, ring.stage, ring.parity);
      wgmma_fence();
      if constexpr (kF32) multiply_dscores(done.stage);
      multiply_douts(ring.stage);
      if constexpr (!kClears) this->hand_over_dscores(iteration);
      wgmma_wait<1>();
      add_tile();
      reload_queries(task, before, iteration, done);
      wgmma_wait<0>();
      fence_operand(scores);
    }
    this->hand_over_dscores(last);
    wgmma_wait<0>();
    add_tile();
  }

  REGARD_DEVICE void run() {
    this->with_task([&](const BackwardTask& task) {
      Base::clear_sums(dk);
      if (task.iterations > 0) mainloop(task);
      if constexpr (kConfig.wanted.dk) {
        if constexpr (!kF32) fence_operand(dk);
        const auto results = this->results(task, memory.values());  // which nobody else reads
        this->write_dk(dk, results);
        results.finish();
      }
    });
  }
};

}  // namespace regard
