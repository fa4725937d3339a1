// The producer of the wgmma forward kernel for f32: as ForwardProducer, for the hi and lo parts of
// each tile. The consumers leave it fewer registers, so that it takes a tile only when it loads it.
#pragma once

#include "cuda/kernels/tile/wgmma/forward/block_walk.cuh"
#include "cuda/kernels/tile/wgmma/forward/tile_scheduler.cuh"

namespace regard {

template <KernelConfig kConfig>
struct F32Producer {
  using Memory = ForwardMemory<kConfig>;
  static constexpr int kRows = Memory::kRows, kKeys = Memory::kKeys, kSlots = Memory::kSlots;
  static constexpr int kStages = Memory::kStages;

  const KernelParams& params;
  const ForwardMaps& maps;
  const Memory memory;
  TileScheduler<kConfig> scheduler{params};

  REGARD_DEVICE void run() {
    const Problem& p = params.problem;
    int blocks = 0;                       // of keys whose loads have begun
    int row_before = 0, head_before = 0;  // of the last of them; its V is still to be loaded
    for (int iteration = 0;; ++iteration) {
      ForwardTile<kConfig> tile;
      const bool any = scheduler.next(tile, iteration == 0);
      const int slot = iteration % kSlots;
      mbarrier_wait(memory.query_empty(slot), iteration / kSlots % 2 ^ 1);
      memory.tile(iteration) = tile;
      if (!any) {
        mbarrier_arrive(memory.query_full(slot));
        break;
      }
      load_queries(slot, tile);
      const int head = scheduler.kv_head(tile);
      const int first = first_hi_lo_row<int>(p, tile.b, tile.first_k, int(p.sizes.len_k), kKeys);
      BlockWalk<kConfig> walk;
      walk.begin(tile);
#pragma unroll 1
      for (int left = tile.blocks; left > 0; --left) {
        const int row = first + walk.block().index * kKeys;
        load_keys(row, head, blocks);
        if (blocks > 0) load_values(row_before, head_before, blocks - 1);
        ++blocks;
        row_before = row;
        head_before = head;
        if (left > 1) walk.advance(params, tile);
        if (left == TileScheduler<kConfig>::kFetchAhead) scheduler.fetch();
      }
    }
    if (blocks > 0) load_values(row_before, head_before, blocks - 1);
  }

 private:
  REGARD_DEVICE void load_queries(int slot, const ForwardTile<kConfig>& tile) const {
    const Problem& p = params.problem;
    const int first = first_hi_lo_row<int>(p, tile.b, tile.first_q, int(p.sizes.len_q), kKeys);
    load(memory.queries(slot), panels_of(kConfig.dim), kRows, maps.q, first + tile.first_row,
         tile.head, memory.query_full(slot));
  }
  // `index`: of the block among those that this producer loads.
  REGARD_DEVICE void load_keys(int row, int head, int index) const {
    const int stage = index % kStages;
    mbarrier_wait(memory.key_empty(stage), index / kStages % 2 ^ 1);
    load(memory.keys(stage), panels_of(kConfig.dim), kKeys, maps.k, row, head,
         memory.key_full(stage));
  }
  REGARD_DEVICE void load_values(int row, int head, int index) const {
    const int stage = index % kStages;
    mbarrier_wait(memory.value_empty(stage), index / kStages % 2 ^ 1);
    load(memory.values(stage), panels_of(kConfig.dim_v), kKeys, maps.v, row, head,
         memory.value_full(stage));
  }
  REGARD_DEVICE void load(SharedAddress to, int panels, int rows, const TensorMap& map, int row,
                          int head, SharedAddress full) const {
    mbarrier_arrive_expect_tx(full, kHiLoParts * panels * panel_bytes(rows));
    load_parts(to, panels, rows, map, row, head, full);
  }
};

}  // namespace regard
