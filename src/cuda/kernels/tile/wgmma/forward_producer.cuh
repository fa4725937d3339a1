// The producer of a wgmma forward block: one thread that takes tiles of query rows, one after
// another, and keeps their queries, keys and values coming in the order in which they are used:
// K0, K1, V0, K2, V1, ..., on through the tiles; with each block of keys its bias.
#pragma once

#include "cuda/kernels/tile/score_tile.cuh"
#include "cuda/kernels/tile/wgmma/tile_numbers.cuh"
#include "cuda/kernels/tile/wgmma/warpgroup_memory.cuh"

namespace regard {

template <KernelConfig kConfig>
struct ForwardProducer {
  using Memory = WarpgroupMemory<kConfig>;
  static constexpr ForwardWgmmaLayout kLayout = Memory::kLayout;
  static constexpr int kRows = Memory::kRows, kKeys = Memory::kKeys, kSlots = Memory::kSlots;

  const KernelParams& params;
  const ForwardMaps& maps;
  const Memory memory;
  int number = int(block_index());  // of the next tile; ~ of the last, where none is taken ahead
  Ring<Memory::kStages> keys, values;
  int bias_parity = 0;

  // ----------------------------------------------------------------------------------------- tiles

  // The producer has few registers: what follows from the grid is not kept.
  REGARD_DEVICE BlockGrid grid() const {
    BlockGrid grid = params.grid;
    uint32 tiles = uint32(grid.tiles);
    make_opaque(tiles);
    grid.tiles = int32(tiles);
    return grid;
  }
  REGARD_DEVICE int group() const {
    uint32 heads = uint32(params.problem.sizes.heads_kv);
    make_opaque(heads);
    return int(uint32(params.problem.sizes.heads_q) / heads);
  }

  // Where tiles differ in length, under intervals and in packed batches, their numbers come from a
  // counter; one is taken ahead. Beside the first task none is: what it loads is not to wait for
  // the counter.
  REGARD_DEVICE bool take_task(ForwardTask& task, bool is_first) {
    const TileNumbers<kConfig> numbers{params};
    const int count = grid().heads * grid().tiles;
    for (;;) {
      if (number < 0) {
        numbers.begin(count);
        number = numbers.after(~number);
      }
      if (number >= count) break;
      const int mine = number;
      number = is_first ? ~mine : numbers.after(mine);
      if (make_task(task, mine)) return true;
    }
    task.blocks = 0;
    return false;
  }

  // False where the tile has no rows.
  REGARD_DEVICE bool make_task(ForwardTask& task, int mine) const {
    const Problem& p = params.problem;
    BlockCoords place = block_coords_unsplit(grid(), mine);
    // The last rows see the most keys under a causal mask, so they start first.
    if (kConfig.features.interval) place.tile = grid().tiles - 1 - place.tile;
    const int heads = int(p.sizes.heads_q);
    const int b = int(uint32(place.head) / uint32(heads));
    const ShortSequence seq = short_sequence<kConfig>(p, b);
    const int first_row = place.tile * kRows;
    if (first_row >= seq.len_q) return false;
    const int row_count = smaller(kRows, seq.len_q - first_row);
    int begin = 0, end = seq.len_k;
    if constexpr (kConfig.features.interval) {
      const ShortBand band(p.mask_params, seq.len_q, seq.len_k);
      begin = band.begin.of(first_row);
      end = band.end.of(first_row + row_count - 1);
    }
    // Planes have no block behind a sequence.
    if constexpr (Memory::kHiLoParts > 1) begin = smaller(begin, larger(seq.len_k - 1, 0));
    const int first_block = begin / kKeys;
    // Rows that see nothing walk over one block all the same, every pair of which is hidden.
    const int blocks = larger(1, (end + kKeys - 1) / kKeys - first_block);
    task = {.blocks = blocks,
            .first_block = first_block,
            .b = b,
            .head = place.head - b * heads,
            .first_row = first_row,
            .row_count = row_count,
            .len_q = seq.len_q,
            .len_k = seq.len_k,
            .first_q = seq.first_q,
            .first_k = seq.first_k};
    return true;
  }

  // ----------------------------------------------------------------------------------------- loads

  REGARD_DEVICE void load(SharedAddress to, int panels, int rows, const TensorMap& map,
                          const TmaCoords& from, SharedAddress full) const {
    mbarrier_arrive_expect_tx(full, panels * panel_bytes(rows));
    load_panels(to, panels, rows, map, from, full);
  }
  REGARD_DEVICE void load_queries(int slot, const ForwardTask& task) const {
    load(memory.queries(slot), panels_of(kConfig.dim), kRows, maps.q,
         {0, task.first_q + task.first_row, task.head, batch_of(task.b)},
         memory.barrier(Memory::kQueryFull, slot));
  }
  REGARD_DEVICE void load_keys(const TmaCoords& block) {
    mbarrier_wait(memory.barrier(Memory::kKeyEmpty, keys.stage), keys.parity ^ 1);
    load(memory.keys(keys.stage), panels_of(kConfig.dim), kKeys, maps.k, block,
         memory.barrier(Memory::kKeyFull, keys.stage));
    keys.advance();
  }
  REGARD_DEVICE void load_values(const TmaCoords& block) {
    mbarrier_wait(memory.barrier(Memory::kValueEmpty, values.stage), values.parity ^ 1);
    load(memory.values(values.stage), panels_of(kConfig.dim_v), kKeys, maps.v, block,
         memory.barrier(Memory::kValueFull, values.stage));
    values.advance();
  }
  // Of each warpgroup's rows, when it has read those of the block before.
  REGARD_DEVICE void load_bias(const ForwardTask& task, int first_key) {
    constexpr int kPanels = panels_of(kKeys), kBytes = panel_bytes(kWarpgroupRows);
    const Strides& strides = params.problem.bias.strides;
    const int head = strides.head == 0 ? 0 : task.head, batch = strides.batch == 0 ? 0 : task.b;
#pragma unroll 1
    for (int warpgroup = 0; warpgroup < Memory::kConsumerWarps / 4; ++warpgroup) {
      const SharedAddress full = memory.barrier(Memory::kBiasFull, warpgroup);
      mbarrier_wait(memory.barrier(Memory::kBiasEmpty, warpgroup), bias_parity ^ 1);
      mbarrier_arrive_expect_tx(full, kPanels * kBytes);
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        tma_load(memory.bias(panel) + warpgroup * kBytes, maps.bias,
                 {.column = first_key + panel * kPanelColumns,
                  .row = task.first_row + warpgroup * kWarpgroupRows,
                  .head = head,
                  .batch = batch},
                 full);
      }
    }
    bias_parity ^= 1;
  }
  REGARD_DEVICE int batch_of(int b) const { return params.problem.packed ? 0 : b; }

  REGARD_DEVICE void run() {
    TmaCoords before{};
    bool owes_values = false;  // those of `before` are to come
    take_task(memory.task(0), true);
    for (int taken = 0;; ++taken) {
      const ForwardTask& task = memory.task(taken);
      const int slot = taken % kSlots, blocks = task.blocks;
      const auto await_slot = [&] {
        mbarrier_wait(memory.barrier(Memory::kQueryEmpty, slot), taken / kSlots % 2 ^ 1);
      };
      if (blocks == 0) {
        await_slot();
        mbarrier_arrive(memory.barrier(Memory::kQueryFull, slot));
        break;
      }
      TmaCoords block{.column = 0,
                      .row = task.first_k + (task.first_block + blocks - 1) * kKeys,
                      .head = task.head / group(),
                      .batch = batch_of(task.b)};
#pragma unroll 1
      for (int i = 0; i < blocks; ++i) {
        load_keys(block);
        if (i == 0) {
          await_slot();
          load_queries(slot, task);
        }
        if (owes_values) load_values(before);
        if constexpr (kConfig.bias.by_tma) load_bias(task, block.row);
        owes_values = true;
        before = block;
        block.row -= kKeys;
        // The next tile, while the stages are full and nothing waits for it: in the block's first
        // tile once they are. Whoever read the task whose place it takes has since given back the
        // queries of a later one.
        const int full = taken > 0 ? 0 : smaller(blocks, Memory::kStages) - 1;
        if (i == full) take_task(memory.task(taken + 1), false);
      }
    }
    if (owes_values) load_values(before);
  }
};

}  // namespace regard
