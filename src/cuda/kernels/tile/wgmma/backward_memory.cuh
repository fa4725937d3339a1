// Shared memory of a wgmma backward block: tiles, the barriers that hand them on, and what all of
// its warpgroups know of the block's keys.
#pragma once

#include "cuda/kernels/params.h"
#include "cuda/kernels/ptx_hopper.cuh"
#include "cuda/kernels/tile/row_terms.cuh"
#include "cuda/kernels/tile/score_tile.cuh"
#include "cuda/kernels/tile/wgmma/warpgroup_memory.cuh"
#include "plan/cuda/kernel/wgmma_backward_layout.h"

namespace regard {

// A block's keys and the tiles of query rows that see some of them, of each query head that shares
// them.
struct BackwardTask {
  int b, kv;
  int tile_index;  // among the tiles of keys
  int first_key;   // in its sequence
  int key_count;
  int first_tile, end_tile;  // of rows
  int steps;                 // tiles of rows of all the heads
  ShortSequence seq;
};
static_assert(sizeof(BackwardTask) <= kBackwardTaskBytes);

// Registers of a thread of each role: of the keys, of dbias or drops, and what is left for dq.
template <KernelConfig kConfig>
constexpr int registers_of_keys() {
  if (has_backward_dropout_warpgroup(kConfig)) return 208;
  if (kConfig.dbias.how == BiasGradient::none) return 216;
  if (larger(kConfig.dim, kConfig.dim_v) <= 64) return 184;
  return has_dbias_warpgroup(kConfig) ? 208 : 216;
}
template <KernelConfig kConfig>
constexpr int registers_of_dbias() {
  if (!has_dbias_warpgroup(kConfig)) return 0;
  return larger(kConfig.dim, kConfig.dim_v) <= 64 ? 56 : 32;
}
template <KernelConfig kConfig>
constexpr int registers_of_drops() {
  return has_backward_dropout_warpgroup(kConfig) ? 32 : 0;
}
template <KernelConfig kConfig>
constexpr int registers_of_dq() {
  const int at_start = backward_warps(kConfig) == 16 ? 4 * 128 : 3 * 168;
  return at_start - 2 * registers_of_keys<kConfig>() - registers_of_dbias<kConfig>() -
         registers_of_drops<kConfig>();
}

// Whether there is a bias or a mask, of which key warpgroups find tiles in shared memory.
template <KernelConfig kConfig>
inline constexpr bool kHasPairTerms = kConfig.features.bias || kConfig.features.mask;

template <KernelConfig kConfig>
struct BackwardMemory {
  static constexpr BackwardWgmmaLayout kLayout = backward_wgmma_layout(kConfig);
  static constexpr int kRows = kConfig.tiling.rows, kKeys = kConfig.tiling.keys;
  static constexpr int kStages = kConfig.tiling.stages;  // of dO
  static constexpr int kQueryStages = query_stages(kConfig);
  static constexpr int kPairTermBuffers = pair_term_buffers(kConfig);
  static constexpr bool kWide = is_wide(kConfig);
  static constexpr int kKeyWarps = kWide ? 4 : 8;  // that make dS^T
  // Who says that P^T is there for another warpgroup, or dS^T, and with it that what comes with a
  // tile's rows has been read: each thread that reads or wrote it other than by products. A lane
  // could say so for its warp, and does where products alone read, and of pairs, which it delays;
  // but racecheck does not follow that.
  static constexpr bool kReadsDelta =
      kConfig.products == Products::f16x3 || !adds_delta_by_product(kConfig.features);
  static constexpr bool kEachHandsOver = !kConfig.cta_pair;
  static constexpr bool kEachHasRead =
      kEachHandsOver &&
      (kWide || kHasPairTerms<kConfig> || kReadsDelta || !adds_lse_by_product(kConfig.features));
  // Of the warpgroup that makes dq, which reads the sizes of planes' dS^T.
  static constexpr int kDqReaders = kConfig.products == Products::f16x3 ? 128
                                    : kConfig.cta_pair                  ? 8
                                                                        : 4;
  static_assert(kStages <= kMostBackwardStages && kRows == kPanelColumns);
  static_assert(kKeys == kWarpgroupRows * kKeyWarps / 4);

  SharedAddress begin = shared_address(&shared_memory<uint8>());

  static REGARD_DEVICE int dout_stage(int use) { return kStages == 2 ? use & 1 : use % kStages; }

  REGARD_DEVICE SharedAddress keys() const { return begin + kLayout.keys; }
  REGARD_DEVICE SharedAddress values() const { return begin + kLayout.values; }
  REGARD_DEVICE SharedAddress peer_keys() const { return begin + kLayout.peer_keys; }
  REGARD_DEVICE SharedAddress queries(int stage) const {
    return begin + kLayout.queries + stage * kLayout.query_bytes;
  }
  REGARD_DEVICE SharedAddress douts(int stage) const {
    return begin + kLayout.douts + stage * kLayout.dout_bytes;
  }
  // Of a tile's P^T and dS^T; of a pair the other buffer is for what the other block sends.
  static REGARD_DEVICE int own_dscores(int use) { return kConfig.cta_pair ? 0 : use & 1; }
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
  REGARD_DEVICE SharedAddress drops(int, int thread) const {
    return begin + kLayout.dropout_bits + thread * 4;
  }
  REGARD_DEVICE BackwardTask& task() const {
    return *reinterpret_cast<BackwardTask*>(&shared_memory<uint8>() + kLayout.task);
  }

  // Where the barriers of each kind begin.
  static constexpr int kKeysFull = 0, kValuesFull = 1, kQueryFull = 2;
  static constexpr int kDoutFull = kQueryFull + kMostBackwardStages + 1;
  static constexpr int kDscoreFull = kDoutFull + kMostBackwardStages;
  static constexpr int kDscoreEmpty = kDscoreFull + kDscoreBuffers;
  static constexpr int kPairTermsFull = kDscoreEmpty + kDscoreBuffers;
  // Of the wide kernel: P^T is there; nobody needs a tile of dO, or of Q, any more.
  static constexpr int kWeightsFull = kPairTermsFull + kMostPairTermBuffers;
  static constexpr int kDoutFree = kWeightsFull + kDscoreBuffers;
  static constexpr int kQueryFree = kDoutFree + kMostBackwardStages;
  // Of a pair: dS^T of the other block's keys, and its keys.
  static constexpr int kReceivedFull = kQueryFree + kMostBackwardStages;
  static constexpr int kPeerKeysFull = kReceivedFull + 1;
  // Of a cluster over the batch: dS^T of all of its blocks.
  static constexpr int kPeersFull = kPeerKeysFull + 1;
  static constexpr int kDropsFull = kPeersFull + kDscoreBuffers;
  static_assert(kDropsFull + 1 == kBackwardBarriers);
  // At which all of the keys say that they have read them.
  static constexpr NamedBarrier kDropsRead = NamedBarrier::backward_dropout_bits_read;
  static constexpr int kDropReaders = kKeyWarps * 32;

  REGARD_DEVICE SharedAddress barrier(int kind, int index = 0) const {
    return begin + kLayout.barriers + (kind + index) * 8;
  }

  // Tiles are full by one arrival and the copies' bytes; dS^T is when every warp of it has arrived,
  // and empty when every warp that makes dq has. Bias and mask are full when each of those has
  // brought its part. In a cluster over the batch, all that make dS^T say so to all of its blocks,
  // and each block says to all that it has read theirs.
  REGARD_DEVICE void init_barriers() const {
    mbarrier_init(barrier(kKeysFull), 1);
    mbarrier_init(barrier(kValuesFull), 1);
    for (int stage = 0; stage < kQueryStages; ++stage) mbarrier_init(barrier(kQueryFull, stage), 1);
    for (int stage = 0; stage < kStages; ++stage) mbarrier_init(barrier(kDoutFull, stage), 1);
    for (int buffer = 0; buffer < kDscoreBuffers; ++buffer) {
      mbarrier_init(barrier(kDscoreFull, buffer), kEachHasRead ? kKeyWarps * 32 : kKeyWarps);
      mbarrier_init(barrier(kDscoreEmpty, buffer), kDqReaders + readers_for_dbias());
      mbarrier_init(barrier(kPeersFull, buffer), kKeyWarps * kConfig.cluster);
    }
    for (int buffer = 0; buffer < kMostPairTermBuffers; ++buffer) {
      mbarrier_init(barrier(kPairTermsFull, buffer), 128);
    }
    if constexpr (has_backward_dropout_warpgroup(kConfig)) mbarrier_init(barrier(kDropsFull), 128);
    if constexpr (kConfig.cta_pair) {
      mbarrier_init(barrier(kReceivedFull), 1);
      mbarrier_init(barrier(kPeerKeysFull), 1);
    }
    if constexpr (kWide) {
      for (int buffer = 0; buffer < kDscoreBuffers; ++buffer) {
        mbarrier_init(barrier(kWeightsFull, buffer), kEachHandsOver ? 128 : 4);
      }
      for (int stage = 0; stage < kStages; ++stage) {
        mbarrier_init(barrier(kDoutFree, stage), 4 + (kReadsDelta ? 128 : 4));
        mbarrier_init(barrier(kQueryFree, stage), 4);
      }
    }
    fence_mbarrier_init();
  }
  // Arrivals that say that dbias has a tile's dS^T: of a cluster one of each block, else of every
  // thread that reads it.
  static constexpr int readers_for_dbias() {
    if (kConfig.dbias.how == BiasGradient::none) return 0;
    return kConfig.cluster > 1 ? kConfig.cluster : 128;
  }
};

// Blocks of a pair have tiles that lie side by side.
template <KernelConfig kConfig>
REGARD_DEVICE BlockCoords backward_place(BlockGrid grid) {
  const int block = int(block_index());
  if constexpr (!kConfig.cta_pair) return block_coords(grid, block);
  grid.tiles /= 2;
  BlockCoords place = block_coords(grid, block / 2);
  place.tile = 2 * place.tile + block % 2;
  return place;
}

// The block's task. No steps: no row sees its keys; no keys: there is nothing to do at all, but for
// the other block of a pair.
template <KernelConfig kConfig>
REGARD_DEVICE BackwardTask backward_task(const KernelParams& params) {
  constexpr int kRows = kConfig.tiling.rows, kKeys = kConfig.tiling.keys;
  const Problem& p = params.problem;
  const BlockCoords place = backward_place<kConfig>(params.grid);
  const int heads = int(p.sizes.heads_kv);
  BackwardTask x;
  x.b = place.head / heads;
  x.kv = place.head % heads;
  x.seq = short_sequence<kConfig>(p, x.b);
  // In order, the last keys of intervals add first: their rows begin the latest.
  x.tile_index = kConfig.ordered_dq && kConfig.features.interval
                     ? params.grid.tiles - 1 - place.tile
                     : place.tile;
  x.first_key = x.tile_index * kKeys;
  x.key_count = clamp_to(x.seq.len_k - x.first_key, 0, kKeys);
  Interval rows{0, x.seq.len_q};
  if constexpr (kConfig.features.interval) {
    const MaskParams& mask = p.mask_params;
    // Blocks of a pair walk together, over the rows of both.
    const int first = kConfig.cta_pair ? x.tile_index / 2 * 2 * kKeys : x.first_key;
    const int last = kConfig.cta_pair ? smaller(first + 2 * kKeys, x.seq.len_k) - 1
                                      : x.first_key + x.key_count - 1;
    rows = {visible_queries(mask, first, x.seq.len_q, x.seq.len_k).begin,
            visible_queries(mask, last, x.seq.len_q, x.seq.len_k).end};
  }
  const bool any = (x.key_count > 0 || kConfig.cta_pair) && !rows.empty();
  x.first_tile = any ? int(rows.begin) / kRows : 0;
  x.end_tile = any ? (int(rows.end) + kRows - 1) / kRows : 0;
  x.steps = (x.end_tile - x.first_tile) * int(p.sizes.group());
  return x;
}

// The same, known to be the same in the whole warp: in registers, uniform ones where they can be.
REGARD_DEVICE BackwardTask uniform_task(const BackwardTask& x) {
  return {
      uniform(x.b),
      uniform(x.kv),
      uniform(x.tile_index),
      uniform(x.first_key),
      uniform(x.key_count),
      uniform(x.first_tile),
      uniform(x.end_tile),
      uniform(x.steps),
      {uniform(x.seq.len_q), uniform(x.seq.len_k), uniform(x.seq.first_q), uniform(x.seq.first_k)}};
}

// A step of the walk: a tile of rows of one query head.
struct BackwardStep {
  int head;
  int tile;

  REGARD_DEVICE void advance(const BackwardTask& task) {
    if (++tile < task.end_tile) return;
    tile = task.first_tile;
    ++head;
  }
};

// Two stages in turn.
REGARD_DEVICE int parity_of(int use) { return use >> 1 & 1; }

}  // namespace regard
