// The producer of the wgmma forward kernel: one thread that takes tiles of query rows from the
// scheduler and loads Q, K and V by TMA in the order in which the consumers use them: K0, Q, K1,
// V0, K2, V1, ..., on into the next tile; with each block of K its bias.
#pragma once

#include "cuda/kernels/tile/wgmma/forward/block_walk.cuh"
#include "cuda/kernels/tile/wgmma/forward/tile_scheduler.cuh"

namespace regard {

template <KernelConfig kConfig>
struct ForwardProducer {
  using Memory = ForwardMemory<kConfig>;
  static constexpr int kRows = Memory::kRows, kKeys = Memory::kKeys, kSlots = Memory::kSlots;

  const KernelParams& params;
  const ForwardMaps& maps;
  const Memory memory;
  TileScheduler<kConfig> scheduler{params};
  Ring<Memory::kStages> keys, values;
  int bias_parity = 0;

  REGARD_DEVICE void run() {
    TmaCoords before{};
    bool owes_values = false;  // V of `before` is still to be loaded
    scheduler.next(memory.tile(0), true);
    for (int iteration = 0;; ++iteration) {
      const ForwardTile<kConfig>& tile = memory.tile(iteration);
      const int slot = iteration % kSlots, blocks = tile.blocks;
      const auto await_slot = [&] {
        mbarrier_wait(memory.query_empty(slot), iteration / kSlots % 2 ^ 1);
      };
      if (blocks == 0) {
        await_slot();
        mbarrier_arrive(memory.query_full(slot));
        break;
      }
      BlockWalk<kConfig> walk;
      walk.begin(tile);
      TmaCoords block{.column = tile.first_column(),  // of V
                      .row = tile.first_k + walk.block().index * kKeys,
                      .head = scheduler.kv_head(tile),
                      .batch = batch_of(tile.b)};
#pragma unroll 1
      for (int i = 0; i < blocks; ++i) {
        load_keys(block);
        if (i == 0) {
          await_slot();
          load_queries(slot, tile);
        }
        if (owes_values) load_values(before);
        if constexpr (kConfig.bias.by_tma) load_bias(tile, block.row);
        owes_values = true;
        before = block;
        if (!kConfig.tile_map || i + 1 < blocks) {
          const int index = walk.block().index;
          walk.advance(params, tile);
          block.row -= (index - walk.block().index) * kKeys;
        }
        take_next(iteration, i, blocks);
      }
    }
    if (owes_values) load_values(before);
  }

 private:
  // The next tile is taken while the stages are full and nothing waits for it. Its place in shared
  // memory is free: every reader has since released the Q slot of a later tile.
  REGARD_DEVICE void take_next(int iteration, int block, int blocks) {
    const int full = iteration > 0 ? 0 : smaller(blocks, Memory::kStages) - 1;
    int taken_at = full;
    if constexpr (counts_tiles(kConfig)) {
      if (block == larger(full, blocks - 1 - TileScheduler<kConfig>::kFetchAhead)) {
        scheduler.fetch();
      }
      taken_at = larger(full, blocks - 2);
    }
    if (block == taken_at) scheduler.next(memory.tile(iteration + 1), false);
  }
  REGARD_DEVICE int batch_of(int b) const { return params.problem.packed ? 0 : b; }

  REGARD_DEVICE void load_queries(int slot, const ForwardTile<kConfig>& tile) const {
    load(memory.queries(slot), panels_of(kConfig.dim), kRows, maps.q,
         {0, tile.first_q + tile.first_row, tile.head, batch_of(tile.b)}, memory.query_full(slot));
  }
  REGARD_DEVICE void load_keys(TmaCoords block) {
    block.column = 0;
    mbarrier_wait(memory.key_empty(keys.stage), keys.parity ^ 1);
    load(memory.keys(keys.stage), panels_of(kConfig.dim), kKeys, maps.k, block,
         memory.key_full(keys.stage));
    keys.advance();
  }
  REGARD_DEVICE void load_values(const TmaCoords& block) {
    mbarrier_wait(memory.value_empty(values.stage), values.parity ^ 1);
    load(memory.values(values.stage), panels_of(out_columns(kConfig)), kKeys, maps.v, block,
         memory.value_full(values.stage));
    values.advance();
  }
  REGARD_DEVICE void load(SharedAddress to, int panels, int rows, const TensorMap& map,
                          const TmaCoords& from, SharedAddress full) const {
    mbarrier_arrive_expect_tx(full, panels * panel_bytes(rows));
    load_panels(to, panels, rows, map, from, full);
  }
  // The bias of each warpgroup's rows, once the warpgroup has read that of the block before.
  REGARD_DEVICE void load_bias(const ForwardTile<kConfig>& tile, int first_key) {
    constexpr int kPanels = panels_of(kKeys), kBytes = panel_bytes(kWarpgroupRows);
    const Strides& strides = params.problem.bias.strides;
    const int head = strides.head == 0 ? 0 : tile.head, batch = strides.batch == 0 ? 0 : tile.b;
#pragma unroll 1
    for (int warpgroup = 0; warpgroup < Memory::kConsumerWarps / 4; ++warpgroup) {
      const SharedAddress full = memory.bias_full(warpgroup);
      mbarrier_wait(memory.bias_empty(warpgroup), bias_parity ^ 1);
      mbarrier_arrive_expect_tx(full, kPanels * kBytes);
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        tma_load(memory.bias(panel) + warpgroup * kBytes, maps.bias,
                 {.column = first_key + panel * kPanelColumns,
                  .row = tile.first_row + warpgroup * kWarpgroupRows,
                  .head = head,
                  .batch = batch},
                 full);
      }
    }
    bias_parity ^= 1;
  }
};

}  // namespace regard
