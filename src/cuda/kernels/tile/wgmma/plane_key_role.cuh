// What warpgroups of a wgmma backward block of f32 that have 64 of its keys share: products of
// pairs of f16 planes, and what makes operands of their results.
//
// What a tile adds to dk or dv is summed by itself, as the tensor unit rounds its sums toward zero,
// and then added with a factor for each key, which rounds to nearest.
//
// dS^T becomes planes twice: for dk, from registers, scaled by the largest of each key; for dq,
// through shared memory, by the largest of 64 keys, as dq's sums run over keys.
#pragma once

#include "cuda/kernels/tile/wgmma/key_role.cuh"
#include "cuda/kernels/tile/wgmma/plane_loads.cuh"
#include "cuda/kernels/tile/wgmma/plane_scores.cuh"

namespace regard {

template <KernelConfig kConfig>
struct PlaneKeyRole : KeyRole<kConfig> {
  using Role = KeyRole<kConfig>;
  using Role::memory, Role::params, Role::maps, Role::x;
  using typename Role::Memory, typename Role::Elementwise;
  using Planes = typename PlaneScores<kConfig>::Planes;
  static constexpr int kRows = Memory::kRows, kKeys = Memory::kKeys;
  // From one plane to the next, in units of descriptor_word.
  static constexpr int plane_words(int columns, int rows) {
    return panels_of(columns) * panel_bytes(rows) / 16;
  }

  REGARD_DEVICE PlaneScores<kConfig> scores() const { return {Role::elementwise}; }

  REGARD_DEVICE PlaneLoads<kConfig> loads() const { return {params, maps, memory}; }

  REGARD_DEVICE KeyFactors factors_of(const BackwardTask& task, int half) const {
    const Problem& p = params.problem;
    const int64 row = task.kv * hi_lo_layout(p, kConfig).k.rows +
                      PlaneLoads<kConfig>::first_key(p, task) + Role::elementwise.key_of(half);
    return reinterpret_cast<const KeyFactors*>(params.buffers.hi_lo)[row];
  }

  // -------------------------------------------------------------------------------------- products

  // Whoever calls these begins the products: with a fence for each, or a wait between them, the
  // compiler would let them run one by one.

  // x = A B^T over the columns of both.
  template <int kColumns>
  REGARD_DEVICE void multiply_scores(SharedAddress keys, SharedAddress rows) {
    const uint32 a = descriptor_word(keys + panel_bytes(Role::own_key), 0),
                 b = descriptor_word(rows, 0);
#pragma unroll
    for (int term = 0; term < kPlaneTerms; ++term) {
#pragma unroll
      for (int k = 0; k < kColumns / 16; ++k) {
        const int column = k % 4 * 2;
        wgmma_ss_nt<F16>(x,
                         matrix_descriptor(a + plane_of_a(term) * plane_words(kColumns, kKeys) +
                                           k / 4 * (panel_bytes(kKeys) / 16) + column),
                         matrix_descriptor(b + plane_of_b(term) * plane_words(kColumns, kRows) +
                                           k / 4 * (panel_bytes(kRows) / 16) + column),
                         term + k > 0);
      }
    }
    wgmma_commit();
  }

  // sums = A rows, over the tile's rows.
  template <int kBlocks>
  static REGARD_DEVICE void multiply_rows(Accumulator (&sums)[kBlocks], const Planes& a,
                                          SharedAddress rows) {
    const uint32 b = descriptor_word(rows, panel_bytes(kRows));
#pragma unroll
    for (int term = 0; term < kPlaneTerms; ++term) {
#pragma unroll
      for (int k = 0; k < kRows / 16; ++k) {
        wgmma_rs_nn<F16>(sums, a.word[plane_of_a(term)][k],
                         matrix_descriptor(b + plane_of_b(term) * plane_words(kBlocks * 8, kRows) +
                                           k * panel_bytes(16) / 16),
                         term + k > 0);
      }
    }
    wgmma_commit();
  }

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

  // Where the first of a lane's four scores of block n lies until dS^T takes the place of all.
  REGARD_DEVICE SharedAddress handed_block(int use, int n) const {
    return this->handed(use) + n / 4 * panel_bytes(kKeys) + n % 4 * 512;
  }

  // From S^T to what dv's product multiplies, in x, and its largest; P^T, or its shares, to shared
  // memory.
  REGARD_DEVICE void make_weights(float (&most)[2], const float (&key_factors)[2],
                                  const BackwardTask& task, const BackwardStep& step, int use,
                                  int stage) {
    const float unit = PlaneScores<kConfig>::unit(params);
    const float factors[2] = {key_factors[0] * unit, key_factors[1] * unit};
    mbarrier_wait(memory.barrier(Memory::kDscoreEmpty, use & 1), parity_of(use) ^ 1);
    if constexpr (kHasPairTerms<kConfig>) {
      mbarrier_wait(memory.barrier(Memory::kPairTermsFull, use & 1), parity_of(use));
    }
    scores().make_weights(x, most, factors, task, step, memory, stage, use, this->hides(step),
                          [&](int n, const float(&w)[4]) {
                            store_shared_128(
                                handed_block(use, n),
                                {{bits_of(w[0]), bits_of(w[1]), bits_of(w[2]), bits_of(w[3])}});
                          });
  }
  // dv's operand of that, and the factors of its sums.
  REGARD_DEVICE void split_weights(Planes& to, float (&factors)[2], const float (&most)[2]) const {
    const HiLoScale by[2] = {hi_lo_scale(most[0]), hi_lo_scale(most[1])};
    factors[0] = by[0].factor;
    factors[1] = by[1].factor;
    scores().split(to, [&](int n, int half, int e) { return x[n][half * 2 + e] * by[half].scale; });
  }

  // From dP^T to dS^T in x. The largest of a warp is left for all who need that of the tile;
  // `most`: of dk's operand.
  REGARD_DEVICE void make_dscores(float (&most)[2], const float (&key_factors)[2],
                                  const float (&value_factors)[2], const BackwardStep& step,
                                  int use, int stage) {
    const SharedAddress delta = memory.delta(stage);
    const auto take = [&](int n) { return load_shared_128(handed_block(use, n)); };
    float of_key[2];
    // Only who made the weights knows whether the bias hides pairs.
    if (Elementwise::kHidesAlways || kConfig.features.bias || this->hides(step)) {
      scores().template make_dscores<true>(x, most, of_key, value_factors, delta, take);
    } else {
      scores().template make_dscores<false>(x, most, of_key, value_factors, delta, take);
    }
    float largest = max_of(of_key[0] * key_factors[0], of_key[1] * key_factors[1]);
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      largest = max_of(largest, shuffle_xor(largest, lanes));
    }
    if (lane_index() == 0) {
      store_shared_32(memory.dscore_sizes(use & 1) + Role::warp_key / 16 * 4, bits_of(largest));
    }
  }
  // dk's operand, and the factors of its sums.
  REGARD_DEVICE void split_dscores(Planes& to, float (&factors)[2], const float (&most)[2],
                                   int stage) const {
    const HiLoScale by[2] = {hi_lo_scale(most[0]), hi_lo_scale(most[1])};
    const float scale[2] = {by[0].scale, by[1].scale};
    factors[0] = by[0].factor;
    factors[1] = by[1].factor;
    scores().split_for_keys(to, x, scale, memory.delta(stage));
  }
  // dq's, in place of the weights.
  REGARD_DEVICE void store_dscores(const float (&key_factors)[2], int use) const {
    bar_sync(Role::number, 128);
    const float scale = hi_lo_scale(largest_dscore<kConfig>(memory, use, Role::own_key)).scale;
    const float scales[2] = {key_factors[0] * scale, key_factors[1] * scale};
    const SharedAddress to = memory.dscores(use & 1);
#pragma unroll
    for (int k = 0; k < kRows / 16; ++k) {
      uint32 high[4], low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int n = 2 * k + i / 2, half = i % 2;
        const HiLo both =
            split_hi_lo(x[n][half * 2] * scales[half], x[n][half * 2 + 1] * scales[half]);
        high[i] = both.hi;
        low[i] = both.lo;
      }
      stmatrix(to + (this->fragment ^ k << 5), high);
      stmatrix(to + panel_bytes(kKeys) + (this->fragment ^ k << 5), low);
    }
  }
  // After the next products have begun: the fence takes a while where copies are under way.
  REGARD_DEVICE void hand_over_dscores(int use) const {
    fence_proxy_async();
    sync_warp();
    if (Memory::kEachHasRead || lane_index() == 0) {
      mbarrier_arrive(memory.barrier(Memory::kDscoreFull, use & 1));
    }
  }
};

}  // namespace regard
