// The tasks of a wgmma backward block: one; or, in a persistent grid, one after another.
#pragma once

#include "cuda/kernels/tile/wgmma/backward/memory.cuh"

namespace regard {

template <KernelConfig kConfig>
struct BlockLoop {
  static_assert(!kConfig.persistent || cluster_size(kConfig) == 1);

  const KernelParams& params;
  const BackwardMemory<kConfig> memory;

  // Makes the barriers and the task. All threads call this; a barrier of the block or of its
  // cluster follows.
  REGARD_DEVICE void begin(int block) const {
    if (thread_index() == 0) memory.init_barriers();
    if (thread_index() < (kConfig.tile_map ? 32 : 1)) {
      const BackwardTask task = backward_task<kConfig>(params, block);
      if (thread_index() == 0) memory.task() = task;
    }
  }

  // Calls run() for each task of the block that has keys. Every warpgroup calls this, and run makes
  // its state anew: phases of barriers begin at 0 again.
  template <class Run>
  REGARD_DEVICE void each(Run run) const {
    if constexpr (!kConfig.persistent) {
      run();
    } else {
#pragma unroll 1
      for (int block = int(block_index());;) {
        if (memory.task().key_count > 0) run();
        block += int(block_count());
        fence_proxy_async();  // TMA will write where the block has written
        sync_block();
        if (block >= params.grid.blocks()) return;
        if (thread_index() == 0) memory.invalidate_barriers();
        begin(block);
        sync_block();
      }
    }
  }
};

}  // namespace regard
