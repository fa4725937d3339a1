// The warpgroup of a wgmma forward block that draws which weights dropout drops. A lane draws for
// the same lane of each consumer warpgroup.
#pragma once

#include "cuda/kernels/tile/wgmma/drops.cuh"
#include "cuda/kernels/tile/wgmma/warpgroup_memory.cuh"

namespace regard {

template <KernelConfig kConfig>
struct ForwardDrops {
  using Memory = WarpgroupMemory<kConfig>;
  static constexpr int kKeys = Memory::kKeys;
  static constexpr int kRowsOfLane = 2 * consumers_of(kConfig.tiling);
  static_assert(!has_dropout_warpgroup(kConfig) || kKeys % 32 == 0);

  const KernelParams& params;
  const Memory memory;
  const int thread = thread_index() % 128;
  const uint32 thresholds = thresholds_of(params.problem.dropout);

  // A call of Philox serves a row's eight elements of a lane in 32 keys. All of a block's calls at
  // once would take too many registers.
  REGARD_DEVICE void draw(uint32 (&drops)[kRowsOfLane], const ForwardTask& task,
                          int first_key) const {
    const int first_row = task.first_row + thread / 32 * 16 + lane_index() / 4;
#pragma unroll
    for (int r = 0; r < kRowsOfLane; ++r) drops[r] = 0;
#pragma unroll 1
    for (int keys = first_key; keys < first_key + kKeys; keys += 32) {
      const uint32 call = uint32(keys / 32 * 4 + lane_index() % 4);
      Philox numbers[kRowsOfLane];
#pragma unroll
      for (int r = 0; r < kRowsOfLane; ++r) {
        const int row = first_row + r / 2 * kWarpgroupRows + r % 2 * 8;
        numbers[r] = dropout_counter(task.b, task.head, row, call);
      }
      draw_dropout(params.problem.dropout, numbers);
#pragma unroll
      for (int word = 0; word < 4; ++word) {
#pragma unroll
        for (int r = 0; r < kRowsOfLane; ++r) {
          add_drops(drops[r], numbers[r].word[word], thresholds);
        }
      }
    }
  }

  REGARD_DEVICE void run() {
    DropWriter<Memory> writer{memory};
    for (int taken = 0;; ++taken) {
      const int slot = taken % Memory::kSlots;
      mbarrier_wait(memory.barrier(Memory::kQueryFull, slot), taken / Memory::kSlots % 2);
      const ForwardTask task = memory.task(taken);
      if (task.blocks == 0) break;
#pragma unroll 1
      for (int left = task.blocks; left > 0; --left) {
        uint32 drops[kRowsOfLane];
        draw(drops, task, (task.first_block + left - 1) * kKeys);
        writer.begin();
#pragma unroll
        for (int r = 0; r < kRowsOfLane; ++r) {
          store_shared_32(memory.drops(r % 2, r / 2 * 128 + thread), drops[r]);
        }
        writer.end();
      }
    }
    writer.finish();
  }
};

}  // namespace regard
