// The TMA loads of a wgmma backward block: K and V once, Q and dO with their row terms for each
// tile of rows. One thread calls these functions.
#pragma once

#include "cuda/kernels/tile/mask_bits.cuh"
#include "cuda/kernels/tile/wgmma/backward/memory.cuh"

namespace regard {

// Where the rows of a sequence are in dq's sums. The row terms have the same rows.
template <KernelConfig kConfig>
struct DqRows {
  int64 per_head, first;

  REGARD_DEVICE DqRows(const KernelParams& params, const BackwardTask& task)
      : per_head(dq_rows(params.problem)),
        first(first_dq_row(params.problem, task.seq.whole(), task.b)) {}
  REGARD_DEVICE int64 of(const RowTile& tile) const {
    return tile.head * per_head + first + tile.index * kConfig.tiling.rows;
  }
};

// The first row of a sequence, and the first key of a block, in the hi and lo parts of f32.
REGARD_DEVICE int first_hi_lo_query(const Problem& p, const BackwardTask& task) {
  return first_hi_lo_row<int>(p, task.b, task.seq.first_q, int(p.sizes.len_q), kHiLoBackwardUnit);
}
REGARD_DEVICE int first_hi_lo_key(const Problem& p, const BackwardTask& task) {
  return first_hi_lo_row<int>(p, task.b, task.seq.first_k, int(p.sizes.len_k), kHiLoBackwardUnit) +
         task.first_key;
}

// CTA pair: the first column of dq that a block makes. Of the other block's keys it has the panels
// from this column's on.
template <KernelConfig kConfig>
REGARD_DEVICE int first_peer_column(const BackwardTask& task) {
  return task.key_tile % 2 * peer_columns(kConfig);
}

template <KernelConfig kConfig>
struct BackwardLoads {
  using Memory = BackwardMemory<kConfig>;
  static constexpr int kRows = Memory::kRows, kKeys = Memory::kKeys;
  static constexpr int kTermBytes = kRows * row_term_bytes(kConfig);

  const KernelParams& params;
  const BackwardMaps& maps;
  const Memory memory;
  const DqRows<kConfig> rows;  // not f32

  // The barrier also waits for `bytes` bytes, which the caller loads.
  REGARD_DEVICE void load_rows(SharedAddress to, int columns, int rows, const TensorMap& map,
                               int row, int head, int b, SharedAddress barrier,
                               int bytes = 0) const {
    const int panels = panels_of(columns);
    mbarrier_arrive_expect_tx(barrier, Memory::kParts * panels * panel_bytes(rows) + bytes);
    if constexpr (Memory::kF32) {
      load_parts(to, panels, rows, map, row, head, barrier);
    } else {
      const int batch = params.problem.packed ? 0 : b;
      load_panels(to, panels, rows, map, {.row = row, .head = head, .batch = batch}, barrier);
    }
  }

  // ------------------------------------------------------------------------------------------ keys

  REGARD_DEVICE int first_key(const BackwardTask& task) const {
    return Memory::kF32 ? first_hi_lo_key(params.problem, task) : task.seq.first_k + task.first_key;
  }
  REGARD_DEVICE void load_keys(const BackwardTask& task) const {
    load_rows(memory.keys(), kConfig.dim, kKeys, maps.k, first_key(task),
              key_head<kConfig>(params, task), task.b, memory.barrier(Memory::kKeysFull));
  }
  REGARD_DEVICE void load_values(const BackwardTask& task) const {
    load_rows(memory.values(), kConfig.dim_v, kKeys, maps.v, first_key(task),
              key_head<kConfig>(params, task), task.b, memory.barrier(Memory::kValuesFull));
  }
  // CTA pair: loads the other block's keys, in the columns of dq that this block makes.
  REGARD_DEVICE void load_peer_keys(const BackwardTask& task) const {
    constexpr int kPanels = panels_of(peer_columns(kConfig));
    const int first = first_peer_column<kConfig>(task) / kPanelColumns;
    const SharedAddress barrier = memory.barrier(Memory::kPeerKeysFull);
    mbarrier_arrive_expect_tx(barrier, kPanels * panel_bytes(kKeys));
    for (int panel = 0; panel < kPanels; ++panel) {
      tma_load(memory.peer_keys() + panel * panel_bytes(kKeys), maps.k,
               {.column = (first + panel) * kPanelColumns,
                .row = task.seq.first_k + peer_first_key<kConfig>(task),
                .head = key_head<kConfig>(params, task),
                .batch = params.problem.packed ? 0 : task.b},
               barrier);
    }
  }

  // ------------------------------------------------------------------------------------------ rows

  REGARD_DEVICE int first_row(const BackwardTask& task, const RowTile& tile) const {
    const int first = Memory::kF32 ? first_hi_lo_query(params.problem, task) : task.seq.first_q;
    return first + tile.index * kRows;
  }
  // The row terms of a tile, whose first row in the hi and lo parts is `row`. The terms of delta
  // follow the terms of lse of all rows.
  REGARD_DEVICE const void* row_terms(const RowTile& tile, int row, bool of_delta) const {
    const Problem& p = params.problem;
    if constexpr (Memory::kF32) {
      const int64 head = tile.head + (of_delta ? p.sizes.heads_q : 0);
      return static_cast<const HiLoRowTerm*>(params.buffers.row_terms) + head * hi_lo_term_rows(p) +
             row;
    } else {
      const int64 line = rows.of(tile) + (of_delta ? term_rows(p) : 0);
      return static_cast<const uint8*>(params.buffers.row_terms) + line * kRowTermBytes;
    }
  }
  REGARD_DEVICE void load_queries(const BackwardTask& task, const RowTile& tile, int stage) const {
    const SharedAddress barrier = memory.barrier(Memory::kQueryFull, stage);
    const int row = first_row(task, tile);
    const bool brings_bits = kConfig.mask.as_bits && !tile.is_full;
    load_rows(memory.queries(stage), kConfig.dim, kRows, maps.q, row, tile.head, task.b, barrier,
              kTermBytes + (brings_bits ? mask_tile_bytes(kConfig) : 0));
    bulk_load(memory.lse(stage), row_terms(tile, row, false), kTermBytes, barrier);
    if (brings_bits) load_mask_bits(task, tile, memory.mask_bits(stage), barrier);
  }
  REGARD_DEVICE void load_mask_bits(const BackwardTask& task, const RowTile& tile, SharedAddress to,
                                    SharedAddress barrier) const {
    const int64 row = map_row_of_head<kConfig>(params, task, tile.head);
    bulk_load(to, mask_bits_of_tile<kConfig>(params, row, tile.index), mask_tile_bytes(kConfig),
              barrier);
  }
  // In a CTA pair the terms of delta are joined with those of lse, which come with Q.
  REGARD_DEVICE void load_douts(const BackwardTask& task, const RowTile& tile, int stage) const {
    const SharedAddress barrier = memory.barrier(Memory::kDoutFull, stage);
    const int row = first_row(task, tile);
    load_rows(memory.douts(stage), kConfig.dim_v, kRows, maps.dout, row, tile.head, task.b, barrier,
              kConfig.cta_pair ? 0 : kTermBytes);
    if constexpr (!kConfig.cta_pair) {
      bulk_load(memory.delta(stage), row_terms(tile, row, true), kTermBytes, barrier);
    }
  }

  // Loads the tile of rows of an iteration; not in wide blocks.
  REGARD_DEVICE void load_tile(const BackwardTask& task, const RowTile& tile, int iteration) const {
    if constexpr (Memory::kLoadsBringTiles) memory.write_tile(iteration, tile);
    load_queries(task, tile, Memory::query_stage(iteration));
    load_douts(task, tile, Memory::dout_stage(iteration));
  }
  // Loads the first tiles, in the order in which they are needed.
  REGARD_DEVICE void load_first(const BackwardTask& task, RowWalk<kConfig> tile) const {
    load_keys(task);
    if constexpr (Memory::kLoadsBringTiles) memory.write_tile(0, tile);
    load_queries(task, tile, 0);
    load_values(task);
    if constexpr (kConfig.cta_pair) load_peer_keys(task);
    load_douts(task, tile, 0);
#pragma unroll 1
    for (int stage = 1; stage < Memory::kStages && stage < task.iterations; ++stage) {
      advance<kConfig>(tile, params, task);
      if constexpr (Memory::kLoadsBringTiles) memory.write_tile(stage, tile);
      load_queries(task, tile, stage);
      load_douts(task, tile, stage);
    }
  }
};

}  // namespace regard
