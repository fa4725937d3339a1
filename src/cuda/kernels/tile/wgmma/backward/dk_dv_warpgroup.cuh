// Warpgroups 1 and 2 of a wgmma backward block, with 64 keys each: P^T, dS^T, dk and dv.
//
// Exponentials run during dk's product of the tile before; no product runs while dS^T is made. Next
// to tall tiles, of 128 rows, there are no registers for dS^T of the tile before, so that
// exponentials wait for that product. The two warpgroups wait for each other only where they clear
// rows.
#pragma once

#include "cuda/kernels/tile/wgmma/backward/key_warpgroup.cuh"

namespace regard {

// Steps of 16 columns of K and of V that a warpgroup keeps in registers, because they spare reads
// of shared memory. Measured.
template <KernelConfig kConfig>
struct HeldSteps {
  static constexpr bool kNarrow = kConfig.dim <= 64 && kConfig.dim_v <= 64;
  static constexpr bool kFree = KeyScores<kConfig>::kPlain && !kConfig.features.dropout &&
                                kConfig.tiling.rows == kPanelColumns;
  static constexpr bool kCausal = kConfig.features.interval;
  static constexpr int kKeys = !kFree ? 0 : kNarrow ? (kCausal ? 2 : 0) : 1;
  static constexpr int kValues = kFree && kNarrow && kCausal ? 2 : 0;
};

template <KernelConfig kConfig>
struct DkDvWarpgroup : KeyWarpgroup<kConfig> {
  using Base = KeyWarpgroup<kConfig>;
  using Base::memory, Base::params, Base::scores, Base::elementwise;
  using typename Base::Elementwise, typename Base::Memory, typename Base::Operand;
  using Held = HeldSteps<kConfig>;
  static constexpr int kMostHeld = larger(1, larger(Held::kKeys, Held::kValues));
  using HeldOperand = uint32[kMostHeld][4];
  static constexpr bool kNarrow = kConfig.dim <= 64 && kConfig.dim_v <= 64;
  static constexpr bool kTall = kConfig.tiling.rows > kPanelColumns;
  // Whether hides() is called while S^T is made, because it takes more than a comparison.
  static constexpr bool kFindsHidesEarly = kConfig.features.interval || kConfig.tile_map;

  Accumulator dk[kConfig.dim / 8], dv[kConfig.dim_v / 8];
  Operand probs, signed_probs, dscores;
  HeldOperand held_keys, held_values;
  Ring<Memory::kQueryStages> queries;
  DropoutBitsReader<Memory, 1> dropout_bits;

  REGARD_DEVICE void hold_steps(HeldOperand& held, int count, SharedAddress tile) const {
#pragma unroll
    for (int k = 0; k < kMostHeld; ++k) {
      if (k < count) ldmatrix(held[k], tile + (this->fragment ^ k << 5));
    }
  }
  // scores = A B^T over kSteps steps of 16 columns, and the rows' terms. The first kHeld steps of A
  // are in registers.
  template <int kSteps, int kHeld, bool kAddsTerms>
  REGARD_DEVICE void multiply_held(const HeldOperand& held, SharedAddress keys, SharedAddress rows,
                                   SharedAddress terms) {
    wgmma_fence();
    if constexpr (kAddsTerms) this->add_row_terms(terms);
    const uint32 a = descriptor_word(keys + panel_bytes(this->own_key), 0);
    const uint32 b = descriptor_word(rows, 0);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int column = k % 4 * 2;
      const uint64 b_tile = matrix_descriptor(b + k / 4 * (panel_bytes(Base::kRows) / 16) + column);
      if (k < kHeld) {
        wgmma_rs_nt<typename Base::Format>(scores, held[k < kHeld ? k : 0], b_tile,
                                           kAddsTerms || k > 0);
      } else {
        wgmma_ss_nt<typename Base::Format>(
            scores, matrix_descriptor(a + k / 4 * (panel_bytes(Base::kKeys) / 16) + column), b_tile,
            kAddsTerms || k > 0);
      }
    }
    wgmma_commit();
  }
  REGARD_DEVICE void multiply_queries() {
    multiply_held<kConfig.dim / 16, Held::kKeys, Elementwise::kAddsLse>(
        held_keys, memory.keys(), memory.queries(queries.stage), memory.lse(queries.stage));
  }
  REGARD_DEVICE void multiply_douts(int stage) {
    multiply_held<kConfig.dim_v / 16, Held::kValues, Elementwise::kAddsDelta>(
        held_values, memory.values(), memory.douts(stage), memory.delta(stage));
  }

  // Makes S^T of the first tile, and returns the tile.
  REGARD_DEVICE RowWalk<kConfig> begin(const BackwardTask& task) {
    this->await_keys(task);
    hold_steps(held_keys, Held::kKeys, memory.keys());
    this->template set_term_factors<0>();
    this->set_whole_rows(task);
    RowWalk<kConfig> tile = this->first_tile(task);
    this->await_queries(task, tile, 0, queries.stage, queries.parity);
    multiply_queries();
    this->receive_tile(tile, 0);
    this->await_values(task);
    hold_steps(held_values, Held::kValues, memory.values());
    wgmma_wait<0>();
    fence_operand(scores);
    return tile;
  }

  // From S^T to P^T, while dk's product of the tile before runs. `hides`: intervals, or with a tile
  // map mask and spans. Returns whether pairs may be hidden.
  REGARD_DEVICE bool make_probs(const BackwardTask& task, const RowTile& tile, int iteration,
                                bool hides) {
    // There would be too few registers for score terms, or a tall tile, next to dk's product.
    if constexpr (kTall || (!kNarrow && !Elementwise::kPlain)) wgmma_wait<0>();
    if constexpr (kHasPairTerms<kConfig>) {
      memory.await_full(Memory::kPairTermsFull, iteration);
    }
    uint32 bits[1];
    if constexpr (Elementwise::kReadsDropoutBits) dropout_bits.read(bits, memory);
    const bool may_hide = elementwise.make_probs(probs, signed_probs, scores, task, tile, memory,
                                                 queries.stage, iteration, hides);
    if constexpr (Elementwise::kReadsDropoutBits) {
      elementwise.apply_dropout(probs, signed_probs, bits[0]);
    }
    return may_hide;
  }

  REGARD_DEVICE void mainloop(const BackwardTask& task) {
    RowWalk<kConfig> tile = begin(task);
    const int last = task.iterations - 1;
    bool may_hide_pairs = this->hides(tile);
#pragma unroll 1
    for (int iteration = 0;; ++iteration) {  // S^T is complete
      make_opaque(memory.begin);
      if constexpr (!kFindsHidesEarly) may_hide_pairs = this->hides(tile);
      const bool hides = make_probs(task, tile, iteration, may_hide_pairs);
      // The compiler moves a wait for products up to the branch before it. Above 64 columns it
      // must, because exponentials during dk's product would take too many registers.
      if constexpr (!kNarrow) wgmma_wait<0>();
      this->await_douts(task, tile, iteration & 1, parity_of(iteration));
      if constexpr (kNarrow) wgmma_wait<0>();
      multiply_douts(iteration & 1);
      if constexpr (kConfig.wanted.dv) {
        this->multiply_rows(dv, probs, memory.douts(iteration & 1));
      }
      wgmma_wait<0>();
      fence_operand(scores);
      elementwise.make_dscores(dscores, Elementwise::kHasSignedProbs ? signed_probs : probs, scores,
                               memory, iteration, hides);
      memory.await_empty(Memory::kDscoreEmpty, iteration);
      this->store_dscores(dscores, iteration);
      const SharedAddress rows = memory.queries(queries.stage);
      queries.advance();
      if (iteration == last) {
        wgmma_fence();
        if constexpr (kConfig.wanted.dk) this->multiply_rows(dk, dscores, rows);
        this->hand_over_dscores(iteration);
        break;
      }
      this->next_tile(tile, task);
      this->await_queries(task, tile, iteration + 1, queries.stage, queries.parity);
      multiply_queries();
      if constexpr (kConfig.wanted.dk) {
        this->multiply_rows(dk, dscores, rows);
      } else {
        wgmma_commit();
      }
      this->receive_tile(tile, iteration + 1);
      if constexpr (kFindsHidesEarly) may_hide_pairs = found_early(this->hides(tile));
      this->hand_over_dscores(iteration);
      wgmma_wait<1>();
      fence_operand(scores);
    }
  }

  REGARD_DEVICE void run() {
    this->with_task([&](const BackwardTask& task) {
      Base::clear_sums(dk);
      Base::clear_sums(dv);
      if (task.iterations > 0) mainloop(task);
      // Through the values, of which this warpgroup alone has read these rows. dk's last product
      // still runs while dv is written.
      const KeyGradients<kConfig> results = this->results(task, memory.values());
      if constexpr (kConfig.wanted.dv) {
        fence_operand(dv);
        this->write_dv(dv, results);
      }
      wgmma_wait<0>();
      if constexpr (kConfig.wanted.dk) {
        fence_operand(dk);
        this->write_dk(dk, results);
      }
      results.finish();
    });
  }
};

}  // namespace regard
