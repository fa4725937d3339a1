// dq of f32: three products of f16 parts for each product. Its sums are in units of the rows'
// factors of dO, which finish multiplies by.
#pragma once

#include "cuda/kernels/tile/hi_lo.cuh"
#include "cuda/kernels/tile/wgmma/backward/dq_sums.cuh"

namespace regard {

// The largest magnitude of dS^T over 64 keys of a tile, in units of dO and K. Each of their four
// warps left its own in shared memory.
template <KernelConfig kConfig>
REGARD_DEVICE float largest_dscore(const BackwardMemory<kConfig>& memory, int iteration,
                                   int first_key) {
  const Bits128 sizes = load_shared_128(memory.dscore_sizes(iteration & 1) + first_key / 16 * 4);
  return max_of(max_of(float_of(sizes.word[0]), float_of(sizes.word[1])),
                max_of(float_of(sizes.word[2]), float_of(sizes.word[3])));
}

template <KernelConfig kConfig>
struct F32Dq {
  using Dq = DqSums<kConfig>;
  using Memory = typename Dq::Memory;
  static constexpr int kRows = Dq::kRows, kKeys = Dq::kKeys;
  static constexpr bool kHalves = kKeys > kWarpgroupRows;  // each with a scale of dS^T

  Dq& dq;

  // What dS^T of each half of a tile's keys was divided by. The half with the smaller factor is
  // multiplied first: its sums are brought to the larger factor before the other half is added.
  struct Factors {
    int first_key = 0;
    float ratio = 1;  // of the smaller factor to the larger
    float larger;
  };
  REGARD_DEVICE Factors read_factors(int iteration) const {
    Factors x{.larger = hi_lo_scale(largest_dscore<kConfig>(dq.memory, iteration, 0)).factor};
    if constexpr (kHalves) {
      const float other =
          hi_lo_scale(largest_dscore<kConfig>(dq.memory, iteration, kWarpgroupRows)).factor;
      x.first_key = uniform(other < x.larger ? kWarpgroupRows : 0);
      const float least = other < x.larger ? other : x.larger;
      x.larger = max_of(other, x.larger);
      x.ratio = x.larger == 0 ? 0.0f : least / x.larger;
    }
    return x;
  }

  template <int kCount>
  REGARD_DEVICE void multiply(Accumulator (&sums)[kCount], int buffer, int first_block,
                              int first_key, bool adds) const {
    dq.template multiply<kWarpgroupRows>(sums, buffer, 0, first_block, first_key, adds);
    wgmma_wait<0>();
    fence_operand(sums);
  }
  template <int kCount>
  static REGARD_DEVICE void scale(Accumulator (&sums)[kCount], float factor) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[n][e] *= factor;
    }
  }

  // A row whose dS is far below that of other rows of its tile loses bits. finish compares it
  // with the sum of these factors, and flags it.
  REGARD_DEVICE void note_losses(const BackwardTask& task, const RowTile& tile,
                                 float factor) const {
    const Problem& p = dq.params.problem;
    if (lane_index() >= 16) return;
    const int row = warp_index() * 16 + lane_index();
    red_add(dq_losses(dq.params) + tile.head * hi_lo_term_rows(p) + first_hi_lo_query(p, task) +
                tile.index * kRows + row,
            factor);
  }

  template <int kCount>
  REGARD_DEVICE void make_part(const BackwardTask& task, const RowTile& tile, int iteration,
                               int part, const Factors& factors) const {
    const int first_block = part * Dq::kAtOnce;
    Accumulator sums[kCount];
    multiply(sums, iteration & 1, first_block, factors.first_key, false);
    if constexpr (kHalves) {
      scale(sums, factors.ratio);
      fence_operand(sums);
      multiply(sums, iteration & 1, first_block, kWarpgroupRows - factors.first_key, true);
    }
    if (part == Dq::kLastPart) dq.free_dscores(iteration);
    if (kConfig.ordered_dq && part == 0) dq.semaphore.acquire(task, tile);
    if (part == 0) note_losses(task, tile, factors.larger);
    scale(sums, factors.larger);
    dq.add_to_memory(sums, task, tile, first_block);
  }
  REGARD_DEVICE void make_dq(const BackwardTask& task, const RowTile& tile, int iteration) const {
    const Factors factors = read_factors(iteration);
    sync_warp();  // every lane has read the sizes
#pragma unroll 1
    for (int part = 0; part < Dq::kWhole; ++part) {
      make_part<Dq::kAtOnce>(task, tile, iteration, part, factors);
    }
    if constexpr (Dq::kRest > 0) make_part<Dq::kRest>(task, tile, iteration, Dq::kWhole, factors);
  }
};

}  // namespace regard
