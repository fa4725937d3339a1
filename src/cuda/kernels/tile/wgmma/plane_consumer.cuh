// A consumer warpgroup of a wgmma forward block of f32: as ForwardConsumer, with three products of
// pairs of f16 planes for each.
//
// Scores and values have a power of two to be multiplied by, of their rows and of a block of keys.
// P V of a block is summed by itself: the tensor unit rounds its sums toward zero, and the addition
// to out, which the power of two needs anyway, rounds to nearest.
#pragma once

#include "cuda/kernels/tile/forward_scores.cuh"
#include "cuda/kernels/tile/hi_lo.cuh"
#include "cuda/kernels/tile/wgmma/plane_softmax.cuh"
#include "cuda/kernels/tile/wgmma/warpgroup_results.cuh"

namespace regard {

template <KernelConfig kConfig>
struct PlaneConsumer {
  using Memory = WarpgroupMemory<kConfig>;
  using Place = WarpgroupPlace<kConfig>;
  using Softmax = PlaneSoftmax<kConfig>;
  static constexpr Features kOn = kConfig.features;
  static constexpr int kRows = Memory::kRows, kKeys = Memory::kKeys, kSlots = Memory::kSlots;
  static constexpr int kKeyBlocks = Place::kKeyBlocks;
  static constexpr int kSteps = kConfig.dim / 16;  // of Q K^T
  static constexpr int kValueSteps = kKeys / 16;   // of P V
  static constexpr bool kStagesTerms = stages_bias(kConfig) || stages_mask(kConfig);
  // From one plane to the next, in units of descriptor_word.
  static constexpr int kQueryPlane = panels_of(kConfig.dim) * panel_bytes(kRows) / 16;
  static constexpr int kKeyPlane = panels_of(kConfig.dim) * panel_bytes(kKeys) / 16;
  static constexpr int kValuePlane = panels_of(kConfig.dim_v) * panel_bytes(kKeys) / 16;
  // The planes of a product's three terms, the small ones first; that of both lower planes is below
  // f32's last place.
  static constexpr int kTerms = 3;
  static constexpr float kMostFactor = 0x1p-12f;  // of scores, in powers of two
  static REGARD_DEVICE constexpr int plane_of_a(int term) { return term == 0 ? 1 : 0; }
  static REGARD_DEVICE constexpr int plane_of_b(int term) { return term == 1 ? 1 : 0; }

  const KernelParams& params;
  const ForwardMaps& maps;
  const Memory memory;
  const int warpgroup;  // among the consumers
  const int warpgroup_row = warpgroup * kWarpgroupRows;
  const int warp_row = warpgroup_row + uniform(warp_index() % 4) * 16;

  typename Place::Scores scores;
  typename Place::Out out;
  typename Place::Out of_block;  // P V of one block of keys
  uint32 weights[kHiLoParts][kValueSteps][4];
  Softmax softmax;
  Ring<Memory::kStages> keys, values;
  ShortInterval common_keys;
  bool started = false;  // weights are there whose values are to come

  float query_factor[2];  // of the lane's rows; times exponent() where nothing is done to scores
  const KeyFactors* key_factors;  // of the tile's first block of keys on
  float value_factor = 0;         // of the block whose values are to come
  float most_factor = 0;          // of the tile's blocks

  // -------------------------------------------------------------------------------------- products

  REGARD_DEVICE void multiply_keys(int slot) {
    const uint32 a =
        descriptor_word(memory.queries(slot) + warpgroup * panel_bytes(kWarpgroupRows), 0);
    const uint32 b = descriptor_word(memory.keys(keys.stage), 0);
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const int column = k % 4 * 2;
        wgmma_ss_nt<F16>(scores[0],
                         matrix_descriptor(a + plane_of_a(term) * kQueryPlane +
                                           k / 4 * (panel_bytes(kRows) / 16) + column),
                         matrix_descriptor(b + plane_of_b(term) * kKeyPlane +
                                           k / 4 * (panel_bytes(kKeys) / 16) + column),
                         term + k > 0);
      }
    }
    wgmma_commit();
  }
  // The first product of all has no values yet (see ForwardConsumer); it stays within the keys that
  // are there.
  REGARD_DEVICE void multiply_values() {
    const uint32 b = started ? descriptor_word(memory.values(values.stage), panel_bytes(kKeys))
                             : descriptor_word(memory.keys(keys.stage), 0);
    const uint32 low = started ? kValuePlane : 0;
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
#pragma unroll
      for (int k = 0; k < kValueSteps; ++k) {
        wgmma_rs_nn<F16>(of_block, weights[plane_of_a(term)][k],
                         matrix_descriptor(b + plane_of_b(term) * low + k * panel_bytes(16) / 16),
                         term + k > 0);
      }
    }
    wgmma_commit();
  }
  REGARD_DEVICE void clear_out() {
#pragma unroll
    for (int n = 0; n < Place::kOutBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[n][e] = 0;
    }
  }
  REGARD_DEVICE void add_block() {
    most_factor = max_of(most_factor, value_factor);
#pragma unroll
    for (int n = 0; n < Place::kOutBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[n][e] = fma_of(of_block[n][e], value_factor, out[n][e]);
    }
  }

  // ---------------------------------------------------------------------------------- elementwise

  REGARD_DEVICE void find_factors(const ForwardTask& task) {
    const Problem& p = params.problem;
    const HiLoLayout layout = hi_lo_layout(p, kConfig);
    const int head = task.head / int(p.sizes.group());
    const int first_q = first_hi_lo_row<int>(p, task.b, task.first_q, int(p.sizes.len_q), kKeys);
    const int first_k = first_hi_lo_row<int>(p, task.b, task.first_k, int(p.sizes.len_k), kKeys);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Rows past the last that has planes are not written.
      const int row = smaller(first_q + task.first_row + warp_row + half * 8 + lane_index() / 4,
                              int(layout.q.rows) - 1);
      query_factor[half] = reinterpret_cast<const float*>(
          params.buffers.hi_lo + layout.query_factors)[task.head * layout.q.rows + row];
      if constexpr (is_plain(kOn)) query_factor[half] *= max_of(exponent(), 1.0f);
    }
    key_factors = reinterpret_cast<const KeyFactors*>(params.buffers.hi_lo) +
                  (head * layout.k.rows + first_k) / kKeys + task.first_block;
  }

  REGARD_DEVICE float exponent() const {
    return logit_unit(kOn, score_params<float>(params.problem)) * float(kLog2E);
  }
  // From products to logits, each row with its exponent. Rows whose scores may have lost what
  // counts get a sum that is none, to be computed again with the marked ones.
  REGARD_DEVICE void make_logits(const ForwardTask& task, int first_key, bool hides,
                                 float key_factor, float (&exponents)[2]) {
    constexpr bool kPlain = is_plain(kOn);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // The exponent is in it, but in an order in which no product becomes denormal on the way.
      float factor = query_factor[half] * key_factor;
      if constexpr (kPlain) factor *= smaller(exponent(), 1.0f);
      // A score is exact to 2^-10 of this or better; a hidden key among a block's may make it
      // large.
      const float in_twos =
          kPlain ? factor : factor * magnitude_of(score_params<float>(params.problem).scale);
      if (!(in_twos <= kMostFactor)) softmax.rows[half].sum = infinity<float>() - infinity<float>();
      // Above 0, so that what is hidden stays so.
      exponents[half] = kPlain ? max_of(factor, 0x1p-126f) : exponent();
      if constexpr (kPlain) continue;
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) scores[0][n][half * 2 + e] *= factor;
      }
    }
    if constexpr (kPlain && !kOn.mask) {
      if (!hides) return;
    }
    const ForwardScores<kConfig, Place> terms{Place(params, task, warp_row)};
    if constexpr (!kPlain || kOn.mask) terms.apply_terms(scores, 0, first_key);
    if (hides) terms.hide(scores, first_key);
  }

  REGARD_DEVICE void split_weights() {
#pragma unroll
    for (int k = 0; k < kValueSteps; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Accumulator& block = scores[0][2 * k + i / 2];
        const HiLo both = split_hi_lo(block[i % 2 * 2], block[i % 2 * 2 + 1]);
        weights[0][k][i] = both.hi;
        weights[1][k][i] = both.lo;
      }
    }
  }
  REGARD_DEVICE void clear_weights() {
#pragma unroll
    for (int plane = 0; plane < kHiLoParts; ++plane) {
#pragma unroll
      for (int k = 0; k < kValueSteps; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) weights[plane][k][i] = 0;
      }
    }
  }

  // -------------------------------------------------------------------------------------- the walk

  REGARD_DEVICE void free(int barriers, int index) const {
    if (lane_index() == 0) mbarrier_arrive(memory.barrier(barriers, index));
  }
  // A row of keys whose values are far below their neighbours' (the planes keep 2^-40 of a block's
  // largest) becomes infinite, to be computed again with the marked ones.
  REGARD_DEVICE void spoil_lost_rows(const Softmax& of_tile) {
    constexpr float kLeast = 0x1p-18f * 0x1p15f;  // of the largest value, which is 2^15 factors
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = of_tile.rows[half].sum, most = 0;
#pragma unroll
      for (int n = 0; n < Place::kOutBlocks; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) most = max_of(most, magnitude_of(out[n][half * 2 + e]));
      }
      sum += shuffle_xor(sum, 1);
      sum += shuffle_xor(sum, 2);
      most = max_of(most, shuffle_xor(most, 1));
      most = max_of(most, shuffle_xor(most, 2));
      if (most < sum * most_factor * kLeast) out[0][half * 2] = infinity<float>();
    }
    most_factor = 0;
  }
  REGARD_DEVICE void write_results(int taken, const Softmax& of_tile) {
    spoil_lost_rows(of_tile);
    WarpgroupResults<kConfig> results{params, maps, memory, memory.task(taken), warp_row, of_tile};
    results.write(out);
  }

  REGARD_DEVICE void run() {
    clear_weights();
    int taken = -1;  // tiles
    int first_block = 0;
#pragma unroll 1
    for (int left = 0;; --left) {
      const bool fresh = left == 0;
      if (fresh) {
        ++taken;
        mbarrier_wait(memory.barrier(Memory::kQueryFull, taken % kSlots), taken / kSlots % 2);
        const ForwardTask& task = memory.task(taken);
        left = uniform(task.blocks);
        if (left == 0) break;
        first_block = uniform(task.first_block);
        const ShortInterval common = Place(params, task, warp_row).common_keys(warpgroup_row);
        common_keys = {uniform(common.begin), uniform(common.end)};
        find_factors(task);
      }
      const ForwardTask& task = memory.task(taken);
      const int slot = taken % kSlots;
      const int first_key = (first_block + left - 1) * kKeys;
      const KeyFactors factors = key_factors[left - 1];
      if constexpr (kStagesTerms) {
        sync_warp();  // the block before has been read
        Place(params, task, warp_row).load_terms(first_key);
      }
      mbarrier_wait(memory.barrier(Memory::kKeyFull, keys.stage), keys.parity);
      if (started) mbarrier_wait(memory.barrier(Memory::kValueFull, values.stage), values.parity);
      wgmma_fence();
      multiply_keys(slot);
      multiply_values();
      wgmma_wait<1>();
      fence_operand(scores[0]);

      const Softmax before_tile = softmax;
      if constexpr (kStagesTerms) {
        cp_async_wait<0>();
        sync_warp();
      }
      const bool hides = first_key < common_keys.begin || first_key + kKeys > common_keys.end;
      float exponents[2];
      if (fresh) softmax.clear();
      make_logits(task, first_key, hides, factors.key, exponents);
      softmax.raise(scores, exponents);
      softmax.make_weights(scores, exponents);
      fence_operand(scores[0]);
      // Long over: a branch, across which the compiler does not move the wait for out.
      mbarrier_wait(memory.barrier(Memory::kKeyFull, keys.stage), keys.parity);
      free(Memory::kKeyEmpty, keys.stage);
      if (left == 1) free(Memory::kQueryEmpty, slot);
      wgmma_wait<0>();
      fence_operand(of_block);
      keys.advance();
      if (started) {
        free(Memory::kValueEmpty, values.stage);
        values.advance();
        add_block();
      }
      value_factor = factors.value;
      if (fresh) {
        if (started) write_results(taken - 1, before_tile);
        clear_out();
        started = true;
      } else {
        softmax.rescale(out);
      }
      if constexpr (kOn.dropout) {
        const ForwardScores<kConfig, Place> terms{Place(params, task, warp_row)};
        terms.drop(scores, first_key);
      }
      split_weights();
    }
    if (!started) return;
    mbarrier_wait(memory.barrier(Memory::kValueFull, values.stage), values.parity);
    wgmma_fence();
    multiply_values();
    wgmma_wait<0>();
    fence_operand(of_block);
    add_block();
    write_results(taken - 1, softmax);
    WarpgroupResults<kConfig>::finish();
  }
};

}  // namespace regard
