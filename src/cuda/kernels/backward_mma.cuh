// Backward attention of a tile of keys: dk and dv, and its part of dq and dbias.
//
// A block keeps its K and V in shared memory and loops over the query rows that see them, of every
// query head that shares them. Scores are transposed, S^T[keys, rows] = K Q^T, so that P^T and dS^T
// are operands of dv += P^T dO and dk += dS^T Q without leaving the registers. Only dS^T goes
// through shared memory, once, for dq = dS K, which is added to f32 sums in memory, or stored where
// the block has all keys (whole_keys). Warps own 16 kN keys each. With slices > 1, that many warps
// share keys: each computes its part of the rows of S^T, passes P^T on as well, and has a slice of
// the columns of dk and dv.
#pragma once

#include "cuda/kernels/tile/mma/backward_bias.cuh"
#include "cuda/kernels/tile/mma/backward_dq.cuh"
#include "cuda/kernels/tile/mma/backward_scores.cuh"
#include "cuda/kernels/tile/mma/backward_tile.cuh"
#include "cuda/kernels/tile/mma/gradients_again.cuh"

namespace regard {

template <KernelConfig kConfig>
struct BackwardMma {
  using Tile = BackwardTileMma<kConfig>;
  using Scores = typename Tile::Scores;
  using Step = typename Tile::Step;
  using F = FragmentsOf<kConfig>;
  using Again = AgainFlags<kConfig>;
  static constexpr Features kOn = kConfig.features;
  static constexpr bool kFlags = kConfig.flags_nonfinite || kConfig.repeats_rows;
  static constexpr int kN = Tile::kN, kSlices = Tile::kSlices;
  static constexpr int kKeyBlocks = kConfig.dim / kSlices / 8;  // of a warp's columns of dk
  static constexpr int kValueBlocks = kConfig.dim_v / kSlices / 8;
  static constexpr bool kAhead = kConfig.tiling.stages > 1;
  static constexpr bool kWantsBias = kConfig.dbias.how != BiasGradient::none;
  static constexpr bool kWantsScores = kConfig.wanted.dq || kConfig.wanted.dk || kWantsBias;
  static_assert(kKeyBlocks % 2 == 0 && kValueBlocks % 2 == 0);

  const Tile at;
  const BackwardScores<kConfig> elementwise{at};
  const BackwardDq<kConfig> dq{at};
  BackwardBias<kConfig> dbias{at};
  Accumulator dk[kN][kConfig.wanted.dk ? kKeyBlocks : 1];
  Accumulator dv[kN][kConfig.wanted.dv ? kValueBlocks : 1];

  // ------------------------------------------------------------------------------------- products

  // x = A B^T; A is the warp's keys of `keys`, B its part of the rows of `rows`.
  template <int kColumns>
  REGARD_DEVICE void multiply_scores(Scores& x, const TileView& keys, const TileView& rows) const {
    multiply_transposed<F, kColumns / F::kStep>(
        x, rows, at.warp_score_row(), [&](typename F::A& a, int m, int k) {
          F::load_a(a, keys, at.warp_key() + m * 16, k * F::kStep);
        });
  }

  // sums += X^T rows, over all rows of the tile: X^T from registers, or from shared memory, where
  // all slices of it lie together.
  template <int kBlocks>
  REGARD_DEVICE void multiply_rows(Accumulator (&sums)[kN][kBlocks], const Scores& x,
                                   const TileView& exchanged, const TileView& rows) const {
    add_product<F, Tile::kRows / F::kStep>(
        sums, rows, at.warp_slice() * kBlocks * 8, [&](typename F::A& a, int m, int k) {
          if constexpr (kSlices == 1) {
            F::from_accumulators(a, x[m], k);
          } else {
            F::load_a_in_order(a, exchanged, at.warp_key() + m * 16, k * F::kStep);
          }
        });
  }

  REGARD_DEVICE void exchange(const TileView& tile, const Scores& x) const {
#pragma unroll
    for (int m = 0; m < kN; ++m) {
#pragma unroll
      for (int n = 0; n < Tile::kScoreBlocks; ++n) {
        F::store(tile, at.warp_key() + m * 16, at.warp_score_row() + n * 8, x[m][n]);
      }
    }
  }

  // dv += P^T dO, or P^T on its way there.
  REGARD_DEVICE void use_weights(const Scores& weights, int stage) {
    if constexpr (kOn.dropout) {
      Scores kept;
      elementwise.keep_weights(kept, weights);
      use_kept(kept, stage);
    } else {
      use_kept(weights, stage);
    }
  }
  REGARD_DEVICE void use_kept(const Scores& weights, int stage) {
    if constexpr (kSlices > 1) {
      exchange(at.weight_tile(), weights);
    } else {
      multiply_rows(dv, weights, at.weight_tile(), at.dout_tile(stage));
    }
  }

  // ------------------------------------------------------------------------------ a tile of rows

  // From Q and dO in shared memory to dk, dv, dq and dbias. Calls after_scores() behind the first
  // product, and after_rows() once Q and dO are no longer needed.
  template <class AfterScores, class AfterRows>
  REGARD_DEVICE void work(int stage, const Step& step, AfterScores after_scores,
                          AfterRows after_rows) {
    Scores weights, slopes;
    typename BackwardScores<kConfig>::SeenRows seen;
    elementwise.read_seen(seen, step);
    multiply_scores<kConfig.dim>(weights, at.key_tile(), at.query_tile(stage));
    after_scores();
    elementwise.make_weights(weights, slopes, seen, stage, step);
    if constexpr (kConfig.wanted.dv) use_weights(weights, stage);
    Scores ds;
    if constexpr (kWantsScores) {
      multiply_scores<kConfig.dim_v>(ds, at.value_tile(), at.dout_tile(stage));
      elementwise.make_dlogits(ds, weights, stage, step);
      if constexpr (kWantsBias) dbias.add(ds, step);
      if constexpr (has_slope(kOn)) elementwise.apply_slopes(ds, slopes);
      exchange(at.dscore_tile(), ds);
    }
    if constexpr (kConfig.wanted.dk && kSlices == 1) {
      multiply_rows(dk, ds, at.dscore_tile(), at.query_tile(stage));
    }
    if constexpr (kWantsScores || kSlices > 1) sync_block();
    if constexpr (kConfig.wanted.dv && kSlices > 1) {
      multiply_rows(dv, weights, at.weight_tile(), at.dout_tile(stage));
    }
    if constexpr (kConfig.wanted.dk && kSlices > 1) {
      multiply_rows(dk, ds, at.dscore_tile(), at.query_tile(stage));
    }
    after_rows();
    if constexpr (kConfig.wanted.dq) dq.add(step);
  }

  // Two stages issue the copies of the next rows behind a tile's first product, because no product
  // runs while a warp makes addresses, or in front of it if they come through registers (not
  // aligned); one stage issues them before dq is computed.
  REGARD_DEVICE void loop_over_tiles(const ShortInterval& tiles) {
    const Step end = at.end_step(tiles);
    Step step = at.first_step(tiles);
    at.load_rows(0, step);
    cp_async_commit();
    int stage = 0;
    while (at.exists(step, end)) {
      const Step next = at.after(step, tiles);
      cp_async_wait<0>();
      sync_block();
      const auto load_next = [&] {
        if (at.exists(next, end)) at.load_rows(kAhead ? stage ^ 1 : 0, next);
        cp_async_commit();
      };
      if constexpr (kAhead && !kConfig.aligned) load_next();
      const auto after_scores = [&] {
        if constexpr (kAhead && kConfig.aligned) load_next();
      };
      const auto after_rows = [&] {
        if constexpr (kAhead) return;
        sync_block();
        load_next();
      };
      work(stage, step, after_scores, after_rows);
      if (kAhead) stage ^= 1;
      if (next.head != step.head) dbias.end_head(step.head);
      step = next;
    }
  }

  // whole_keys with one stage: most blocks have one tile, for which less code takes less time.
  REGARD_DEVICE void take_tile_after_tile(const ShortInterval& tiles) {
    const Step end = at.end_step(tiles);
    for (Step step = at.first_step(tiles); at.exists(step, end); step = at.after(step, tiles)) {
      at.load_rows(0, step);
      cp_async_commit();
      cp_async_wait<0>();
      sync_block();
      work(
          0, step, [] {}, [] {});
      sync_block();
    }
  }

  // --------------------------------------------------------------------------------------- result

  // Scales a result, and flags keys where it is not finite.
  template <int kBlocks>
  REGARD_DEVICE void finish(Accumulator (&x)[kN][kBlocks], KeyGradient gradient,
                            float scale) const {
#pragma unroll
    for (int m = 0; m < kN; ++m) {
      bool finite[2] = {true, true};
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          x[m][n][e] *= scale;
          finite[e / 2] = finite[e / 2] && x[m][n][e] - x[m][n][e] == 0;
        }
      }
      if constexpr (kFlags) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int key = at.key_of(m, half);
          if (!finite[half] && key < at.key_count) flag(key, gradient);
        }
      }
    }
  }
  REGARD_DEVICE void flag(int key, KeyGradient gradient) const {
    if constexpr (kConfig.repeats_rows) {
      Again::set(Again::of_key(key, gradient));
    } else {
      flag_key(at.params, flag_of(key), gradient);
    }
  }
  REGARD_DEVICE int64 flag_of(int key) const {
    return at.kv * at.p.sizes.rows_k + flat_key(at.p, at.seq.whole(), at.b, at.first_key + key);
  }
  // With `accumulate`, a flagged result is not added here, but when it is computed again.
  REGARD_DEVICE bool is_written(int key, KeyGradient gradient) const {
    if (key >= at.key_count) return false;
    if constexpr (kConfig.repeats_rows) {
      return !at.p.accumulate || Again::of_key(key, gradient) == 0;
    }
    return !kConfig.flags_nonfinite || !at.p.accumulate ||
           key_flag(at.params.buffers, flag_of(key), gradient) == 0;
  }

  template <int kBlocks>
  REGARD_DEVICE void write(const Accumulator (&x)[kN][kBlocks], KeyGradient gradient,
                           const View& view, const TileView& tile, int columns) const {
    const int first_column = at.warp_slice() * kBlocks * 8;
#pragma unroll
    for (int m = 0; m < kN; ++m) {
      const int first = at.warp_key() + m * 16;
      const TileView stage{tile.begin + first * tile.row_bytes + first_column * F::kBytes,
                           tile.row_bytes};
      store_rows<kConfig.type>(
          x[m], view, columns - first_column, kConfig.split_q ? false : at.p.accumulate, stage,
          [&](int row) {
            return offset_of(view.strides, at.b, at.kv, at.seq.first_k,
                             at.first_key + first + row) +
                   first_column;
          },
          [&](int row) { return is_written(first + row, gradient); });
    }
  }

  // Where a gradient goes: split_q, to the block's partial sums.
  REGARD_DEVICE decltype(auto) view_of(const View& gradient, KeyGradient which) const {
    if constexpr (kConfig.split_q) {
      return partial_dkv(at.params, which);
    } else {
      return (gradient);
    }
  }

  REGARD_DEVICE void run() {
    clear(dk);
    clear(dv);
    dbias.clear();
    if constexpr (kConfig.repeats_rows) Again::clear();
    const ShortInterval tiles = at.row_tiles();
    if (at.has_steps(tiles)) {
      at.load_keys();
      if constexpr (kConfig.whole_keys && !kAhead) {
        take_tile_after_tile(tiles);
      } else {
        loop_over_tiles(tiles);
      }
    }
    if constexpr (kConfig.wanted.dk) finish(dk, KeyGradient::dk, float(at.p.score.scale));
    if constexpr (kConfig.wanted.dv)
      finish(dv, KeyGradient::dv, kOn.dropout ? float(keep_scale(at.p.dropout)) : 1.0f);
    cp_async_wait<0>();
    sync_block();  // results replace K and V; all threads see the flags
    if constexpr (kConfig.wanted.dk) {
      write(dk, KeyGradient::dk, view_of(at.p.dk, KeyGradient::dk), at.key_tile(),
            int(at.p.sizes.dim));
    }
    if constexpr (kConfig.wanted.dv) {
      write(dv, KeyGradient::dv, view_of(at.p.dv, KeyGradient::dv), at.value_tile(),
            int(at.p.sizes.dim_v));
    }
    if constexpr (kConfig.repeats_rows) {
      sync_block();  // the results have been written
      if (Again::any() != 0) compute_gradients_again<kConfig>(at.params, at.b, at.kv);
    }
  }
};

template <KernelConfig kConfig>
REGARD_DEVICE void backward_mma(const KernelParams& params) {
  using Tile = BackwardTileMma<kConfig>;
  BackwardMma<kConfig> block{Tile(params, block_coords(params, block_index()))};
  if (kConfig.whole_keys || block.at.key_count > 0) block.run();
}

}  // namespace regard
