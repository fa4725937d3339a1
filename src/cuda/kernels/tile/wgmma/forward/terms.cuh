// The score terms of a consumer warp: bias and mask of each block of keys, brought to shared
// memory, or bits of a mask to registers, a step ahead, and logits from products with them.
#pragma once

#include "cuda/kernels/tile/forward_scores.cuh"
#include "cuda/kernels/tile/wgmma/forward/bias_fragments.cuh"

namespace regard {

template <KernelConfig kConfig>
struct ForwardTerms {
  using Memory = ForwardMemory<kConfig>;
  using Coords = WarpgroupCoords<kConfig>;
  using Scores = typename Coords::Scores;
  using Elementwise = ForwardScores<kConfig, Coords>;
  static constexpr Features kOn = full_tile_features(kConfig);
  static constexpr int kKeys = Memory::kKeys;
  static constexpr bool kStages = stages_bias(kConfig) || stages_mask(kConfig);

  const KernelParams& params;
  const Memory memory;
  const int warpgroup;                     // among the consumers
  const int warp_row;                      // the warp's first row in the tile
  HeadTerms<MmaLanes<kConfig.type>> head;  // of the tile's head
  typename Elementwise::SeenKeys seen;     // of the block that is staged
  int bias_parity = 0;                     // of the phase of bias_full that is awaited next

  REGARD_DEVICE Coords coords(const ForwardTile<kConfig>& tile) const {
    return {params, tile, warp_row};
  }
  REGARD_DEVICE Elementwise elementwise(const ForwardTile<kConfig>& tile) const {
    Elementwise terms{coords(tile)};
    terms.terms.head = head;
    return terms;
  }

  // True where the head's terms alone would overflow the row sums again and again, so that the
  // running max has to follow the blocks.
  REGARD_DEVICE bool read_head_terms(const ForwardTile<kConfig>& tile) {
    constexpr bool kF16 = kConfig.type == Type::f16;
    const Coords at = coords(tile);
    head = Elementwise{at}.terms.head;
    const float distance = float(kF16 ? at.seq.len_k : kKeys);
    const float rise =
        head_terms_change<MmaLanes<kConfig.type>>(kOn, head, distance) * float(kLog2E);
    return !(rise <= (kF16 ? 10.0f : 24.0f));
  }

  // --------------------------------------------------------------------------------------- staging

  // Begins to copy the terms of a block; those of the block before have been read. The producer
  // loads a bias that comes by TMA.
  REGARD_DEVICE void load(const ForwardTile<kConfig>& tile, const KeyBlock& block) {
    elementwise(tile).read_seen(seen, block);
    if constexpr (kStages && !kConfig.bias.by_tma) {
      sync_warp();
      const Coords at = coords(tile);
      if (at.bulk_loads_bias(block.first_key)) {
        at.bulk_load_bias(block.first_key, bias_full());
        sync_warp();
      } else {
        at.load_terms(block);
      }
    }
  }
  REGARD_DEVICE void await(const ForwardTile<kConfig>& tile, int first_key) {
    if constexpr (kConfig.bias.by_tma) {
      mbarrier_wait(memory.bias_full(warpgroup), bias_parity);
      bias_parity ^= 1;
    } else if constexpr (kStages) {
      if (coords(tile).bulk_loads_bias(first_key)) {
        mbarrier_wait(bias_full(), bias_parity);
        bias_parity ^= 1;
      } else {
        cp_async_wait<0>();
        sync_warp();
      }
    }
  }
  // The terms of a block have been read: those of the next block may take their place.
  REGARD_DEVICE void release(const ForwardTile<kConfig>& tile, const KeyBlock& next,
                             bool has_next) {
    if constexpr (kConfig.bias.by_tma) {
      sync_warp();
      if (lane_index() == 0) mbarrier_arrive(memory.bias_empty(warpgroup));
    } else if (has_next) {
      load(tile, next);
    }
  }
  REGARD_DEVICE SharedAddress bias_full() const { return memory.bias_full(warp_row / 16); }

  // ---------------------------------------------------------------------------------------- logits

  // Products become logits; hidden pairs become -inf. `masked`: intervals, the last key, or a mask
  // or spans with a tile map, hide some pair of the block; `is_cut`: the first two may.
  REGARD_DEVICE void make_logits(Scores& scores, const ForwardTile<kConfig>& tile,
                                 const KeyBlock& block, bool masked, bool is_cut) const {
    if constexpr (is_plain(kOn) && !tests_pairs(kOn)) {
      if (!masked) return;
    }
    const Elementwise terms = elementwise(tile);
    if constexpr (BiasFragments<kConfig>::kOn) {
      BiasFragments<kConfig> bias(terms.at);
      if (bias.is_low()) {
        terms.apply_terms(scores, 0, block.first_key);
      } else {
        bias.add(scores, terms.terms, block.first_key);
      }
    } else if constexpr (!is_plain(kOn) || tests_pairs(kOn)) {
      terms.apply_terms(scores, 0, block.first_key);
    }
    if (masked) terms.hide(scores, 0, block, is_cut, seen);
  }
  // The same for a block that is computed again: its staged terms have been replaced by those of
  // the next block, if there is one.
  REGARD_DEVICE void make_logits_again(Scores& scores, const ForwardTile<kConfig>& tile,
                                       const KeyBlock& block, const KeyBlock& next, bool masked,
                                       bool is_cut, bool has_next) {
    if constexpr (kConfig.bias.by_tma) {
      const Elementwise terms = elementwise(tile);
      BiasFragments<kConfig>::apply_from_memory(scores, terms.terms, terms.at, block.first_key);
      if (masked) terms.hide(scores, 0, block, is_cut, seen);
    } else {
      if (has_next) await(tile, next.first_key);
      load(tile, block);
      await(tile, block.first_key);
      make_logits(scores, tile, block, masked, is_cut);
      if (has_next) load(tile, next);
    }
  }
};

}  // namespace regard
