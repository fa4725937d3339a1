// A block's part of dq: dq += dS K, added to f32 sums in memory. whole_keys: dq itself.
#pragma once

#include "cuda/kernels/tile/dq_order.cuh"
#include "cuda/kernels/tile/dq_turn.cuh"
#include "cuda/kernels/tile/mma/backward_tile.cuh"

namespace regard {

// How warps share a tile of dq, which has units of 16 rows and pairs of column blocks. Each warp
// has kUnits x kPairs of them, as square as possible, so that operands are read least often.
template <int kAllUnits, int kAllPairs, int kWarps>
struct DqWarps {
  static constexpr int reads(int unit_warps) {
    const int column_warps = kWarps / unit_warps;
    return kAllUnits / unit_warps + (kAllPairs + column_warps - 1) / column_warps;
  }
  static constexpr int best() {
    int chosen = 1;
    for (int n = 2; n <= kAllUnits && n <= kWarps; ++n) {
      const bool fits = kAllUnits % n == 0 && kWarps % n == 0;
      if (fits && reads(n) <= reads(chosen)) chosen = n;
    }
    return chosen;
  }
  static constexpr int kUnitWarps = best();
  static constexpr int kColumnWarps = kWarps / kUnitWarps;
  static constexpr int kUnits = kAllUnits / kUnitWarps;
  static constexpr int kPairs = (kAllPairs + kColumnWarps - 1) / kColumnWarps;

  static REGARD_DEVICE int first_unit() { return warp_index() % kUnitWarps * kUnits; }

  // Pairs are dealt round robin; the last round may not reach every warp.
  static REGARD_DEVICE int pair(int round) {
    return round * kColumnWarps + warp_index() / kUnitWarps;
  }
  static REGARD_DEVICE bool has(int round) {
    return (round + 1) * kColumnWarps <= kAllPairs || pair(round) < kAllPairs;
  }
};

template <KernelConfig kConfig>
struct BackwardDq {
  using Tile = BackwardTileMma<kConfig>;
  using Step = typename Tile::Step;
  using F = FragmentsOf<kConfig>;
  using Warps = DqWarps<Tile::kRows / 16, kConfig.dim / 16, kConfig.tiling.warps>;
  // Pairs with sums in a warp's registers at once.
  static constexpr int kUnits = Warps::kUnits;
  static constexpr int kAtOnce = Warps::kPairs * kUnits <= 8 ? Warps::kPairs : 8 / kUnits;

  using Sums = Accumulator[kUnits][kAtOnce * 2];

  const Tile at;

  REGARD_DEVICE void add(const Step& step) const {
    if constexpr (kConfig.whole_keys) return store(step);
    if constexpr (kConfig.ordered_dq) acquire(step);
    float* const to = at.params.buffers.dq_sums + step.head * dq_rows(at.p) * kConfig.dim;
#pragma unroll
    for (int round = 0; round < Warps::kPairs; round += kAtOnce) {
      Sums sums;
      multiply(sums, round);
      add_to_memory(to, sums, round, step);
    }
    if constexpr (kConfig.ordered_dq) release(step);
  }

  REGARD_DEVICE void store(const Step& step) const {
    const bool aligned = is_aligned(at.p.dq);
#pragma unroll
    for (int round = 0; round < Warps::kPairs; round += kAtOnce) {
      Sums sums;
      multiply(sums, round);
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        const int row = step.first_row() + (Warps::first_unit() + u) * 16 + lane_index() / 4;
#pragma unroll
        for (int c = 0; c < kAtOnce; ++c) {
          if (!Warps::has(round + c)) continue;
          const int column = Warps::pair(round + c) * 16 + lane_index() % 4 * 2;
          store_block(step.head, row, column, sums[u][c * 2], aligned);
          store_block(step.head, row, column + 8, sums[u][c * 2 + 1], aligned);
        }
      }
    }
  }
  // Two rows, eight apart, and two columns of each.
  REGARD_DEVICE void store_block(int head, int row, int column, const Accumulator& x,
                                 bool aligned) const {
    const View& dq = at.p.dq;
    const int64 count = at.p.sizes.dim - column;
    const float scale = float(at.p.score.scale);
    const bool any = at.key_count > 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + half * 8 >= at.seq.len_q || count <= 0) continue;
      const int64 to = offset_of(dq.strides, at.b, head, at.seq.first_q, row + half * 8) + column;
      float pair[2] = {any ? x[half * 2] * scale : 0, any ? x[half * 2 + 1] * scale : 0};
      with_type<kConfig.type>(dq.type, [&](auto type) {
        constexpr Type kTo = decltype(type)::kElement;
        if (at.p.accumulate) {
          float old[2];
          load_vector<kTo>(old, dq, to, count, aligned);
          pair[0] += old[0];
          pair[1] += old[1];
        }
        store_vector<kTo>(dq, to, count, aligned, pair);
      });
    }
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

  REGARD_DEVICE void add_to_memory(float* to, const Sums& sums, int round, const Step& step) const {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int row = step.first_row() + (Warps::first_unit() + u) * 16;
      if (row >= at.seq.len_q) continue;
      const int64 unit = (first_dq_row(at.p, at.seq.whole(), at.b) + row) / 16;
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c) {
        if (!Warps::has(round + c)) continue;
        const int column_block = Warps::pair(round + c) * 2;
        add_block(to, unit, column_block, sums[u][c * 2]);
        add_block(to, unit, column_block + 1, sums[u][c * 2 + 1]);
      }
    }
  }
  static REGARD_DEVICE void add_block(float* to, int64 unit, int column_block,
                                      const Accumulator& x) {
    if constexpr (kConfig.level >= 90) {
      red_add_4(to + dq_offset(kConfig, unit, column_block, lane_index(), 0), x);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        red_add(to + dq_offset(kConfig, unit, column_block, lane_index(), e), x[e]);
      }
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
