// Shared memory of the wgmma forward kernel: tiles, mbarriers, and the tiles of rows that the
// producer has taken from the scheduler.
#pragma once

#include "cuda/kernels/params.h"
#include "cuda/kernels/tile/tile_map.cuh"
#include "cuda/kernels/tile/wgmma/pipeline.cuh"

namespace regard {

// These exist only with a tile map: where a walk begins, and the bits of its blocks.
template <KernelConfig kConfig, bool kMapped = kConfig.tile_map>
struct MappedWalk {};
template <KernelConfig kConfig>
struct MappedWalk<kConfig, true> {
  int last_word;                              // of the map, that has a visible block
  typename TileMap<kConfig>::Bits last_bits;  // of its blocks
  int map_row;
};

// Where blocks share a tile of rows: which share of its keys (split_kv), or which slice of out's
// columns, this block has.
template <KernelConfig kConfig, bool kShared = shares_tiles(kConfig)>
struct TileShare {};
template <KernelConfig kConfig>
struct TileShare<kConfig, true> {
  int share;
};

// A tile of query rows and the key blocks that it walks over.
template <KernelConfig kConfig>
struct ForwardTile : MappedWalk<kConfig>, TileShare<kConfig> {
  int blocks;       // of keys, walked from the last to the first; 0: there is no more tile
  int first_block;  // index of the first
  int b, head;
  int first_row;  // in its sequence
  int row_count;
  int len_q, len_k;
  int first_q, first_k;

  // The first column of the block's slice of out and V.
  REGARD_DEVICE int first_column() const {
    if constexpr (kConfig.tiling.slices > 1) return this->share * out_columns(kConfig);
    return 0;
  }
};

template <KernelConfig kConfig>
struct ForwardMemory {
  static constexpr ForwardWgmmaLayout kLayout = forward_wgmma_layout(kConfig);
  static constexpr int kRows = kConfig.tiling.rows, kKeys = kConfig.tiling.keys;
  static constexpr int kStages = kConfig.tiling.stages, kSlots = kLayout.query_slots;
  static constexpr int kConsumerWarps = 4 * consumers_of(kConfig.tiling);
  static constexpr int kParts = hi_lo_parts(kConfig);
  static constexpr NamedBarrier kDropoutBitsRead = NamedBarrier::forward_dropout_bits_read;
  static constexpr int kDropoutBitsReaders = kConsumerWarps * 32;
  static_assert(sizeof(ForwardTile<kConfig>) <= forward_tile_bytes(kConfig));
  static_assert(kStages <= kMostWgmmaStages && kSlots <= kMostQuerySlots);

  const SharedAddress begin = shared_address(&shared_memory<uint8>());

  // ----------------------------------------------------------------------------------------- tiles

  REGARD_DEVICE SharedAddress queries(int slot) const {
    return begin + kLayout.queries + slot * kLayout.query_bytes;
  }
  REGARD_DEVICE SharedAddress keys(int stage) const {
    return begin + kLayout.keys + stage * kLayout.key_bytes;
  }
  REGARD_DEVICE SharedAddress values(int stage) const {
    return begin + kLayout.values + stage * kLayout.value_bytes;
  }
  REGARD_DEVICE SharedAddress out(int panel) const {
    return begin + kLayout.out + panel * panel_bytes(kRows);
  }
  REGARD_DEVICE SharedAddress bias(int panel) const {
    return begin + kLayout.bias + panel * panel_bytes(kRows);
  }
  // The word of a consumer thread for its first row, or for the one eight rows below.
  REGARD_DEVICE SharedAddress dropout_bits(int half, int thread) const {
    return begin + kLayout.dropout_bits + (half * kConsumerWarps * 32 + thread) * 4;
  }
  REGARD_DEVICE ForwardTile<kConfig>& tile(int iteration) const {
    uint8* const first = &shared_memory<uint8>() + kLayout.tiles;
    return reinterpret_cast<ForwardTile<kConfig>*>(first)[iteration % kTilesAtOnce];
  }

  // ------------------------------------------------------------------------------------- mbarriers

  REGARD_DEVICE SharedAddress query_full(int slot) const { return barrier(slot); }
  REGARD_DEVICE SharedAddress query_empty(int slot) const { return barrier(kQueryEmpty + slot); }
  REGARD_DEVICE SharedAddress key_full(int stage) const { return barrier(kKeyFull + stage); }
  REGARD_DEVICE SharedAddress key_empty(int stage) const { return barrier(kKeyEmpty + stage); }
  REGARD_DEVICE SharedAddress value_full(int stage) const { return barrier(kValueFull + stage); }
  REGARD_DEVICE SharedAddress value_empty(int stage) const { return barrier(kValueEmpty + stage); }
  // One for each consumer warp; by TMA one for each consumer warpgroup, which then also empties it.
  REGARD_DEVICE SharedAddress bias_full(int reader) const { return barrier(kBiasFull + reader); }
  REGARD_DEVICE SharedAddress bias_empty(int warpgroup) const {
    return barrier(kBiasEmpty + warpgroup);
  }
  REGARD_DEVICE SharedAddress dropout_bits_full() const { return barrier(kDropoutBitsFull); }

  // "Full" completes on one arrival and the bytes of the copies, "empty" on one arrival of each
  // warp that reads.
  REGARD_DEVICE void init_barriers() const {
    for (int slot = 0; slot < kSlots; ++slot) {
      mbarrier_init(query_full(slot), 1);
      mbarrier_init(query_empty(slot), kConsumerWarps);
    }
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(key_full(stage), 1);
      mbarrier_init(key_empty(stage), kConsumerWarps);
      mbarrier_init(value_full(stage), 1);
      mbarrier_init(value_empty(stage), kConsumerWarps);
    }
    if constexpr (kConfig.bias.by_tma) {
      for (int warpgroup = 0; warpgroup < kConsumerWarps / 4; ++warpgroup) {
        mbarrier_init(bias_full(warpgroup), 1);
        mbarrier_init(bias_empty(warpgroup), 4);
      }
    } else if constexpr (kConfig.features.bias) {
      for (int warp = 0; warp < kConsumerWarps; ++warp) mbarrier_init(bias_full(warp), 1);
    }
    if constexpr (has_dropout_warpgroup(kConfig)) mbarrier_init(dropout_bits_full(), 128);
    fence_mbarrier_init();
  }

 private:
  static constexpr int kQueryEmpty = kMostQuerySlots, kKeyFull = 2 * kMostQuerySlots;
  static constexpr int kKeyEmpty = kKeyFull + kMostWgmmaStages;
  static constexpr int kValueFull = kKeyEmpty + kMostWgmmaStages;
  static constexpr int kValueEmpty = kValueFull + kMostWgmmaStages;
  static constexpr int kBiasFull = kValueEmpty + kMostWgmmaStages;
  static constexpr int kBiasEmpty = kBiasFull + kMostConsumers;
  static constexpr int kDropoutBitsFull = kBiasFull + kMostConsumerWarps;
  static_assert(kDropoutBitsFull + 1 == kBarriers);

  REGARD_DEVICE SharedAddress barrier(int index) const {
    return begin + kLayout.barriers + index * 8;
  }
};

}  // namespace regard
