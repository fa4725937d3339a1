// What f32 adds to the warpgroups that have 64 keys: products of hi and lo parts, and the operands
// that are made of their results.
//
// A tile's share of dk or dv is summed separately, because the tensor core rounds its sums toward
// zero, and then added with a factor for each key, which rounds to nearest.
//
// dS^T is split into parts twice: in registers for dk, scaled by the largest element of each key;
// and through shared memory for dq, scaled by the largest element of 64 keys, because dq's sums run
// over keys.
#pragma once

#include "cuda/kernels/tile/wgmma/backward/f32_dq.cuh"
#include "cuda/kernels/tile/wgmma/backward/f32_scores.cuh"
#include "cuda/kernels/tile/wgmma/backward/key_warpgroup.cuh"

namespace regard {

template <KernelConfig kConfig>
struct F32KeyWarpgroup : KeyWarpgroup<kConfig> {
  using Base = KeyWarpgroup<kConfig>;
  using Base::memory, Base::params, Base::scores;
  using typename Base::Memory, typename Base::Elementwise, typename Base::Operand;
  static constexpr int kRows = Memory::kRows, kKeys = Memory::kKeys;

  REGARD_DEVICE F32Scores<kConfig> f32() const { return {Base::elementwise}; }

  REGARD_DEVICE KeyFactors factors_of(const BackwardTask& task, int half) const {
    const Problem& p = params.problem;
    const int64 row = key_head<kConfig>(params, task) * hi_lo_layout(p, kConfig).k.rows +
                      first_hi_lo_key(p, task) + Base::elementwise.key_of(half);
    return reinterpret_cast<const KeyFactors*>(params.buffers.hi_lo)[row];
  }

  // Adds a tile's sums to dk or dv, times the factors of a lane's two keys.
  template <int kBlocks>
  static REGARD_DEVICE void add_tile(Accumulator (&sums)[kBlocks],
                                     const Accumulator (&of_tile)[kBlocks],
                                     const float (&factor)[2]) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][i] = fma_of(of_tile[n][i], factor[i / 2], sums[n][i]);
    }
  }

  // -------------------------------------------------------------------------------------- operands

  // Signed P^T of a lane's elements of block n, in f32, until dS^T takes its place.
  REGARD_DEVICE SharedAddress probs_of_block(int iteration, int n) const {
    return this->probs_of_lane(iteration) + n / 4 * panel_bytes(kKeys) + n % 4 * 512;
  }

  // From S^T to P^T in units of dO's factors, in `scores`. Signed P^T goes to shared memory.
  REGARD_DEVICE void make_probs(float (&largest)[2], const float (&key_factors)[2],
                                const BackwardTask& task, const RowTile& tile, int iteration,
                                int stage) {
    const float unit = F32Scores<kConfig>::unit(params);
    const float factors[2] = {key_factors[0] * unit, key_factors[1] * unit};
    memory.await_empty(Memory::kDscoreEmpty, iteration);
    if constexpr (kHasPairTerms<kConfig>) {
      memory.await_full(Memory::kPairTermsFull, iteration);
    }
    f32().make_probs(scores, largest, factors, task, tile, memory, stage, iteration,
                     this->hides(tile), [&](int n, const float(&p)[4]) {
                       store_shared_128(
                           probs_of_block(iteration, n),
                           {{bits_of(p[0]), bits_of(p[1]), bits_of(p[2]), bits_of(p[3])}});
                     });
  }
  // Makes dv's operand, and the factors of its sums.
  REGARD_DEVICE void split_probs(Operand& to, float (&factors)[2],
                                 const float (&largest)[2]) const {
    const HiLoScale by[2] = {hi_lo_scale(largest[0]), hi_lo_scale(largest[1])};
    factors[0] = by[0].factor;
    factors[1] = by[1].factor;
    f32().split(to,
                [&](int n, int half, int e) { return scores[n][half * 2 + e] * by[half].scale; });
  }

  // From dP^T to dS^T in `scores`. `largest` receives the largest element of dk's operand for each
  // key. The largest element of each warp goes to shared memory, from which dq's scale follows.
  REGARD_DEVICE void make_dscores(float (&largest)[2], const float (&key_factors)[2],
                                  const float (&value_factors)[2], const RowTile& tile,
                                  int iteration, int stage) {
    const SharedAddress delta = memory.delta(stage);
    const auto probs_of = [&](int n) { return load_shared_128(probs_of_block(iteration, n)); };
    float of_key[2];
    // Only the warpgroup that made P^T knows whether the bias hides pairs.
    if (Elementwise::kHidesAlways || kConfig.features.bias || this->hides(tile)) {
      f32().template make_dscores<true>(scores, largest, of_key, value_factors, delta, probs_of);
    } else {
      f32().template make_dscores<false>(scores, largest, of_key, value_factors, delta, probs_of);
    }
    float of_warp = max_of(of_key[0] * key_factors[0], of_key[1] * key_factors[1]);
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      of_warp = max_of(of_warp, shuffle_xor(of_warp, lanes));
    }
    if (lane_index() == 0) {
      store_shared_32(memory.dscore_sizes(iteration & 1) + Base::warp_key / 16 * 4,
                      bits_of(of_warp));
    }
  }
  // Makes dk's operand, and the factors of its sums.
  REGARD_DEVICE void split_dscores(Operand& to, float (&factors)[2], const float (&largest)[2],
                                   int stage) const {
    const HiLoScale by[2] = {hi_lo_scale(largest[0]), hi_lo_scale(largest[1])};
    const float scale[2] = {by[0].scale, by[1].scale};
    factors[0] = by[0].factor;
    factors[1] = by[1].factor;
    f32().split_for_keys(to, scores, scale, memory.delta(stage));
  }
  // Stores dq's operand in place of P^T.
  REGARD_DEVICE void store_dscores(const float (&key_factors)[2], int iteration) const {
    bar_sync(this->barrier(), 128);
    const float scale =
        hi_lo_scale(largest_dscore<kConfig>(memory, iteration, Base::own_key)).scale;
    const float scales[2] = {key_factors[0] * scale, key_factors[1] * scale};
    const SharedAddress to = memory.dscores(iteration & 1);
#pragma unroll
    for (int k = 0; k < kRows / 16; ++k) {
      uint32 hi[4], lo[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int n = 2 * k + i / 2, half = i % 2;
        const HiLo both =
            split_hi_lo(scores[n][half * 2] * scales[half], scores[n][half * 2 + 1] * scales[half]);
        hi[i] = both.hi;
        lo[i] = both.lo;
      }
      stmatrix(to + (this->fragment ^ k << 5), hi);
      stmatrix(to + panel_bytes(kKeys) + (this->fragment ^ k << 5), lo);
    }
  }
};

template <KernelConfig kConfig, bool = BackwardMemory<kConfig>::kF32>
struct KeyWarpgroupFor {
  using Type = KeyWarpgroup<kConfig>;
};
template <KernelConfig kConfig>
struct KeyWarpgroupFor<kConfig, true> {
  using Type = F32KeyWarpgroup<kConfig>;
};
template <KernelConfig kConfig>
using KeyWarpgroupOf = typename KeyWarpgroupFor<kConfig>::Type;

}  // namespace regard
