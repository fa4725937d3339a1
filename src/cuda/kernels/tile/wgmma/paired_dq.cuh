// dq of a pair of wide wgmma backward blocks: each makes half of the columns, over the keys of
// both.
//
// Additions to memory limit wide heads; a pair makes half of them. A block sends dS^T to the other,
// and has the other's keys of its columns. Both parts of dS are taken into registers, which gives
// the buffers back at once: the other block's weights wait for that too.
#pragma once

#include "cuda/kernels/tile/wgmma/dq_warpgroup.cuh"

namespace regard {

template <KernelConfig kConfig>
struct PairedDq {
  using Memory = BackwardMemory<kConfig>;
  using Format = typename ElementOf<kConfig.type>::Format;
  using Operand = uint32[Memory::kKeys / 16][4];  // dS of a warp's 16 rows and a block's keys
  static constexpr int kPanelBytes = panel_bytes(Memory::kKeys);
  static constexpr int kColumns = peer_columns(kConfig);
  static constexpr int kAtOnce = 32;  // columns: more sums beside both operands do not fit
  static_assert(kColumns % kPanelColumns == 0 && kPanelColumns % kAtOnce == 0);

  const Memory& memory;
  DqWarpgroup<kConfig>& dq;

  static REGARD_DEVICE int first_panel(const BackwardTask& task) {
    return task.tile_index % 2 * panels_of(kColumns);
  }

  REGARD_DEVICE void load_peer_keys(const BackwardTask& task) const {
    const SharedAddress barrier = memory.barrier(Memory::kPeerKeysFull);
    mbarrier_arrive_expect_tx(barrier, panels_of(kColumns) * kPanelBytes);
    for (int panel = 0; panel < panels_of(kColumns); ++panel) {
      tma_load(memory.peer_keys() + panel * kPanelBytes, dq.maps.k,
               {.column = (first_panel(task) + panel) * kPanelColumns,
                .row = (task.tile_index ^ 1) * Memory::kKeys,
                .head = task.kv,
                .batch = task.b},
               barrier);
    }
  }

  // Of 16 rows a warp, from dS^T.
  REGARD_DEVICE void take(Operand& ds, int buffer) const {
    const int lane = lane_index();
    const SharedAddress from =
        memory.dscores(buffer) +
        swizzled_offset(lane / 16 * 8 + lane % 8, warp_index() * 2 + lane / 8 % 2);
#pragma unroll
    for (int k = 0; k < Memory::kKeys / 16; ++k) {
      ldmatrix_trans(ds[k], from + k * panel_bytes(16));
    }
    sync_warp();
  }

  template <int kBlocks>
  static REGARD_DEVICE void multiply(Accumulator (&sums)[kBlocks], const Operand& ds,
                                     SharedAddress keys, bool adds) {
    const uint32 b = descriptor_word(keys, kPanelBytes);
#pragma unroll
    for (int k = 0; k < Memory::kKeys / 16; ++k) {
      wgmma_rs_nn<Format>(sums, ds[k], matrix_descriptor(b + k * panel_bytes(16) / 16),
                          adds || k > 0);
    }
  }

  // The tile's dS^T is there; the other block has taken the one before.
  REGARD_DEVICE void make(const BackwardTask& task, const BackwardStep& step, int use) const {
    if (thread_index() == 0) {
      const SharedAddress full = memory.barrier(Memory::kReceivedFull);
      mbarrier_arrive_expect_tx(full, kPanelBytes);
      bulk_copy_to_peer(memory.dscores(1), memory.dscores(0), kPanelBytes, full);
    }
    sync_warp();
    Operand own, other;
    take(own, 0);
    dq.free_dscores(use);
    mbarrier_wait(memory.barrier(Memory::kReceivedFull), use & 1);
    take(other, 1);
    if (lane_index() == 0)
      mbarrier_arrive_cluster(of_peer(memory.barrier(Memory::kDscoreEmpty, use & 1)));
#pragma unroll 1
    for (int part = 0; part < kColumns / kAtOnce; ++part) {
      const int column = part * kAtOnce;
      const int offset = column / kPanelColumns * kPanelBytes + column % kPanelColumns * 2;
      Accumulator sums[kAtOnce / 8];
      wgmma_fence();
      multiply(sums, own, memory.keys() + first_panel(task) * kPanelBytes + offset, false);
      multiply(sums, other, memory.peer_keys() + offset, true);
      wgmma_commit();
      if (kConfig.ordered_dq && part == 0) dq.turns.take(task, step);
      wgmma_wait<0>();
      fence_operand(sums);
      dq.add_to_memory(sums, task, step, (first_panel(task) * kPanelColumns + column) / 8);
    }
  }
};

}  // namespace regard
