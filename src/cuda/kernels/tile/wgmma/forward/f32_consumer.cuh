// A consumer warpgroup of the wgmma forward kernel for f32: as ForwardConsumer, except that each
// product is three products of the operands' hi and lo f16 parts.
//
// Rows of Q and blocks of K and V are scaled by powers of two; their factors, the inverses, undo
// that. P V of a block is summed separately, because tensor cores round their sums toward zero,
// while the addition to out, which the factor needs anyway, rounds to nearest. With more than 128
// columns, it is computed and added in chunks of columns: the first one together with S of the next
// block, the others one by one after that block's softmax.
#pragma once

#include "cuda/kernels/tile/forward_scores.cuh"
#include "cuda/kernels/tile/hi_lo.cuh"
#include "cuda/kernels/tile/wgmma/forward/consumer_warpgroup.cuh"
#include "cuda/kernels/tile/wgmma/forward/f32_softmax.cuh"

namespace regard {

template <KernelConfig kConfig>
struct F32Consumer : ConsumerWarpgroup<kConfig> {
  using Base = ConsumerWarpgroup<kConfig>;
  using Base::Base;
  using Base::keys, Base::values, Base::left, Base::has_weights, Base::iteration;
  using Base::kSlots, Base::kKeys, Base::kKeyBlocks;
  using Base::params, Base::memory, Base::warp_row, Base::scores, Base::out, Base::weights;
  using typename Base::Coords, typename Base::Memory;
  using Softmax = F32Softmax<kConfig>;
  static constexpr Features kOn = full_tile_features(kConfig);
  static constexpr bool kPlain = is_plain(kOn);
  static constexpr bool kStagesTerms = stages_bias(kConfig) || stages_mask(kConfig);
  static constexpr float kMaxFactor = 0x1p-12f;  // of scores, in powers of two
  static constexpr int kChunkBlocks = f32_chunk_columns(kConfig) / 8;
  static constexpr int kChunks = (Coords::kOutBlocks + kChunkBlocks - 1) / kChunkBlocks;
  // K and V of one block at a time are in shared memory. K is given back as soon as S is there, so
  // that the next K arrives during the softmax and P V; and V, which follows it, during S.
  static constexpr bool kOneStage = Memory::kStages == 1;

  Accumulator block_out[kChunkBlocks] = {};  // of P V of one block of keys: a chunk of columns
  Softmax softmax{};
  DropoutOf<kConfig> dropout = dropout_of<kConfig>(params.problem);
  typename ForwardScores<kConfig, Coords>::SeenKeys seen;  // of the block
  float query_factor[2] =
      {};  // of the lane's rows; with no terms, times exponent() if this is above 1
  const KeyFactors* key_factors = nullptr;  // of the tile's key blocks
  float value_factor = 0;                   // of the V that P awaits
  float max_value_factor = 0;               // of the tile's blocks so far

  REGARD_DEVICE void run() {
#pragma unroll 1
    for (;; --left) {
      const bool is_first = left == 0;
      if (is_first) {
        if (!this->next_tile()) break;
        find_factors(tile());
      }
      const KeyFactors factors = key_factors[first_key() / kKeys - this->first_block];
      issue();
      const Softmax last_softmax = softmax;  // of the tile before, if this block begins one
      if constexpr (kStagesTerms) {
        cp_async_wait<0>();
        sync_warp();
      }
      if (is_first) softmax.clear();
      make_weights(factors.key);
      await_out();
      value_factor = factors.value;
      if (is_first) {
        if (has_weights) write_tile(iteration - 1, last_softmax);
        clear_out();
        has_weights = true;
      } else {
        softmax.rescale(out);
      }
      if constexpr (kOn.dropout) elementwise().drop(scores, first_key(), dropout);
      split_weights();
      this->advance(tile());
    }
    if (has_weights) finish();
  }

 private:
  REGARD_DEVICE const ForwardTile<kConfig>& tile() const { return memory.tile(iteration); }
  REGARD_DEVICE int first_key() const { return this->block().first_key; }
  REGARD_DEVICE ForwardScores<kConfig, Coords> elementwise() const {
    return ForwardScores<kConfig, Coords>{Coords(params, tile(), warp_row)};
  }
  REGARD_DEVICE float exponent() const {
    return logit_unit(kOn, score_params<float>(params.problem)) * float(kLog2E);
  }

  // ------------------------------------------------------------------------------------- the steps

  REGARD_DEVICE void find_factors(const ForwardTile<kConfig>& tile) {
    const Problem& p = params.problem;
    const HiLoLayout layout = hi_lo_layout(p, kConfig);
    const int head = tile.head / group_of(p.sizes);
    const int first_q = first_hi_lo_row<int>(p, tile.b, tile.first_q, int(p.sizes.len_q), kKeys);
    const int first_k = first_hi_lo_row<int>(p, tile.b, tile.first_k, int(p.sizes.len_k), kKeys);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Rows of the tile past the last row of the layout are not written.
      const int row = smaller(first_q + tile.first_row + warp_row + half * 8 + lane_index() / 4,
                              int(layout.q.rows) - 1);
      query_factor[half] = reinterpret_cast<const float*>(
          params.buffers.hi_lo + layout.query_factors)[tile.head * layout.q.rows + row];
      if constexpr (kPlain) query_factor[half] *= max_of(exponent(), 1.0f);
    }
    key_factors = reinterpret_cast<const KeyFactors*>(params.buffers.hi_lo) +
                  (head * layout.k.rows + first_k) / kKeys + tile.first_block;
  }

  // Starts S = Q K^T of the block and the first chunk of P V of the block before, and waits for S.
  REGARD_DEVICE void issue() {
    if constexpr (kStagesTerms) {
      sync_warp();  // the terms of the block before have been read
      Coords(params, tile(), warp_row).load_terms(this->block());
    }
    elementwise().read_seen(seen, this->block());
    mbarrier_wait(memory.key_full(keys.stage), keys.parity);
    if (has_weights && !kOneStage) await_values();
    wgmma_fence();
    this->multiply_keys(iteration % kSlots);
    if (has_weights && kOneStage) await_values();
    start_chunk(0);
    wgmma_wait<1>();
    fence_operand(scores[0]);
    if (has_weights && kOneStage) release_block();
  }
  REGARD_DEVICE void await_values() const {
    mbarrier_wait(memory.value_full(values.stage), values.parity);
  }
  // Gives K back, and Q after the tile's last block.
  REGARD_DEVICE void release_block() {
    this->release(memory.key_empty(keys.stage));
    if (left == 1) this->release(memory.query_empty(iteration % kSlots));
    keys.advance();
  }

  REGARD_DEVICE void make_weights(float key_factor) {
    float exponents[2];
    make_logits(key_factor, exponents);
    softmax.raise(scores, exponents);
    softmax.template make_weights<0, kKeyBlocks>(scores, exponents);
    fence_operand(scores[0]);
  }

  // Waits for P V of the block before, adds it to out, and gives K and V back.
  REGARD_DEVICE void await_out() {
    // These phases are long over. The branch keeps the compiler from moving the wait for P V up.
    if constexpr (kOneStage) {
      if (has_weights) await_values();
    } else {
      mbarrier_wait(memory.key_full(keys.stage), keys.parity);
      release_block();
    }
    await_chunk();
    if (has_weights) {
      take_block();
    } else if (kOneStage) {
      release_block();
    }
  }

  REGARD_DEVICE void finish() {
    await_values();
    wgmma_fence();
    start_chunk(0);
    await_chunk();
    take_block();
    flag_lost_rows(softmax);
    this->write_last_tile(softmax);
  }

  // -------------------------------------------------------------------------------- chunks of P V

  // Starts a chunk of P V. The last one may go on past the columns of out: over V's padding.
  REGARD_DEVICE void start_chunk(int chunk) {
    this->multiply_values(block_out, false, chunk * panels_of(kChunkBlocks * 8));
  }
  REGARD_DEVICE void await_chunk() {
    wgmma_wait<0>();
    fence_operand(block_out);
  }
  // Adds P V to out, and gives V back. The first chunk is there.
  REGARD_DEVICE void take_block() {
    max_value_factor = max_of(max_value_factor, value_factor);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (chunk > 0) {
        wgmma_fence();
        start_chunk(chunk);
        await_chunk();
      }
      if (chunk + 1 == kChunks) this->release_values();
#pragma unroll
      for (int n = 0; n < kChunkBlocks; ++n) {
        const int to = chunk * kChunkBlocks + n;
        if (to >= Coords::kOutBlocks) continue;
#pragma unroll
        for (int e = 0; e < 4; ++e) out[to][e] = fma_of(block_out[n][e], value_factor, out[to][e]);
      }
    }
  }

  // ---------------------------------------------------------------------------------- elementwise

  // Products become logits; `exponents` are log2(e) times the unit of each row's logits.
  REGARD_DEVICE void make_logits(float key_factor, float (&exponents)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // The exponent is part of the product, in an order in which no step becomes denormal.
      float factor = query_factor[half] * key_factor;
      if constexpr (kPlain) factor *= smaller(exponent(), 1.0f);
      // A score is exact to 2^-10 of this. Where that is not enough, the sum becomes NaN, so that
      // the fix-up pass computes the row again; a large hidden key in the block may be the cause.
      const float in_twos =
          kPlain ? factor : factor * magnitude_of(score_params<float>(params.problem).scale);
      if (!(in_twos <= kMaxFactor)) softmax.rows[half].sum = infinity<float>() - infinity<float>();
      // Above 0, so that hidden pairs stay hidden.
      exponents[half] = kPlain ? max_of(factor, 0x1p-126f) : exponent();
      if constexpr (kPlain) continue;
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) scores[0][n][half * 2 + e] *= factor;
      }
    }
    const bool masked = this->is_masked(this->block());
    if constexpr (kPlain && !tests_pairs(kOn)) {
      if (!masked) return;
    }
    const ForwardScores<kConfig, Coords> terms = elementwise();
    if constexpr (!kPlain || tests_pairs(kOn)) terms.apply_terms(scores, 0, first_key());
    if (masked) terms.hide(scores, 0, this->block(), this->is_cut(first_key()), seen);
  }

  REGARD_DEVICE void split_weights() {
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Accumulator& block = scores[0][2 * k + i / 2];
        const HiLo parts = split_hi_lo(block[i % 2 * 2], block[i % 2 * 2 + 1]);
        weights[0][k][i] = parts.hi;
        weights[1][k][i] = parts.lo;
      }
    }
  }

  REGARD_DEVICE void clear_out() {
#pragma unroll
    for (int n = 0; n < Coords::kOutBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[n][e] = 0;
    }
    // Or the compiler clears out before the epilogue, of which it then keeps a copy.
    if constexpr (kChunks > 1) fence_operand(out);
  }

  REGARD_DEVICE void write_tile(int iteration, const Softmax& of_tile) {
    flag_lost_rows(of_tile);
    Base::write_tile(iteration, of_tile);
  }
  // The parts keep 2^-40 of a block's largest value. If the values that a row sees are far below
  // it, a result becomes infinite, so that the fix-up pass computes the row again.
  REGARD_DEVICE void flag_lost_rows(const Softmax& of_tile) {
    constexpr float kLeast = 0x1p-18f * 0x1p15f;  // of the largest value, which is 2^15 factors
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = of_tile.rows[half].sum, most = 0;
#pragma unroll
      for (int n = 0; n < Coords::kOutBlocks; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) most = max_of(most, magnitude_of(out[n][half * 2 + e]));
      }
      sum += shuffle_xor(sum, 1);
      sum += shuffle_xor(sum, 2);
      most = max_of(most, shuffle_xor(most, 1));
      most = max_of(most, shuffle_xor(most, 2));
      if (most < sum * max_value_factor * kLeast) out[0][half * 2] = infinity<float>();
    }
    max_value_factor = 0;
  }
};

}  // namespace regard
