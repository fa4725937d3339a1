// The semaphore that orders the additions to dq, for determinism: the key tiles that see a row add
// to it in an order that depends on the problem alone.
//
// There is no deadlock. A block waits only for blocks before it in the grid. Those began before it,
// and release the semaphore that they hold before they wait for another. (The blocks of a cluster
// run together, and all blocks before them belong to whole clusters.)
//
// Waiting and releasing take longer than the dq warpgroup can spare. So a semaphore covers two
// tiles of rows, and both operations happen at once, during the first tile's product. The release
// comes only then, because by that time the additions have reached memory.
#pragma once

#include "cuda/kernels/tile/dq_turn.cuh"
#include "cuda/kernels/tile/wgmma/backward/memory.cuh"

namespace regard {

template <KernelConfig kConfig>
struct DqSemaphore {
  static constexpr int kBlocks = blocks_at_once(kConfig);
  static constexpr int kTiles = semaphore_tiles(kConfig), kRows = kTiles * kConfig.tiling.rows;
  static constexpr int kKeys = kBlocks * kConfig.tiling.keys;

  const KernelParams& params;
  int32* held = nullptr;
  int next = 0;  // the value that `held` is released with

  static REGARD_DEVICE void sync() { bar_sync(NamedBarrier::dq_warpgroup, 128); }

  // All threads: waits until this block may add to the dq of the tile's rows.
  REGARD_DEVICE void acquire(const BackwardTask& task, const RowTile& tile) {
    int32* const semaphore = semaphore_of(task, tile);
    if (semaphore == held) return;
    const int turn = turn_of(task, tile);
    sync();
    if (thread_index() == 0 && held) release_semaphore(held, next);
    if (thread_index() == 32) wait_semaphore(semaphore, turn);
    sync();
    held = semaphore;
    next = turn + 1;
  }
  REGARD_DEVICE void release() const {
    sync();
    if (thread_index() == 0 && held) release_semaphore(held, next);
  }

 private:
  // The blocks of a CTA pair add to different columns, and have a semaphore each.
  REGARD_DEVICE int32* semaphore_of(const BackwardTask& task, const RowTile& tile) const {
    const Sizes& s = params.problem.sizes;
    const int64 first = (task.b * s.heads_q + tile.head) * dq_semaphores(kConfig, s.len_q);
    return params.buffers.dq_semaphores + first + tile.index / kTiles * kBlocks +
           task.key_tile % kBlocks;
  }
  // The number of key tiles that add before this one. Under intervals the order is descending, and
  // begins with the last key tile that sees some of the semaphore's rows.
  REGARD_DEVICE int turn_of(const BackwardTask& task, const RowTile& tile) const {
    const int own = task.key_tile / kBlocks;
    if constexpr (!kConfig.features.interval) return visiting(task, tile, 0, own);
    const ShortSequence& seq = task.seq;
    if constexpr (kCountsTurns<kConfig> && !kConfig.tile_map) {
      return visiting(task, tile, own + 1, (seq.len_k + kKeys - 1) / kKeys);
    }
    const int last_row = smaller((tile.index / kTiles + 1) * kRows, seq.len_q) - 1;
    const Interval keys = keys_of_row<kConfig>(params.problem, seq, task.b, last_row);
    return visiting(task, tile, own + 1, (int(keys.end) - 1) / kKeys + 1);
  }
  // How many of the key tiles [begin, end) add to the semaphore's rows.
  REGARD_DEVICE int visiting(const BackwardTask& task, const RowTile& tile, int begin,
                             int end) const {
    if constexpr (!kCountsTurns<kConfig>) return end - begin;
    int64 row = 0;
    if constexpr (kConfig.tile_map) {
      row = map_row_of_head<kConfig>(params, task, tile.head) - task.key_tile;
    }
    return visiting_key_tiles<kConfig, kTiles, kBlocks>(params, task.seq, task.b, row,
                                                        tile.index / kTiles * kTiles, begin, end);
  }
};

}  // namespace regard
