// The producer of a wgmma forward block of f32: as ForwardProducer, of which it has its tiles, with
// pairs of planes. It has few registers, as the consumers need more.
#pragma once

#include "cuda/kernels/tile/wgmma/forward_producer.cuh"

namespace regard {

template <KernelConfig kConfig>
struct PlaneProducer {
  using Memory = WarpgroupMemory<kConfig>;
  static constexpr int kRows = Memory::kRows, kKeys = Memory::kKeys, kSlots = Memory::kSlots;
  static constexpr int kStages = Memory::kStages;

  const KernelParams& params;
  const ForwardMaps& maps;
  const Memory memory;
  ForwardProducer<kConfig> tiles{params, maps, memory};

  REGARD_DEVICE void load(SharedAddress to, int panels, int rows, const TensorMap& map, int row,
                          int head, SharedAddress full) const {
    mbarrier_arrive_expect_tx(full, Memory::kHiLoParts * panels * panel_bytes(rows));
    load_parts(to, panels, rows, map, row, head, full);
  }

  REGARD_DEVICE void load_queries(int slot, const ForwardTask& task) const {
    const Problem& p = params.problem;
    const int first = first_hi_lo_row<int>(p, task.b, task.first_q, int(p.sizes.len_q), kKeys);
    load(memory.queries(slot), panels_of(kConfig.dim), kRows, maps.q, first + task.first_row,
         task.head, memory.barrier(Memory::kQueryFull, slot));
  }
  // `number`: of the block, counted from the first that this producer loads.
  REGARD_DEVICE void load_keys(int row, int head, int number) const {
    const int stage = number % kStages;
    mbarrier_wait(memory.barrier(Memory::kKeyEmpty, stage), number / kStages % 2 ^ 1);
    load(memory.keys(stage), panels_of(kConfig.dim), kKeys, maps.k, row, head,
         memory.barrier(Memory::kKeyFull, stage));
  }
  REGARD_DEVICE void load_values(int row, int head, int number) const {
    const int stage = number % kStages;
    mbarrier_wait(memory.barrier(Memory::kValueEmpty, stage), number / kStages % 2 ^ 1);
    load(memory.values(stage), panels_of(kConfig.dim_v), kKeys, maps.v, row, head,
         memory.barrier(Memory::kValueFull, stage));
  }

  REGARD_DEVICE void run() {
    const Problem& p = params.problem;
    int blocks = 0;                       // of keys that are loaded, or under way
    int row_before = 0, head_before = 0;  // of the last of them, whose values are to come
    for (int taken = 0;; ++taken) {
      ForwardTask task;
      const bool any = tiles.take_task(task, taken == 0);
      const int slot = taken % kSlots;
      mbarrier_wait(memory.barrier(Memory::kQueryEmpty, slot), taken / kSlots % 2 ^ 1);
      memory.task(taken) = task;
      if (!any) {
        mbarrier_arrive(memory.barrier(Memory::kQueryFull, slot));
        break;
      }
      load_queries(slot, task);
      const int head = task.head / tiles.group();
      const int first = first_hi_lo_row<int>(p, task.b, task.first_k, int(p.sizes.len_k), kKeys) +
                        task.first_block * kKeys;
      int row = first + task.blocks * kKeys;
#pragma unroll 1
      do {
        row -= kKeys;
        load_keys(row, head, blocks);
        if (blocks > 0) load_values(row_before, head_before, blocks - 1);
        ++blocks;
        row_before = row;
        head_before = head;
      } while (row > first);
    }
    if (blocks > 0) load_values(row_before, head_before, blocks - 1);
  }
};

}  // namespace regard
