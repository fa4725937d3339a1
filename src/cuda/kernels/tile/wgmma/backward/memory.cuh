// Shared memory of a wgmma backward block: tiles, and the barriers that hand them from one
// warpgroup to another. docs/kernels.md has a table of the barriers.
#pragma once

#include "cuda/kernels/tile/wgmma/backward/task.cuh"
#include "cuda/kernels/tile/wgmma/pipeline.cuh"

namespace regard {

// Whether shared memory has tiles of a bias or a mask.
template <KernelConfig kConfig>
inline constexpr bool kHasPairTerms = kConfig.features.bias || stages_mask(kConfig);

// Buffers of P^T, dS^T, bias and mask alternate: iteration i uses buffer i & 1.
REGARD_DEVICE int parity_of(int iteration) { return iteration >> 1 & 1; }

template <KernelConfig kConfig>
struct BackwardMemory {
  static constexpr BackwardWgmmaLayout kLayout = backward_wgmma_layout(kConfig);
  static constexpr int kRows = kConfig.tiling.rows, kKeys = kConfig.tiling.keys;
  static constexpr int kStages = kConfig.tiling.stages;  // of dO
  static constexpr int kQueryStages = query_stages(kConfig);
  static constexpr int kPairTermBuffers = pair_term_buffers(kConfig);
  static constexpr bool kWide = is_wide(kConfig);
  static constexpr bool kF32 = kConfig.products == Products::f16x3;
  static constexpr int kParts = hi_lo_parts(kConfig);
  static constexpr int kKeyWarps = kWide ? 4 : 8;  // that make dS^T
  static_assert(kStages <= kMostBackwardStages && kRows % kPanelColumns == 0);
  static_assert(kKeys == kWarpgroupRows * kKeyWarps / 4);

  // Arrival counts. A thread arrives for itself if it read or wrote the tile with ordinary loads
  // and stores; if only wgmma reads it, one lane arrives for its warp. (One lane would always be
  // enough, but racecheck cannot follow it. CTA pairs do it, because they lose time otherwise, and
  // readers of a mask's bits, which took 1.04 times the time.)
  static constexpr bool kReadsDelta = kF32 || !adds_delta_by_product(kConfig.features);
  static constexpr bool kThreadsArrive = !kConfig.cta_pair;
  static constexpr bool kDscoreThreadsArrive =
      kThreadsArrive &&
      (kWide || kHasPairTerms<kConfig> || kReadsDelta || !adds_lse_by_product(kConfig.features));
  // The dq warpgroup: in f32, all threads, because they read the sizes of dS^T; CTA pair: the warps
  // of both blocks.
  static constexpr int kDqArrivals = kF32 ? 128 : kConfig.cta_pair ? 8 : 4;
  // Dbias: every thread that reads dS^T; in a cluster over the batch, one thread of each block.
  static constexpr int kDbiasArrivals = kConfig.dbias.how == BiasGradient::none ? 0
                                        : kConfig.cluster > 1                   ? kConfig.cluster
                                                                                : 128;

  SharedAddress begin = shared_address(&shared_memory<uint8>());

  static REGARD_DEVICE int query_stage(int iteration) { return iteration % kQueryStages; }
  static REGARD_DEVICE int dout_stage(int iteration) {
    return kStages == 2 ? iteration & 1 : iteration % kStages;
  }

  REGARD_DEVICE SharedAddress keys() const { return begin + kLayout.keys; }
  REGARD_DEVICE SharedAddress values() const { return begin + kLayout.values; }
  REGARD_DEVICE SharedAddress peer_keys() const { return begin + kLayout.peer_keys; }
  REGARD_DEVICE SharedAddress queries(int stage) const {
    return begin + kLayout.queries + stage * kLayout.query_bytes;
  }
  REGARD_DEVICE SharedAddress douts(int stage) const {
    return begin + kLayout.douts + stage * kLayout.dout_bytes;
  }
  // P^T and dS^T; and in a CTA pair, where dS^T of the other block arrives.
  static constexpr int kDscoreTurns = dscore_turns(kConfig);
  static REGARD_DEVICE int dscore_buffer(int iteration) { return iteration & (kDscoreTurns - 1); }
  static REGARD_DEVICE int received_buffer(int iteration) {
    return kDscoreTurns + dscore_buffer(iteration);
  }
  REGARD_DEVICE SharedAddress dscores(int buffer) const {
    return begin + kLayout.dscores + buffer * kLayout.dscore_bytes;
  }
  REGARD_DEVICE SharedAddress dscore_sizes(int buffer) const {
    return begin + kLayout.dscore_sizes + buffer * kDscoreSizeBytes;
  }
  REGARD_DEVICE SharedAddress dbias_terms() const { return begin + kLayout.dbias_terms; }
  REGARD_DEVICE SharedAddress lse(int stage) const {
    return begin + kLayout.lse + stage * kRows * row_term_bytes(kConfig);
  }
  REGARD_DEVICE SharedAddress delta(int stage) const {
    return begin + kLayout.delta + stage * kRows * row_term_bytes(kConfig);
  }
  REGARD_DEVICE TileView bias_tile(int buffer) const {
    return {begin + kLayout.bias + buffer % kPairTermBuffers * bias_bytes(kConfig),
            bias_row_bytes(kConfig)};
  }
  REGARD_DEVICE TileView mask_tile(int buffer) const {
    return {begin + kLayout.mask + buffer % kPairTermBuffers * mask_bytes(kConfig),
            mask_row_bytes(kConfig)};
  }
  REGARD_DEVICE SharedAddress mask_bits(int stage) const {
    return begin + kLayout.mask_bits + stage * mask_tile_bytes(kConfig);
  }
  // A word for each thread of the key warpgroups.
  REGARD_DEVICE SharedAddress dropout_bits(int, int thread) const {
    return begin + kLayout.dropout_bits + thread * 4;
  }
  REGARD_DEVICE BackwardTask& task() const {
    return *reinterpret_cast<BackwardTask*>(&shared_memory<uint8>() + kLayout.task);
  }

  // Which tile the loads of an iteration bring. The writer then loads Q; readers wait for Q.
  static constexpr bool kLoadsBringTiles = loads_bring_tiles(kConfig);
  REGARD_DEVICE void write_tile(int iteration, const RowTile& tile) const {
    row_tile(iteration) = uint64(tile.head) << 32 | uint32(tile.index) << 1 | uint32(tile.is_full);
  }
  REGARD_DEVICE RowTile read_tile(int iteration) const {
    const uint64 tile = row_tile(iteration);
    const int index = uniform(int(uint32(tile)));
    return {uniform(int(tile >> 32)), index >> 1, (index & 1) != 0};
  }
  REGARD_DEVICE uint64& row_tile(int iteration) const {
    uint8* const first = &shared_memory<uint8>() + kLayout.row_tiles;
    return reinterpret_cast<uint64*>(first)[iteration % kRowTilesAtOnce];
  }

  // The first barrier of each kind.
  enum Barrier : int {
    kKeysFull = 0,
    kValuesFull = 1,
    kQueryFull = 2,
    kDoutFull = kQueryFull + kMostBackwardStages + 1,
    kDscoreFull = kDoutFull + kMostBackwardStages,
    kDscoreEmpty = kDscoreFull + kDscoreBuffers,
    kPairTermsFull = kDscoreEmpty + kDscoreBuffers,
    // Wide kernels.
    kProbsFull = kPairTermsFull + kMostPairTermBuffers,
    kDoutEmpty = kProbsFull + kDscoreBuffers,
    kQueryEmpty = kDoutEmpty + kMostBackwardStages,
    // CTA pairs: dS^T of the other block's keys, and those keys.
    kReceivedFull = kQueryEmpty + kMostBackwardStages,
    kPeerKeysFull = kReceivedFull + kDscoreBuffers,
    // Clusters over the batch: dS^T of all blocks.
    kPeersFull = kPeerKeysFull + 1,
    kDropoutBitsFull = kPeersFull + kDscoreBuffers,
  };
  static_assert(kDropoutBitsFull + 1 == kBackwardBarriers);
  static constexpr auto kDropoutBitsRead = NamedBarrier::backward_dropout_bits_read;
  static constexpr int kDropoutBitsReaders = kKeyWarps * 32;

  REGARD_DEVICE SharedAddress barrier(Barrier kind, int index = 0) const {
    return begin + kLayout.barriers + (kind + index) * 8;
  }

  // Waits until the buffer of this iteration has been filled, or may be filled.
  REGARD_DEVICE void await_full(Barrier kind, int iteration) const {
    mbarrier_wait(barrier(kind, iteration & 1), parity_of(iteration));
  }
  REGARD_DEVICE void await_empty(Barrier kind, int iteration) const {
    mbarrier_wait(barrier(kind, iteration & 1), parity_of(iteration) ^ 1);
  }
  // The other block's dS^T of this iteration.
  REGARD_DEVICE SharedAddress received_full(int iteration) const {
    return barrier(kReceivedFull, dscore_buffer(iteration));
  }
  REGARD_DEVICE void await_received(int iteration) const {
    mbarrier_wait(received_full(iteration), iteration / kDscoreTurns & 1);
  }
  REGARD_DEVICE SharedAddress dropout_bits_full() const { return barrier(kDropoutBitsFull); }

  // Calls visit(barrier, arrivals of a phase).
  template <class Visit>
  REGARD_DEVICE void each_barrier(Visit visit) const {
    visit(barrier(kKeysFull), 1);
    visit(barrier(kValuesFull), 1);
    for (int stage = 0; stage < kQueryStages; ++stage) visit(barrier(kQueryFull, stage), 1);
    for (int stage = 0; stage < kStages; ++stage) visit(barrier(kDoutFull, stage), 1);
    for (int buffer = 0; buffer < kDscoreBuffers; ++buffer) {
      visit(barrier(kDscoreFull, buffer), kDscoreThreadsArrive ? kKeyWarps * 32 : kKeyWarps);
      visit(barrier(kDscoreEmpty, buffer), kDqArrivals + kDbiasArrivals);
      visit(barrier(kPeersFull, buffer), kKeyWarps * kConfig.cluster);
    }
    for (int buffer = 0; buffer < kMostPairTermBuffers; ++buffer) {
      visit(barrier(kPairTermsFull, buffer), 128);
    }
    if constexpr (has_backward_dropout_warpgroup(kConfig)) {
      visit(barrier(kDropoutBitsFull), 128);
    }
    if constexpr (kConfig.cta_pair) {
      for (int turn = 0; turn < kDscoreTurns; ++turn) visit(barrier(kReceivedFull, turn), 1);
      visit(barrier(kPeerKeysFull), 1);
    }
    if constexpr (kWide) {
      for (int buffer = 0; buffer < kDscoreBuffers; ++buffer) {
        visit(barrier(kProbsFull, buffer), kThreadsArrive ? 128 : 4);
      }
      for (int stage = 0; stage < kStages; ++stage) {
        visit(barrier(kDoutEmpty, stage), 4 + (kReadsDelta ? 128 : 4));
        visit(barrier(kQueryEmpty, stage), 4);
      }
    }
  }
  REGARD_DEVICE void init_barriers() const {
    each_barrier([](SharedAddress at, int arrivals) { mbarrier_init(at, arrivals); });
    fence_mbarrier_init();
  }
  REGARD_DEVICE void invalidate_barriers() const {
    each_barrier([](SharedAddress at, int) { mbarrier_inval(at); });
  }
};

}  // namespace regard
