// dq of a CTA pair: each block makes half of the columns, over the keys of both.
//
// Additions to memory limit wide heads, and a pair makes half as many. Each block sends its dS^T to
// the other, and has loaded the other's keys for its own columns. Both dS are copied to registers,
// which frees the shared buffers at once; the warpgroups that write P^T wait for that.
#pragma once

#include "cuda/kernels/tile/wgmma/backward/dq_sums.cuh"

namespace regard {

template <KernelConfig kConfig>
struct CtaPairDq {
  using Dq = DqSums<kConfig>;
  using Memory = typename Dq::Memory;
  using Operand = uint32[Memory::kKeys / 16][4];  // dS of a warp's 16 rows and a block's keys
  static constexpr int kPanelBytes = panel_bytes(Memory::kKeys);
  static constexpr int kColumns = peer_columns(kConfig);
  static constexpr int kAtOnce = 32;  // columns: registers hold both operands and so many sums
  static_assert(kColumns % kPanelColumns == 0 && kPanelColumns % kAtOnce == 0);

  Dq& dq;

  // dS of 16 rows a warp.
  REGARD_DEVICE void read_dscores(Operand& ds, int buffer) const {
    const int lane = lane_index();
    const SharedAddress from =
        dq.memory.dscores(buffer) +
        swizzled_offset(lane / 16 * 8 + lane % 8, warp_index() * 2 + lane / 8 % 2);
#pragma unroll
    for (int k = 0; k < Memory::kKeys / 16; ++k) ldmatrix_trans(ds[k], from + k * panel_bytes(16));
    sync_warp();
  }

  template <int kBlocks>
  static REGARD_DEVICE void multiply(Accumulator (&sums)[kBlocks], const Operand& ds,
                                     SharedAddress keys, bool adds) {
    const uint32 b = descriptor_word(keys, kPanelBytes);
#pragma unroll
    for (int k = 0; k < Memory::kKeys / 16; ++k) {
      wgmma_rs_nn<typename Dq::Format>(sums, ds[k], matrix_descriptor(b + k * panel_bytes(16) / 16),
                                       adds || k > 0);
    }
  }

  // dS^T of the tile is in buffer 0, and the other block has read dS^T of the tile before.
  REGARD_DEVICE void make_dq(const BackwardTask& task, const RowTile& tile, int iteration) const {
    const Memory& memory = dq.memory;
    if (thread_index() == 0) {
      const SharedAddress full = memory.barrier(Memory::kReceivedFull);
      mbarrier_arrive_expect_tx(full, kPanelBytes);
      bulk_copy_to_peer(memory.dscores(1), memory.dscores(0), kPanelBytes, full);
    }
    sync_warp();
    Operand own, other;
    read_dscores(own, 0);
    dq.free_dscores(iteration);
    mbarrier_wait(memory.barrier(Memory::kReceivedFull), iteration & 1);
    read_dscores(other, 1);
    if (lane_index() == 0) {
      mbarrier_arrive_cluster(of_peer(memory.barrier(Memory::kDscoreEmpty, iteration & 1)));
    }
    const int first_panel = task.key_tile % 2 * panels_of(kColumns);
#pragma unroll 1
    for (int part = 0; part < kColumns / kAtOnce; ++part) {
      const int column = part * kAtOnce;
      const int offset = column / kPanelColumns * kPanelBytes + column % kPanelColumns * 2;
      Accumulator sums[kAtOnce / 8];
      wgmma_fence();
      multiply(sums, own, memory.keys() + first_panel * kPanelBytes + offset, false);
      multiply(sums, other, memory.peer_keys() + offset, true);
      wgmma_commit();
      if (kConfig.ordered_dq && part == 0) dq.semaphore.acquire(task, tile);
      wgmma_wait<0>();
      fence_operand(sums);
      dq.add_to_memory(sums, task, tile, (first_panel * kPanelColumns + column) / 8);
    }
  }
};

}  // namespace regard
