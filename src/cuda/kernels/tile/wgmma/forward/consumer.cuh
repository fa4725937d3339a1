// A consumer warpgroup of the wgmma forward kernel: 64 query rows of every tile.
//
// Each step starts S = Q K^T of a block of keys and out += P V of the block before, waits for S,
// turns scores into weights P, and waits for out. Steps run on across tiles: the first step of a
// tile carries the last P V of the tile before. docs/kernels.md draws the pipeline.
//
// All steps share one loop body, with branches for masks and results but none around a product:
// docs/kernels.md, "No branch around a product", says why.
#pragma once

#include "cuda/kernels/tile/wgmma/dropout_bits.cuh"
#include "cuda/kernels/tile/wgmma/forward/consumer_warpgroup.cuh"
#include "cuda/kernels/tile/wgmma/forward/full_tile.cuh"
#include "cuda/kernels/tile/wgmma/forward/terms.cuh"

namespace regard {

template <KernelConfig kConfig>
struct ForwardConsumer : ConsumerWarpgroup<kConfig> {
  using Base = ConsumerWarpgroup<kConfig>;
  using Base::Base;
  using Base::has_weights, Base::iteration, Base::first_block, Base::kSlots, Base::release;
  using Base::kOn, Base::kRows, Base::kKeys, Base::kKeyBlocks;
  using Base::params, Base::memory, Base::warpgroup, Base::warpgroup_row, Base::warp_row;
  using Base::scores, Base::out, Base::weights, Base::keys, Base::values, Base::left;
  using typename Base::Coords, typename Base::Format, typename Base::Memory;
  using Softmax = WarpgroupSoftmax<kConfig>;
  using FullTile = FullTileWeights<kConfig>;
  // Blocks of eight keys that become weights before the wait for out; the others follow after it.
  static constexpr int kEarly = out_columns(kConfig) <= 64 ? kKeyBlocks : kKeyBlocks / 2;
  // A warpgroup skips the first key blocks of a tile if intervals hide them from all of its rows.
  static constexpr bool kSkips = kConfig.skips_blocks;
  static constexpr bool kReadsDropoutBits = has_dropout_warpgroup(kConfig);
  // Whether is_masked() is called before the products, because it takes more than a comparison.
  static constexpr bool kFindsMaskedEarly = kConfig.features.interval || kConfig.tile_map;
  static_assert(!(kSkips && (kConfig.bias.by_tma || kReadsDropoutBits)));  // one for every block

  // What a step leaves to the next one.
  struct State {
    bool adds_to_out = false;  // out holds sums of this tile
    bool no_max_yet = false;   // some row has no running max
    bool track_max = false;    // the running max follows the blocks to the end of the tile
    bool sum_large = false;    // some row sum has passed kLargeSum
    int value_rows = kKeys;    // of the V that P awaits: rows that belong to the sequence
    int skipped = 0;           // blocks of V to skip before that one
  };
  // A step's own.
  struct Step {
    const ForwardTile<kConfig>& tile;
    int slot;  // of Q
    KeyBlock block;
    bool is_first;              // block of the tile
    int skips = 0;              // blocks of K to skip before this one
    bool masked = false;        // intervals, the last key, or with a tile map mask and spans hide
                                // some pair
    bool full = false;          // FullTileWeights makes the weights
    float sums_before[2] = {};  // row sums without this block
    uint32 bits = 0;            // of the softcap's arguments
    typename FullTile::Bias bias;
  };

  const float exponent = logit_unit(kOn, score_params<float>(params.problem)) * float(kLog2E);
  State state;
  Softmax softmax{};
  ForwardTerms<kConfig> terms{params, memory, warpgroup, warp_row};
  DropoutBitsReader<Memory, 2> dropout_reader;
  DropoutOf<kConfig> dropout = dropout_of<kConfig>(params.problem);

  REGARD_DEVICE void run() {
#pragma unroll 1
    for (;; --left) {
      const bool is_first = left == 0;
      int skips = 0;
      if (is_first && !begin_tile(skips)) break;
      Step step{.tile = memory.tile(iteration),
                .slot = iteration % kSlots,
                .block = this->block(),
                .is_first = is_first,
                .skips = skips};
      if constexpr (kFindsMaskedEarly) step.masked = found_early(this->is_masked(step.block));
      if (is_first) terms.load(step.tile, step.block);
      issue(step);
      const Softmax last_softmax = softmax;  // of the tile before, if this block begins one
      begin_weights(step);
      await_out(step);
      uint32 dropout_bits[2];
      if constexpr (kReadsDropoutBits) dropout_reader.read(dropout_bits, memory);
      if (step.is_first) {
        if (has_weights) this->write_tile(iteration - 1, last_softmax);
        state.adds_to_out = false;
        has_weights = true;
      } else {
        softmax.rescale(out);
      }
      end_weights(step);
      check_sums(step);
      release_block(step);
      if constexpr (kOn.dropout && !kReadsDropoutBits) {
        terms.elementwise(step.tile).drop(scores, step.block.first_key, dropout);
      }
      if constexpr (kConfig.varlen)
        state.value_rows = uniform(step.tile.len_k) - step.block.first_key;
      pack_weights();
      if constexpr (kReadsDropoutBits) drop_weights(dropout_bits);
    }
    if (has_weights) finish();
  }

 private:
  // ------------------------------------------------------------------------------------- the steps

  // Takes the next tile; false where there is none.
  REGARD_DEVICE bool begin_tile(int& skips) {
    if (!this->next_tile()) return false;
    const ForwardTile<kConfig>& tile = memory.tile(iteration);
    if constexpr (kSkips) {
      skips = uniform(blocks_to_skip(tile));
      left -= skips;
    }
    if constexpr (kConfig.varlen) clear_foreign_queries(uniform(tile.row_count));
    if constexpr (has_head_terms(kOn)) state.track_max = terms.read_head_terms(tile);
    state.sum_large = false;
    return true;
  }

  // Starts S = Q K^T of the block and out += P V of the block before, and waits for S.
  REGARD_DEVICE void issue(const Step& step) {
    if constexpr (kSkips) {
      skip_values();  // first: the producer loads later keys behind them
      skip_keys(step.skips);
    }
    mbarrier_wait(memory.key_full(keys.stage), keys.parity);
    if (has_weights) await_values();
    wgmma_fence();
    this->multiply_keys(step.slot);
    multiply_values();
    this->advance(step.tile);
    wgmma_wait<1>();
    fence_operand(scores[0]);
  }

  // Weights of the first kEarly blocks of eight keys, during P V.
  REGARD_DEVICE void begin_weights(Step& step) {
    terms.await(step.tile, step.block.first_key);
    if constexpr (!kFindsMaskedEarly) step.masked = this->is_masked(step.block);
    step.full =
        FullTile::kExists && !(step.is_first || step.masked || state.no_max_yet || state.track_max);
    if (step.full) {
      begin_full_tile(step);
    } else {
      begin_partial_tile(step);
    }
    fence_operand(scores[0]);
  }
  REGARD_DEVICE void begin_full_tile(Step& step) {
    if constexpr (FullTile::kExists) {
      FullTile::read_bias(step.bias, terms.coords(step.tile));
      if (FullTile::kReadsBiasAhead) release_terms(step);
      if (state.sum_large) {
        softmax.raise_to_sums();
      } else {
        softmax.keep_max();
      }
      save_sums(step);
      make_full_tile<0, kEarly>(step);
    }
  }
  REGARD_DEVICE void begin_partial_tile(Step& step) {
    constexpr float kNothing[2] = {};
    terms.make_logits(scores, step.tile, step.block, step.masked,
                      this->is_cut(step.block.first_key));
    release_terms(step);
    if (step.is_first) softmax.clear();
    // With a tile map any tile may be partial; a max that is there stays.
    const bool raises = step.is_first || (step.masked && !kConfig.tile_map) || state.no_max_yet;
    if (!Softmax::kPlain || raises) {
      softmax.raise(scores, exponent, kNothing, Softmax::kSlack);
      state.no_max_yet = softmax.lacks_max();
    } else {
      softmax.keep_max();
    }
    save_sums(step);
    softmax.template make_weights<0, kEarly>(scores, {exponent, exponent});
  }

  // Waits for P V of the block before, and gives its V back.
  REGARD_DEVICE void await_out(const Step& step) {
    // This phase is long over. The branch keeps the compiler from moving the wait for out up.
    mbarrier_wait(memory.key_full(keys.stage), keys.parity);
    wgmma_wait<0>();
    fence_operand(out);
    if (has_weights) this->release_values();
    if constexpr (kSkips) state.skipped = step.skips;
  }

  // The other weights.
  REGARD_DEVICE void end_weights(Step& step) {
    if (step.full) {
      if constexpr (FullTile::kExists) {
        make_full_tile<kEarly, kKeyBlocks>(step);
        if (!FullTile::kReadsBiasAhead) release_terms(step);
      }
    } else {
      softmax.template make_weights<kEarly, kKeyBlocks>(scores, {exponent, exponent});
    }
  }

  // Computes the block again if a row sum overflowed, or a score was too large for SmallTanh.
  REGARD_DEVICE void check_sums(Step& step) {
    if constexpr (Softmax::kPlain) {
      if (softmax.has_overflowed()) recompute(step);
    } else if constexpr (FullTile::kExists) {
      state.sum_large = softmax.has_large_sum();
      const bool fails = (step.full && FullTile::was_large(step.bits)) ||
                         (state.sum_large && !state.track_max && softmax.has_overflowed());
      if (fails) {
        recompute(step);
        state.track_max = true;
      }
      if (left == 1) state.track_max = false;
    }
  }
  REGARD_DEVICE void recompute(const Step& step) {
    float least[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      softmax.rows[half].sum = step.sums_before[half];
      least[half] = log2_of(Softmax::max_over_lanes(step.sums_before[half]));
    }
    multiply_keys_again(step.slot);
    terms.make_logits_again(scores, step.tile, step.block, next_of(step), step.masked,
                            this->is_cut(step.block.first_key), left > 1);
    softmax.raise(scores, exponent, least, 0);
    softmax.template make_weights<0, kKeyBlocks>(scores, {exponent, exponent});
    softmax.rescale(out);
  }

  // The tile's next block.
  REGARD_DEVICE KeyBlock next_of(const Step& step) const {
    if constexpr (kConfig.tile_map) return this->block();
    return {step.block.first_key - kKeys, true};
  }
  // Gives K back, and Q after the tile's last block.
  REGARD_DEVICE void release_block(const Step& step) {
    release(memory.key_empty(keys.stage));
    if (left == 1) {
      sync_warp();  // all lanes have read the tile before
      release(memory.query_empty(step.slot));
    }
    keys.advance();
  }

  // P V of the last block, and the last tile's results.
  REGARD_DEVICE void finish() {
    if constexpr (kSkips) skip_values();
    await_values();
    wgmma_fence();
    multiply_values();
    wgmma_wait<0>();
    fence_operand(out);
    this->write_last_tile(softmax);
  }
  REGARD_DEVICE void multiply_values() {
    Base::multiply_values(out, state.adds_to_out);
    state.adds_to_out = true;
  }
  // S of this warp's rows once more, by mma.sync from the same tiles.
  REGARD_DEVICE void multiply_keys_again(int slot) {
    const int lane = lane_index();
    const SharedAddress q = memory.queries(slot), k = memory.keys(keys.stage);
    clear(scores);
#pragma unroll 1
    for (int step = 0; step < kConfig.dim / 16; ++step) {
      uint32 a[4];
      const int a_piece = step * 2 + lane / 16;
      ldmatrix(a, q + a_piece / 8 * panel_bytes(kRows) +
                      swizzled_offset(warp_row + lane % 16, a_piece % 8));
      const int b_piece = step * 2 + lane / 8 % 2;
      const SharedAddress panel = k + b_piece / 8 * panel_bytes(kKeys);
#pragma unroll
      for (int n = 0; n < kKeyBlocks; n += 2) {
        uint32 b[4];
        ldmatrix(b, panel + swizzled_offset(n * 8 + lane / 16 * 8 + lane % 8, b_piece % 8));
        mma_m16n8k16<Format>(scores[0][n], a, b[0], b[1]);
        mma_m16n8k16<Format>(scores[0][n + 1], a, b[2], b[3]);
      }
    }
  }

  // --------------------------------------------------------------------------------------- weights

  template <int kFrom, int kTo>
  REGARD_DEVICE void make_full_tile(Step& step) {
    const float max[2] = {softmax.rows[0].max, softmax.rows[1].max};
    const FullTile full{terms.elementwise(step.tile), step.block.first_key,
                        FullTile::unit_of(params.problem), max};
    full.template make<kFrom, kTo>(scores, softmax.rows, step.bias, step.bits);
  }
  REGARD_DEVICE void save_sums(Step& step) const {
    step.sums_before[0] = softmax.rows[0].sum;
    step.sums_before[1] = softmax.rows[1].sum;
  }
  REGARD_DEVICE void release_terms(const Step& step) {
    terms.release(step.tile, next_of(step), left > 1);
  }
  REGARD_DEVICE void pack_weights() {
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      const Accumulator &low = scores[0][2 * k], &high = scores[0][2 * k + 1];
      weights[0][k][0] = pack<Format>(low[0], low[1]);
      weights[0][k][1] = pack<Format>(low[2], low[3]);
      weights[0][k][2] = pack<Format>(high[0], high[1]);
      weights[0][k][3] = pack<Format>(high[2], high[3]);
    }
  }
  REGARD_DEVICE void drop_weights(const uint32 (&bits)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      each_dropout_pair<kKeyBlocks>(bits[half], [&](int n, uint32 dropped) {
        weights[0][n / 2][n % 2 * 2 + half] &= ~dropped;
      });
    }
  }

  // -------------------------------------------------------------------------------- stages of K, V

  REGARD_DEVICE void await_values() const {
    mbarrier_wait(memory.value_full(values.stage), values.parity);
    if constexpr (kConfig.varlen) clear_foreign_values();
  }
  REGARD_DEVICE void clear_foreign_queries(int row_count) const {
    if (row_count >= warpgroup_row + kWarpgroupRows) return;
    clear_rows(memory.queries(iteration % kSlots), panels_of(kConfig.dim), kRows,
               larger(row_count, warpgroup_row), warpgroup_row + kWarpgroupRows,
               thread_index() % 128, 128, NamedBarrier::queries_cleared + warpgroup);
  }
  REGARD_DEVICE void clear_foreign_values() const {
    if (state.value_rows >= kKeys) return;
    clear_rows(memory.values(values.stage), panels_of(out_columns(kConfig)), kKeys,
               larger(state.value_rows, 0), kKeys, thread_index() - 128,
               Memory::kConsumerWarps * 32, NamedBarrier::values_cleared);
  }

  // The tile's first blocks, which intervals hide from all rows of the warpgroup: under a causal
  // mask other warpgroups have the last rows. Always leaves one block; at most kStages - 1, because
  // a skipped block's V is released a step after its K.
  REGARD_DEVICE int blocks_to_skip(const ForwardTile<kConfig>& tile) const {
    const int last = terms.coords(tile).last_key_end(warpgroup_row);
    const int seen = larger((last + kKeys - 1) / kKeys - first_block, 1);
    return clamp_to(left - seen, 0, Memory::kStages - 1);
  }
  REGARD_DEVICE void skip_keys(int blocks) {
#pragma unroll 1
    for (int i = 0; i < blocks; ++i) {
      mbarrier_wait(memory.key_full(keys.stage), keys.parity);
      sync_warp();
      release(memory.key_empty(keys.stage));
      keys.advance();
    }
  }
  REGARD_DEVICE void skip_values() {
#pragma unroll 1
    for (; state.skipped > 0; --state.skipped) {
      mbarrier_wait(memory.value_full(values.stage), values.parity);
      sync_warp();
      this->release_values();
    }
  }
};

}  // namespace regard
