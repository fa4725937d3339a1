// A consumer warpgroup of a wgmma forward block: 64 query rows of every tile that the producer
// takes.
//
// A step is always: S = Q K^T of a block of keys and out += P V of the block before, both under
// way; wait for S; softmax; wait for out. It goes on from tile to tile: the first step of a tile
// carries the last P V of the tile before, whose results leave beside the next products. There is
// one text of the step, with branches for masks and results, so that the compiler keeps the
// products asynchronous.
#pragma once

#include "cuda/kernels/tile/forward_scores.cuh"
#include "cuda/kernels/tile/wgmma/drops.cuh"
#include "cuda/kernels/tile/wgmma/steady_weights.cuh"
#include "cuda/kernels/tile/wgmma/warpgroup_bias.cuh"
#include "cuda/kernels/tile/wgmma/warpgroup_results.cuh"
#include "cuda/kernels/tile/wgmma/warpgroup_softmax.cuh"

namespace regard {

template <KernelConfig kConfig>
struct ForwardConsumer {
  using Memory = WarpgroupMemory<kConfig>;
  using Place = WarpgroupPlace<kConfig>;
  using Softmax = WarpgroupSoftmax<kConfig>;
  using Elementwise = ForwardScores<kConfig, Place>;
  using Steady = SteadyWeights<kConfig>;
  using Format = typename ElementOf<kConfig.type>::Format;
  static constexpr Features kOn = kConfig.features;
  static constexpr ForwardWgmmaLayout kLayout = Memory::kLayout;
  static constexpr int kRows = Memory::kRows, kKeys = Memory::kKeys, kSlots = Memory::kSlots;
  static constexpr int kKeyBlocks = Place::kKeyBlocks;
  static constexpr int kSteps = kConfig.dim / 16;  // of Q K^T
  static constexpr int kValueSteps = kKeys / 16;   // of P V
  static constexpr int kConsumerThreads = Memory::kConsumerWarps * 32;
  // Blocks of eight columns that become weights before the wait for out, the others after it.
  static constexpr int kEarly = kConfig.dim_v <= 64 ? kKeyBlocks : kKeyBlocks / 2;
  // Steady blocks have read their terms before they make weights.
  static constexpr bool kReadsEarly = Steady::kReadsAhead;
  // Blocks of keys that some warpgroups of a tile see and others do not.
  static constexpr bool kPasses = kConfig.skips_blocks;
  static_assert(!(kPasses && kConfig.bias.by_tma));  // whose TMA tiles come with every block
  static constexpr bool kReadsDrops = has_dropout_warpgroup(kConfig);
  static_assert(!(kPasses && kReadsDrops));
  static constexpr bool kStagesTerms = stages_bias(kConfig) || stages_mask(kConfig);

  const KernelParams& params;
  const ForwardMaps& maps;
  const Memory memory;
  const int warpgroup;  // among the consumers
  const int warpgroup_row = warpgroup * kWarpgroupRows;
  const int warp_row = warpgroup_row + uniform(warp_index() % 4) * 16;
  const float exponent = logit_unit(kOn, score_params<float>(params.problem)) * float(kLog2E);

  typename Place::Scores scores;
  typename Place::Out out;
  uint32 weights[kValueSteps][4];
  Softmax softmax;
  Ring<Memory::kStages> keys, values;
  ShortInterval common_keys;
  bool started = false;     // weights are there whose values are to come
  bool adds = false;        // out holds sums of this tile
  int values_left = kKeys;  // of the block whose values are to come
  int unseen = 0;           // blocks before that one whose values are nobody's in the warpgroup
  int bias_parity = 0;      // of the barrier's present phase
  DropReader<Memory, 2> drop_reader;

  // -------------------------------------------------------------------------------------- products

  REGARD_DEVICE void multiply_keys(int slot) {
    const uint32 a =
        descriptor_word(memory.queries(slot) + warpgroup * panel_bytes(kWarpgroupRows), 0);
    const uint32 b = descriptor_word(memory.keys(keys.stage), 0);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int column = k % 4 * 2;
      wgmma_ss_nt<Format>(scores[0],
                          matrix_descriptor(a + k / 4 * (panel_bytes(kRows) / 16) + column),
                          matrix_descriptor(b + k / 4 * (panel_bytes(kKeys) / 16) + column), k > 0);
    }
    wgmma_commit();
  }
  // The first product of all has no values yet: it multiplies keys that are there, by weights of 0,
  // and nobody reads its result. Leaving it out would be a branch around a product, for which the
  // compiler waits after every product.
  REGARD_DEVICE void multiply_values() {
    const uint32 b = started ? descriptor_word(memory.values(values.stage), panel_bytes(kKeys))
                             : descriptor_word(memory.keys(keys.stage), 0);
#pragma unroll
    for (int k = 0; k < kValueSteps; ++k) {
      wgmma_rs_nn<Format>(out, weights[k], matrix_descriptor(b + k * panel_bytes(16) / 16),
                          k > 0 || adds);
    }
    adds = true;
    wgmma_commit();
  }

  // The scores of this warp's rows once more, from the same tiles.
  REGARD_DEVICE void multiply_keys_again(int slot) {
    const int lane = lane_index();
    const SharedAddress q = memory.queries(slot), k = memory.keys(keys.stage);
    clear(scores);
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
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

  // ----------------------------------------------------------------------------- rows not its own

  REGARD_DEVICE void clear_foreign_queries(int slot, int row_count) const {
    if (row_count >= warpgroup_row + kWarpgroupRows) return;
    clear_rows(memory.queries(slot), panels_of(kConfig.dim), kRows,
               larger(row_count, warpgroup_row), warpgroup_row + kWarpgroupRows,
               thread_index() % 128, 128, NamedBarrier::queries_cleared + warpgroup);
  }
  REGARD_DEVICE void clear_foreign_values() const {
    if (values_left >= kKeys) return;
    clear_rows(memory.values(values.stage), panels_of(kConfig.dim_v), kKeys, larger(values_left, 0),
               kKeys, thread_index() - 128, kConsumerThreads, NamedBarrier::values_cleared);
  }

  // ---------------------------------------------------------------------------------- elementwise

  // From products to logits.
  REGARD_DEVICE void make_logits(const ForwardTask& task, int first_key, bool hides) {
    if constexpr (is_plain(kOn) && !kOn.mask) {
      if (!hides) return;
    }
    Elementwise terms{Place(params, task, warp_row)};
    terms.terms.head = head;
    if constexpr (WarpgroupBias<kConfig>::kOn) {
      WarpgroupBias<kConfig> bias(terms.at);
      if (bias.is_low()) {
        terms.apply_terms(scores, 0, first_key);
      } else {
        bias.add(scores, terms.terms, first_key);
      }
    } else if constexpr (!is_plain(kOn) || kOn.mask) {
      terms.apply_terms(scores, 0, first_key);
    }
    if (hides) terms.hide(scores, first_key);
  }

  // The same where the staged bias is another block's already.
  REGARD_DEVICE void make_logits_from_memory(const ForwardTask& task, int first_key, bool hides) {
    Elementwise terms{Place(params, task, warp_row)};
    terms.terms.head = head;
    WarpgroupBias<kConfig>::apply_from_memory(scores, terms.terms, terms.at, first_key);
    if (hides) terms.hide(scores, first_key);
  }

  // The same of a block with nothing to raise but the sums, and its weights.
  template <int kFrom, int kTo>
  REGARD_DEVICE void make_steady(const ForwardTask& task, int first_key,
                                 typename Steady::Bias& bias, uint32& bits) {
    Elementwise terms{Place(params, task, warp_row)};
    terms.terms.head = head;
    const float reference[2] = {softmax.rows[0].max, softmax.rows[1].max};
    const Steady weights{terms, first_key, Steady::unit_of(params.problem), reference};
    weights.template make<kFrom, kTo>(scores, softmax.rows, bias, bits);
  }
  REGARD_DEVICE void save_sums(float (&sums)[2]) const {
    sums[0] = softmax.rows[0].sum;
    sums[1] = softmax.rows[1].sum;
  }

  // The block again, where the sums ran away from the references, or scores were not small as a
  // steady block takes them to be. `before` are the sums without it; has_next: whether the next
  // block's terms are on their way to the place of its own.
  REGARD_DEVICE void return_to_block(const ForwardTask& task, int slot, int first_key, bool hides,
                                     bool has_next, const float (&before)[2]) {
    float least[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      softmax.rows[half].sum = before[half];
      least[half] = log2_of(Softmax::over_lanes_largest(before[half]));
    }
    multiply_keys_again(slot);
    if constexpr (kConfig.bias.by_tma) {
      make_logits_from_memory(task, first_key, hides);
    } else {
      if (has_next) await_terms(task, first_key - kKeys);
      load_terms(task, first_key);
      await_terms(task, first_key);
      make_logits(task, first_key, hides);
      if (has_next) load_terms(task, first_key - kKeys);
    }
    softmax.raise(scores, exponent, least, 0);
    softmax.template make_weights<0, kKeyBlocks>(scores, exponent);
    softmax.rescale(out);
  }

  REGARD_DEVICE void pack_weights() {
#pragma unroll
    for (int k = 0; k < kValueSteps; ++k) {
      const Accumulator &low = scores[0][2 * k], &high = scores[0][2 * k + 1];
      weights[k][0] = pack<Format>(low[0], low[1]);
      weights[k][1] = pack<Format>(low[2], low[3]);
      weights[k][2] = pack<Format>(high[0], high[1]);
      weights[k][3] = pack<Format>(high[2], high[3]);
    }
  }

  // Clears the weights that dropout drops; a word of each half's row.
  REGARD_DEVICE void drop_weights(const uint32 (&drops)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      each_dropped<kKeyBlocks>(drops[half], [&](int n, uint32 dropped) {
        weights[n / 2][n % 2 * 2 + half] &= ~dropped;
      });
    }
  }

  // Bias and mask of a block of keys, a step ahead: the block before has been read. Boxes of a bias
  // are the producer's.
  REGARD_DEVICE void load_terms(const ForwardTask& task, int first_key) const {
    if constexpr (kStagesTerms && !kConfig.bias.by_tma) {
      sync_warp();
      const Place at(params, task, warp_row);
      if (at.sends_bias(first_key)) {
        at.send_bias(first_key, bias_barrier());
        sync_warp();
      } else {
        at.load_terms(first_key);
      }
    }
  }
  REGARD_DEVICE void await_terms(const ForwardTask& task, int first_key) {
    if constexpr (kConfig.bias.by_tma) {
      mbarrier_wait(memory.barrier(Memory::kBiasFull, warpgroup), bias_parity);
      bias_parity ^= 1;
    } else if constexpr (kStagesTerms) {
      if (Place(params, task, warp_row).sends_bias(first_key)) {
        mbarrier_wait(bias_barrier(), bias_parity);
        bias_parity ^= 1;
      } else {
        cp_async_wait<0>();
        sync_warp();
      }
    }
  }
  // The block's have been read: those of the next may take their place.
  REGARD_DEVICE void pass_terms(const ForwardTask& task, int next_key, bool has_next) const {
    if constexpr (kConfig.bias.by_tma) {
      sync_warp();
      free(Memory::kBiasEmpty, warpgroup);
    } else if (has_next) {
      load_terms(task, next_key);
    }
  }
  REGARD_DEVICE SharedAddress bias_barrier() const {
    return memory.barrier(Memory::kBiasFull, warp_row / 16);
  }

  // -------------------------------------------------------------------------------------- the walk

  // How many of the tile's blocks no row of the warpgroup sees, of those that come first: under a
  // causal mask other warpgroups have the last rows. Not all, and no more than can be under way
  // together: their values are given back in the step after their keys.
  REGARD_DEVICE int unseen_blocks(const ForwardTask& task) const {
    const int last = Place(params, task, warp_row).last_key_end(warpgroup_row);
    const int seen = larger((last + kKeys - 1) / kKeys - task.first_block, 1);
    return clamp_to(task.blocks - seen, 0, Memory::kStages - 1);
  }
  REGARD_DEVICE void pass_keys(int blocks) {
#pragma unroll 1
    for (int i = 0; i < blocks; ++i) {
      mbarrier_wait(memory.barrier(Memory::kKeyFull, keys.stage), keys.parity);
      sync_warp();
      free(Memory::kKeyEmpty, keys.stage);
      keys.advance();
    }
  }
  REGARD_DEVICE void pass_values() {
#pragma unroll 1
    for (; unseen > 0; --unseen) {
      mbarrier_wait(memory.barrier(Memory::kValueFull, values.stage), values.parity);
      sync_warp();
      free(Memory::kValueEmpty, values.stage);
      values.advance();
    }
  }
  REGARD_DEVICE void await_values() const {
    mbarrier_wait(memory.barrier(Memory::kValueFull, values.stage), values.parity);
    if constexpr (kConfig.varlen) clear_foreign_values();
  }

  REGARD_DEVICE void free(int barriers, int index) const {
    if (lane_index() == 0) mbarrier_arrive(memory.barrier(barriers, index));
  }
  REGARD_DEVICE void write_results(int taken, const Softmax& of_tile) {
    WarpgroupResults<kConfig> results{params, maps, memory, memory.task(taken), warp_row, of_tile};
    results.write(out);
  }

  REGARD_DEVICE void run() {
    clear_weights();
    int taken = -1;  // tiles
    int first_block = 0;
    constexpr float kNothing[2] = {};
#pragma unroll 1
    for (int left = 0;; --left) {
      const bool fresh = left == 0;
      int unseen_here = 0;
      if (fresh) {
        ++taken;
        mbarrier_wait(memory.barrier(Memory::kQueryFull, taken % kSlots), taken / kSlots % 2);
        const ForwardTask& task = memory.task(taken);
        left = uniform(task.blocks);
        if (left == 0) break;
        first_block = uniform(task.first_block);
        if constexpr (kPasses) {
          unseen_here = uniform(unseen_blocks(task));
          left -= unseen_here;
        }
        const ShortInterval common = Place(params, task, warp_row).common_keys(warpgroup_row);
        common_keys = {uniform(common.begin), uniform(common.end)};
        if constexpr (kConfig.varlen) {
          clear_foreign_queries(taken % kSlots, uniform(task.row_count));
        }
        if constexpr (has_head_terms(kOn)) read_head_terms(task);
        swells = false;
      }
      const ForwardTask& task = memory.task(taken);
      const int slot = taken % kSlots;
      const int first_key = (first_block + left - 1) * kKeys;
      if (fresh) load_terms(task, first_key);
      if constexpr (kPasses) {
        pass_values();  // first: keys to come may wait for their room
        pass_keys(unseen_here);
      }
      mbarrier_wait(memory.barrier(Memory::kKeyFull, keys.stage), keys.parity);
      if (started) await_values();
      wgmma_fence();
      multiply_keys(slot);
      multiply_values();
      wgmma_wait<1>();
      fence_operand(scores[0]);

      const Softmax before_tile = softmax;
      await_terms(task, first_key);
      const bool hides = first_key < common_keys.begin || first_key + kKeys > common_keys.end;
      const bool steady = Steady::kExists && !(fresh || hides || unsettled || follows);
      typename Steady::Bias bias;
      float before[2];
      uint32 bits = 0;
      if (steady) {
        if constexpr (Steady::kExists) {
          Steady::read_bias(bias, Place(params, task, warp_row));
          if (kReadsEarly) pass_terms(task, first_key - kKeys, left > 1);
          if (swells) {
            softmax.raise_to_sums();
          } else {
            softmax.leave();
          }
          save_sums(before);
          make_steady<0, kEarly>(task, first_key, bias, bits);
        }
      } else {
        make_logits(task, first_key, hides);
        pass_terms(task, first_key - kKeys, left > 1);
        if (fresh) softmax.clear();
        if (!Softmax::kBare || fresh || hides || unsettled) {
          softmax.raise(scores, exponent, kNothing, Softmax::kSlack);
          unsettled = softmax.lacks_reference();
        } else {
          softmax.leave();
        }
        save_sums(before);
        softmax.template make_weights<0, kEarly>(scores, exponent);
      }
      fence_operand(scores[0]);
      // Long over: a branch, across which the compiler does not move the wait for out.
      mbarrier_wait(memory.barrier(Memory::kKeyFull, keys.stage), keys.parity);
      wgmma_wait<0>();
      fence_operand(out);
      if (started) {
        free(Memory::kValueEmpty, values.stage);
        values.advance();
      }
      if constexpr (kPasses) unseen = unseen_here;
      uint32 drops[2];
      if constexpr (kReadsDrops) drop_reader.read(drops, memory);
      if (fresh) {
        if (started) write_results(taken - 1, before_tile);
        adds = false;
        started = true;
      } else {
        softmax.rescale(out);
      }
      if (steady) {
        if constexpr (Steady::kExists) {
          make_steady<kEarly, kKeyBlocks>(task, first_key, bias, bits);
          if (!kReadsEarly) pass_terms(task, first_key - kKeys, left > 1);
        }
      } else {
        softmax.template make_weights<kEarly, kKeyBlocks>(scores, exponent);
      }
      if constexpr (Softmax::kBare) {
        if (softmax.ran_away()) return_to_block(task, slot, first_key, hides, left > 1, before);
      } else if constexpr (Steady::kExists) {
        swells = softmax.swells();
        const bool lost =
            (steady && Steady::was_large(bits)) || (swells && !follows && softmax.ran_away());
        if (lost) {
          return_to_block(task, slot, first_key, hides, left > 1, before);
          follows = true;
        }
        if (left == 1) follows = false;
      }
      free(Memory::kKeyEmpty, keys.stage);
      if (left == 1) {
        sync_warp();  // all lanes have read the task before
        free(Memory::kQueryEmpty, slot);
      }
      keys.advance();
      if constexpr (kOn.dropout && !kReadsDrops) {
        Elementwise{Place(params, task, warp_row)}.drop(scores, first_key);
      }
      if constexpr (kConfig.varlen) values_left = uniform(task.len_k) - first_key;
      pack_weights();
      if constexpr (kReadsDrops) drop_weights(drops);
    }
    if (!started) return;
    if constexpr (kPasses) pass_values();
    await_values();
    wgmma_fence();
    multiply_values();
    wgmma_wait<0>();
    fence_operand(out);
    write_results(taken - 1, softmax);
    WarpgroupResults<kConfig>::finish();
  }

  bool unsettled = false;  // some row has no reference yet
  bool follows = false;    // references of this tile follow the maxima
  bool swells = false;     // some sum has passed kSwell

  HeadTerms<MmaLanes<kConfig.type>> head;  // of the tile's head

  // References follow where the head's terms alone would make sums run away again and again.
  REGARD_DEVICE void read_head_terms(const ForwardTask& task) {
    constexpr bool kF16 = kConfig.type == Type::f16;
    const Place at(params, task, warp_row);
    head = Elementwise{at}.terms.head;
    const float distance = float(kF16 ? at.seq.len_k : kKeys);
    const float rise =
        head_terms_change<MmaLanes<kConfig.type>>(kOn, head, distance) * float(kLog2E);
    follows = !(rise <= (kF16 ? 10.0f : 24.0f));
  }

  REGARD_DEVICE void clear_weights() {
#pragma unroll
    for (int k = 0; k < kValueSteps; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[k][i] = 0;
    }
  }
};

}  // namespace regard
