// Deterministic sums of dq: the tiles of keys that see some rows add to them in their order, which
// depends on nothing but the problem.
//
// A block waits for blocks before it in the grid alone. Those began before it, and pass on the turn
// that they have before they wait for another: the first of all that run waits for nobody. Blocks
// of a cluster, which wait for each other, run together, and those before are whole clusters.
//
// To wait for a turn and to pass one on takes longer than the warpgroup that makes dq has to spare.
// So a turn is of two tiles of rows, and both are done at once, beside the first one's product. It
// is passed on only there: by that time the additions have reached memory.
#pragma once

#include "cuda/kernels/tile/wgmma/backward_memory.cuh"

namespace regard {

template <KernelConfig kConfig>
struct DqTurns {
  static constexpr int kBlocks = blocks_at_once(kConfig);
  static constexpr int kTiles = semaphore_tiles(kConfig), kRows = kTiles * kConfig.tiling.rows;
  static constexpr int kKeys = kBlocks * kConfig.tiling.keys;
  static constexpr int kBarrier = 4, kThreads = 128;  // of the warpgroup that makes dq

  const KernelParams& params;
  int32* held = nullptr;  // the turn that is to be passed on
  int next = 0;           // whose it will be

  // All threads: until dq's sums of the tile are this block's.
  REGARD_DEVICE void take(const BackwardTask& task, const BackwardStep& step) {
    int32* const turn = turn_of(task, step);
    if (turn == held) return;
    const int mine = number_of(task, step);
    bar_sync(kBarrier, kThreads);
    if (thread_index() == 0 && held) release_semaphore(held, next);
    if (thread_index() == 32) wait_semaphore(turn, mine);
    bar_sync(kBarrier, kThreads);
    held = turn;
    next = mine + 1;
  }
  REGARD_DEVICE void finish() const {
    bar_sync(kBarrier, kThreads);
    if (thread_index() == 0 && held) release_semaphore(held, next);
  }

 private:
  // Blocks of a pair add to columns of their own, in turns of their own.
  REGARD_DEVICE int32* turn_of(const BackwardTask& task, const BackwardStep& step) const {
    const Sizes& s = params.problem.sizes;
    const int64 first = (task.b * s.heads_q + step.head) * dq_semaphores(kConfig, s.len_q);
    return params.buffers.dq_semaphores + first + step.tile / kTiles * kBlocks +
           task.tile_index % kBlocks;
  }
  // Under intervals from the last tile of keys to the first. All that see some of the turn's rows
  // follow one another.
  REGARD_DEVICE int number_of(const BackwardTask& task, const BackwardStep& step) const {
    const int own = task.tile_index / kBlocks;
    if constexpr (!kConfig.features.interval) return own;
    const ShortSequence& seq = task.seq;
    const int last_row = smaller((step.tile / kTiles + 1) * kRows, seq.len_q) - 1;
    const Interval keys = visible_keys(params.problem.mask_params, last_row, seq.len_q, seq.len_k);
    return (int(keys.end) - 1) / kKeys - own;
  }
};

}  // namespace regard
