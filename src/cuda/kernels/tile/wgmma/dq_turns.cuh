// Deterministic sums of dq: the tiles of keys that see a tile of rows add to it in their order.
//
// A block waits for its turn just before it adds, and passes it on only then before its next
// additions: by that time they have reached memory, and the fence finds little to wait for.
#pragma once

#include "cuda/kernels/tile/wgmma/backward_memory.cuh"

namespace regard {

template <KernelConfig kConfig>
struct DqTurns {
  static constexpr int kRows = kConfig.tiling.rows, kKeys = kConfig.tiling.keys;
  static constexpr int kBarrier = 4, kThreads = 128;  // of the warpgroup that makes dq

  const KernelParams& params;
  int32* owed = nullptr;  // the turn that is to be passed on
  int next = 0;           // whose it will be

  // All threads: until dq's sums of these rows are this block's.
  REGARD_DEVICE void take(const BackwardTask& task, const BackwardStep& step) {
    int32* const turn = turn_of(task, step);
    const int mine = number_of(task, step);
    sync_threads(kBarrier, kThreads);
    if (thread_index() == 0) {
      if (owed) pass_turn(owed, next);
      wait_for_turn(turn, mine);
    }
    sync_threads(kBarrier, kThreads);
    owed = turn;
    next = mine + 1;
  }
  REGARD_DEVICE void finish() const {
    sync_threads(kBarrier, kThreads);
    if (thread_index() == 0 && owed) pass_turn(owed, next);
  }

 private:
  REGARD_DEVICE int32* turn_of(const BackwardTask& task, const BackwardStep& step) const {
    const Sizes& s = params.problem.sizes;
    const int64 tiles = divide_up(s.len_q, kRows);
    return params.buffers.turns + (task.b * s.heads_q + step.head) * tiles + step.tile;
  }
  // Under intervals from the last tile of keys to the first. Blocks of tiles before began before,
  // so that waiting for them ends.
  REGARD_DEVICE int number_of(const BackwardTask& task, const BackwardStep& step) const {
    if constexpr (!kConfig.features.interval) return task.tile_index;
    const ShortSequence& seq = task.seq;
    const int last_row = smaller(step.tile * kRows + kRows, seq.len_q) - 1;
    const Interval keys = visible_keys(params.problem.mask_params, last_row, seq.len_q, seq.len_k);
    return (int(keys.end) - 1) / kKeys - task.tile_index;
  }
};

}  // namespace regard
