// Shared memory of a wgmma forward block: tiles, the barriers that hand them on, and what the
// producer tells the consumers of a tile of rows.
#pragma once

#include "cuda/kernels/params.h"
#include "cuda/kernels/tile/wgmma/pipeline.cuh"

namespace regard {

// A tile of query rows and the blocks of keys that it is to see. No blocks: the work is done.
struct ForwardTask {
  int blocks;       // of keys, taken from the last to the first
  int first_block;  // the number of the first
  int b, head;
  int first_row;  // in its sequence
  int row_count;
  int len_q, len_k;
  int first_q, first_k;
};
static_assert(sizeof(ForwardTask) <= kTaskBytes);

template <KernelConfig kConfig>
struct WarpgroupMemory {
  static constexpr ForwardWgmmaLayout kLayout = forward_wgmma_layout(kConfig);
  static constexpr int kRows = kConfig.tiling.rows, kKeys = kConfig.tiling.keys;
  static constexpr int kStages = kConfig.tiling.stages, kSlots = kLayout.query_slots;
  static constexpr int kConsumerWarps = 4 * consumers_of(kConfig.tiling);
  static constexpr int kHiLoParts = hi_lo_parts(kConfig);  // of f32, one behind the other
  static_assert(kStages <= kMostWgmmaStages && kSlots <= kMostQuerySlots);

  const SharedAddress begin = shared_address(&shared_memory<uint8>());

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
  // Of a thread among the consumers: which weights of its row, or of the one eight below, are
  // dropped.
  REGARD_DEVICE SharedAddress drops(int half, int thread) const {
    return begin + kLayout.dropout_bits + (half * kConsumerWarps * 32 + thread) * 4;
  }
  REGARD_DEVICE ForwardTask& task(int number) const {
    uint8* const first = &shared_memory<uint8>() + kLayout.tasks;
    return reinterpret_cast<ForwardTask*>(first)[number % kTasksAtOnce];
  }

  // Where the barriers of each kind begin.
  static constexpr int kQueryFull = 0, kQueryEmpty = kMostQuerySlots;
  static constexpr int kKeyFull = 2 * kMostQuerySlots, kKeyEmpty = kKeyFull + kMostWgmmaStages;
  static constexpr int kValueFull = kKeyEmpty + kMostWgmmaStages;
  static constexpr int kValueEmpty = kValueFull + kMostWgmmaStages;
  // Of a consumer warp's rows; by TMA: of a warpgroup's, with others to give them back.
  static constexpr int kBiasFull = kValueEmpty + kMostWgmmaStages;
  static constexpr int kBiasEmpty = kBiasFull + kMostConsumers;
  static constexpr int kDropsFull = kBiasFull + kMostConsumerWarps;
  static_assert(kDropsFull + 1 == kBarriers);

  // At which all consumers say that they have read the drops.
  static constexpr NamedBarrier kDropsRead = NamedBarrier::forward_dropout_bits_read;
  static constexpr int kDropReaders = kConsumerWarps * 32;

  REGARD_DEVICE SharedAddress barrier(int kind, int index) const {
    return begin + kLayout.barriers + (kind + index) * 8;
  }

  // Full by one arrival and the copies' bytes, empty when every warp that reads them has arrived.
  REGARD_DEVICE void init_barriers() const {
    for (int slot = 0; slot < kSlots; ++slot) {
      mbarrier_init(barrier(kQueryFull, slot), 1);
      mbarrier_init(barrier(kQueryEmpty, slot), kConsumerWarps);
    }
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(barrier(kKeyFull, stage), 1);
      mbarrier_init(barrier(kKeyEmpty, stage), kConsumerWarps);
      mbarrier_init(barrier(kValueFull, stage), 1);
      mbarrier_init(barrier(kValueEmpty, stage), kConsumerWarps);
    }
    if constexpr (kConfig.bias.by_tma) {
      for (int warpgroup = 0; warpgroup < kConsumerWarps / 4; ++warpgroup) {
        mbarrier_init(barrier(kBiasFull, warpgroup), 1);
        mbarrier_init(barrier(kBiasEmpty, warpgroup), 4);
      }
    } else if constexpr (kConfig.features.bias) {
      for (int warp = 0; warp < kConsumerWarps; ++warp) mbarrier_init(barrier(kBiasFull, warp), 1);
    }
    if constexpr (has_dropout_warpgroup(kConfig)) mbarrier_init(barrier(kDropsFull, 0), 128);
    fence_mbarrier_init();
  }
};

}  // namespace regard
