// A block's part of dq: dq += dS K, added to f32 sums in memory. whole_keys: dq itself.
#pragma once

#include "cuda/kernels/tile/dq_order.cuh"
#include "cuda/kernels/tile/dq_turn.cuh"
#include "cuda/kernels/tile/mma/backward_tile.cuh"
#include "cuda/kernels/tile/mma/gradients_again.cuh"

namespace regard {

// How warps share a tile of dq (DqShares). Pairs of column blocks are dealt round robin, of which
// the last round may not reach every warp; or side by side, where the block writes dq itself.
template <KernelConfig kConfig>
struct DqWarps {
  static constexpr DqShares kShares = dq_shares(kConfig);
  static constexpr int kUnits = kShares.units, kPairs = kShares.pairs;
  static constexpr int kAllPairs = kConfig.dim / 16;
  static constexpr int kColumnWarps = kConfig.tiling.warps / kShares.unit_warps;

  static REGARD_DEVICE int first_unit() { return warp_index() % kShares.unit_warps * kUnits; }
  static REGARD_DEVICE int pair(int round) {
    const int warp = warp_index() / kShares.unit_warps;
    return (kConfig.whole_keys ? warp * kPairs : warp) + pair_after_first(round);
  }
  static constexpr REGARD_DEVICE int pair_after_first(int round) {
    return kConfig.whole_keys ? round : round * kColumnWarps;
  }
  static REGARD_DEVICE bool has(int round) {
    const int reached = kConfig.whole_keys ? kPairs : round + 1;
    return reached * kColumnWarps <= kAllPairs || pair(round) < kAllPairs;
  }
};

template <KernelConfig kConfig>
struct BackwardDq {
  using Tile = BackwardTileMma<kConfig>;
  using Step = typename Tile::Step;
  using F = FragmentsOf<kConfig>;
  using Again = AgainFlags<kConfig>;
  using Warps = DqWarps<kConfig>;
  // Pairs with sums in a warp's registers at once.
  static constexpr int kUnits = Warps::kUnits;
  static constexpr int kAtOnce = dq_pairs_at_once(Warps::kShares);

  using Sums = Accumulator[kUnits][kAtOnce * 2];

  const Tile at;

  REGARD_DEVICE void add(const Step& step) const {
    if constexpr (kConfig.whole_keys) return store(step);
    if constexpr (kConfig.ordered_dq) acquire(step);
    float* const to = first_sum(step);
#pragma unroll
    for (int round = 0; round < Warps::kPairs; round += kAtOnce) {
      Sums sums;
      multiply(sums, round);
      add_to_memory(to, sums, round, step);
    }
    if constexpr (kConfig.ordered_dq) release(step);
  }

  // Through the warp's own shared memory.
  REGARD_DEVICE void store(const Step& step) const {
    static_assert(!kConfig.whole_keys || makes_dq_at_once(kConfig));
    constexpr int kBytes = dq_stage_row_bytes(kConfig);
    const TileView stage{at.shared + Tile::kLayout.dq + warp_index() * 16 * kBytes, kBytes};
    Sums sums;
    multiply(sums, 0);
    if constexpr (kConfig.repeats_rows) flag_rows(sums, step);
    sync_block();  // all have read dS, which the stage replaces, and know the flags
    const int column = Warps::pair(0) * 16;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int first = step.first_row() + (Warps::first_unit() + u) * 16;
      scale(sums[u]);
      store_rows<kConfig.type>(
          sums[u], at.p.dq, int(at.p.sizes.dim) - column, at.p.accumulate, stage,
          [&](int row) {
            return offset_of(at.p.dq.strides, at.b, step.head, at.seq.first_q, first + row) +
                   column;
          },
          [&](int row) { return is_written(step.head, first + row); });
    }
  }
  REGARD_DEVICE void scale(Accumulator (&x)[kAtOnce * 2]) const {
    const float scale = float(at.p.score.scale);
    const bool any = at.key_count > 0;
#pragma unroll
    for (int n = 0; n < kAtOnce * 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[n][e] = any ? x[n][e] * scale : 0;
    }
  }
  // Flags rows that are not finite. With `accumulate` they are not added here, but when they are
  // computed again.
  REGARD_DEVICE void flag_rows(const Sums& sums, const Step& step) const {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float zero = 0;  // or NaN
#pragma unroll
        for (int c = 0; c < kAtOnce * 2; ++c) zero += zero_if_finite(sums[u][c], half);
        const int unit = step.first_row() + (Warps::first_unit() + u) * 16;
        const int row = unit + half * 8 + lane_index() / 4;
        if (zero != 0 && row < at.seq.len_q)
          Again::set(Again::of_row(row_in_block(step.head, row)));
      }
    }
  }
  // 0 if the lane's two columns of the row are finite, else NaN.
  static REGARD_DEVICE float zero_if_finite(const Accumulator& x, int half) {
    const float a = x[half * 2], b = x[half * 2 + 1];
    return (a - a) + (b - b);
  }
  REGARD_DEVICE int row_in_block(int head, int row) const {
    return (head - at.kv * at.group) * at.seq.len_q + row;
  }
  REGARD_DEVICE bool is_written(int head, int row) const {
    if (row >= at.seq.len_q) return false;
    if constexpr (!kConfig.repeats_rows) return true;
    return !at.p.accumulate || Again::of_row(row_in_block(head, row)) == 0;
  }

  REGARD_DEVICE void multiply(Sums& sums, int round) const {
    clear(sums);
#pragma unroll
    for (int k = 0; k < Tile::kKeys / F::kStep; ++k) {
      typename F::A ds[kUnits];
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        F::load_a_transposed(ds[u], at.dscore_tile(), (Warps::first_unit() + u) * 16, k * F::kStep);
      }
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c) {
        if (!Warps::has(round + c)) continue;
        typename F::B keys[2];
        F::load_b_transposed(keys, at.key_tile(), Warps::pair(round + c) * 16, k * F::kStep);
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
          F::multiply(sums[u][c * 2], ds[u], keys[0]);
          F::multiply(sums[u][c * 2 + 1], ds[u], keys[1]);
        }
      }
    }
  }

  // Where a lane adds its first element of the tile; others follow at constant distances.
  REGARD_DEVICE float* first_sum(const Step& step) const {
    const int64 first = first_dq_row(at.p, at.seq.whole(), at.b) + step.first_row();
    return at.params.buffers.dq_sums + step.head * dq_rows(at.p) * kConfig.dim +
           dq_offset(kConfig, first / 16 + Warps::first_unit(), Warps::pair(0) * 2, lane_index(),
                     0);
  }
  REGARD_DEVICE void add_to_memory(float* to, const Sums& sums, int round, const Step& step) const {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (step.first_row() + (Warps::first_unit() + u) * 16 >= at.seq.len_q) continue;
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c) {
        if (!Warps::has(round + c)) continue;
        const int column_block = Warps::pair_after_first(round + c) * 2;
        add_block(to + dq_offset(kConfig, u, column_block, 0, 0), sums[u][c * 2]);
        add_block(to + dq_offset(kConfig, u, column_block + 1, 0, 0), sums[u][c * 2 + 1]);
      }
    }
  }
  static REGARD_DEVICE void add_block(float* to, const Accumulator& x) {
    if constexpr (kConfig.level >= 90) {
      red_add_4(to, x);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) red_add(to + dq_offset(kConfig, 0, 0, 0, e), x[e]);
    }
  }

  // Deterministic: the key tiles that see these rows, which are contiguous, add in order. Blocks of
  // earlier tiles started earlier, so that waiting for them ends.
  REGARD_DEVICE int32* semaphore_of(const Step& step) const {
    const int64 tiles = divide_up(at.p.sizes.len_q, Tile::kRows);
    return at.params.buffers.dq_semaphores + (at.b * at.p.sizes.heads_q + step.head) * tiles +
           step.tile;
  }
  // How many key tiles add to these rows before this block's.
  REGARD_DEVICE int key_tiles_before(const Step& step) const {
    if constexpr (kCountsTurns<kConfig>) {
      const int64 row =
          kConfig.tile_map ? map_row(at.p, kConfig, at.b, step.head, at.seq.first_k, 0) : 0;
      return visiting_key_tiles<kConfig, 1>(at.params, at.seq, at.b, row, step.tile, 0,
                                            at.key_tile_index);
    }
    const Interval keys = keys_of_row<kConfig>(at.p, at.seq, at.b, step.first_row());
    return at.key_tile_index - int(keys.begin) / Tile::kKeys;
  }
  // A warp counts.
  static constexpr int kCounting = kCountsTurns<kConfig> ? 32 : 1;
  REGARD_DEVICE void acquire(const Step& step) const {
    if (thread_index() < kCounting) {
      const int before = key_tiles_before(step);
      if (thread_index() == 0) wait_semaphore(semaphore_of(step), before);
    }
    sync_block();
  }
  REGARD_DEVICE void release(const Step& step) const {
    fence_device();
    sync_block();
    if (thread_index() < kCounting) {
      const int before = key_tiles_before(step);
      if (thread_index() == 0) release_semaphore(semaphore_of(step), before + 1);
    }
  }
};

}  // namespace regard
