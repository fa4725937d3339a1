// What the pipelines of the wgmma kernels are made of: stages in shared memory, named barriers, and
// tiles that TMA loads. docs/kernels.md draws the pipelines.
#pragma once

#include "cuda/kernels/ptx_hopper.cuh"
#include "plan/cuda/kernel/wgmma_layout.h"

namespace regard {

// The next stage of a ring buffer. Who reads a stage waits for `parity` of its "full" barrier; who
// fills it waits for parity ^ 1 of its "empty" barrier.
template <int kStages>
struct Ring {
  int stage = 0;
  int parity = 0;

  REGARD_DEVICE void advance() {
    if (++stage < kStages) return;
    stage = 0;
    parity ^= 1;
  }
};

// -------------------------------------------------------------------------------- named barriers

// Ids of the hardware's named barriers; id 0 is sync_block. A kernel is either a forward or a
// backward kernel, so that the two lists may share ids.
enum class NamedBarrier : int {
  // Forward.
  values_cleared = 2,   // all consumers
  queries_cleared = 3,  // + consumer warpgroup: each warpgroup
  forward_dropout_bits_read = queries_cleared + kMostConsumers,  // consumers and the bits' producer
  // Backward.
  dkdv_warpgroup = 1,  // + key warpgroup: each warpgroup
  both_key_warpgroups = 3,
  dq_warpgroup = 4,
  dbias_warpgroup = 5,
  backward_dropout_bits_read = 8,  // key warpgroups and the bits' producer
};
REGARD_DEVICE constexpr NamedBarrier operator+(NamedBarrier first, int n) {
  return NamedBarrier(int(first) + n);
}
REGARD_DEVICE void bar_sync(NamedBarrier barrier, int threads) { bar_sync(int(barrier), threads); }
REGARD_DEVICE void bar_arrive(NamedBarrier barrier, int threads) {
  bar_arrive(int(barrier), threads);
}

// ----------------------------------------------------------------------------------------- tiles

// The offset of 16 bytes (eight elements) in a panel, with TMA's 128-byte swizzle.
REGARD_DEVICE int swizzled_offset(int row, int piece) {
  return row * kPanelRowBytes + ((piece ^ row % 8) << 4);
}

// A tile of `rows` rows and whole panels by TMA, from `first` on. The caller tells `barrier` how
// many bytes will come.
REGARD_DEVICE void load_panels(SharedAddress to, int panels, int rows, const TensorMap& map,
                               const TmaCoords& first, SharedAddress barrier) {
  for (int panel = 0; panel < panels; ++panel) {
    tma_load(to + panel * panel_bytes(rows), map,
             {.column = first.column + panel * kPanelColumns,
              .row = first.row,
              .head = first.head,
              .batch = first.batch},
             barrier);
  }
}
// The hi and the lo part of an f32 tile. The map has the parts in place of batch entries.
REGARD_DEVICE void load_parts(SharedAddress to, int panels, int rows, const TensorMap& map, int row,
                              int head, SharedAddress barrier) {
#pragma unroll 1
  for (int part = 0; part < kHiLoParts; ++part) {
#pragma unroll 1
    for (int column = 0; column < panels * kPanelColumns; column += kPanelColumns) {
      tma_load(to, map, {.column = column, .row = row, .head = head, .batch = part}, barrier);
      to += panel_bytes(rows);
    }
  }
}

// Clears rows [first, last) of a tile that belong to another sequence or to none: what they hold
// must not meet a weight of 0 in a product. `threads` threads share the work and the barrier.
REGARD_DEVICE void clear_rows(SharedAddress tile, int panels, int rows, int first, int last,
                              int thread, int threads, NamedBarrier barrier) {
  for (int panel = 0; panel < panels; ++panel) {
    for (int piece = first * 8 + thread; piece < last * 8; piece += threads) {
      store_shared_128(tile + panel * panel_bytes(rows) + piece * 16, {});
    }
  }
  fence_proxy_async();
  bar_sync(barrier, threads);
}

// Rows of a tile to memory by one warp, 16 bytes a lane, where TMA would also write the rows behind
// them. `rows`: of a panel; `first`, `count`: those that are copied; `pieces`: of 16 bytes, of a
// row of memory, at most kPieces; `to`: where the first row begins; `stride`: in bytes.
template <int kPieces>
REGARD_DEVICE void copy_rows(SharedAddress tile, int rows, int first, int count, int pieces,
                             uint8* to, int64 stride) {
#pragma unroll 2
  for (int index = lane_index(); index < count * kPieces; index += 32) {
    const int row = index / kPieces, piece = index % kPieces;
    if (piece >= pieces) continue;
    store_global_128(to + row * stride + piece * 16,
                     load_shared_128(tile + piece / 8 * panel_bytes(rows) +
                                     swizzled_offset(first + row, piece % 8)));
  }
}

// Calls issue() by one thread of the block's first warp. Whole warps call this. An elected thread
// issues a copy by TMA in one instruction, because the compiler knows that it is the only
// one; under any other condition it makes a loop over threads of each copy.
template <class Issue>
REGARD_DEVICE void by_elected_thread(Issue issue) {
  if (uniform(warp_index()) == 0) {
    if (elect_lane()) issue();
  }
}

// The same condition, found before what follows: the compiler would find it behind the next wait
// for products, where everything else waits for it.
REGARD_DEVICE bool found_early(bool x) {
  uint32 found = x;
  make_opaque(found);
  return found != 0;
}

}  // namespace regard
