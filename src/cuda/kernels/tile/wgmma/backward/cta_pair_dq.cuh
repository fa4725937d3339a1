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
  static constexpr int kAtOnce = 32, kParts = kColumns / kAtOnce;  // columns of a product
  static constexpr int kTurns = Memory::kDscoreTurns;
  static_assert(kColumns % kAtOnce == 0 && kPanelColumns % kAtOnce == 0);

  Dq& dq;

  // Where a column of a block's keys begins.
  static REGARD_DEVICE int column_offset(int column) {
    return column / kPanelColumns * kPanelBytes + column % kPanelColumns * 2;
  }

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
  // Columns [part * kAtOnce, (part + 1) * kAtOnce) of the block's.
  REGARD_DEVICE void multiply_part(Accumulator (&sums)[kAtOnce / 8], const Operand& own,
                                   const Operand& other, const BackwardTask& task, int part) const {
    const int first = first_peer_column<kConfig>(task), column = part * kAtOnce;
    wgmma_fence();
    multiply(sums, own, dq.memory.keys() + column_offset(first + column), false);
    multiply(sums, other, dq.memory.peer_keys() + column_offset(first % kPanelColumns + column),
             true);
    wgmma_commit();
  }

  // Sends dS^T of a tile to the other block, which has read what the copy replaces there.
  REGARD_DEVICE void send(int iteration) const {
    const Memory& memory = dq.memory;
    if (thread_index() == 0) {
      const SharedAddress full = memory.received_full(iteration);
      mbarrier_arrive_expect_tx(full, kPanelBytes);
      bulk_copy_to_peer(memory.dscores(Memory::received_buffer(iteration)),
                        memory.dscores(Memory::dscore_buffer(iteration)), kPanelBytes, full);
    }
    sync_warp();
  }

  REGARD_DEVICE void make_dq(const BackwardTask& task, const RowTile& tile, int iteration) const {
    const Memory& memory = dq.memory;
    Operand own, other;
    read_dscores(own, Memory::dscore_buffer(iteration));
    dq.free_dscores(iteration);
    memory.await_received(iteration);
    read_dscores(other, Memory::received_buffer(iteration));
    if (lane_index() == 0) {
      mbarrier_arrive_cluster(of_peer(memory.barrier(Memory::kDscoreEmpty, iteration & 1)));
    }
    // Where registers hold the sums of two parts, one is added next to the products of the other.
    Accumulator sums[kTurns][kAtOnce / 8];
    if constexpr (kTurns > 1) multiply_part(sums[0], own, other, task, 0);
#pragma unroll(kTurns > 1 ? kParts : 1)
    for (int part = 0; part < kParts; ++part) {
      const int next = part + kTurns - 1;
      if (next < kParts) multiply_part(sums[next % kTurns], own, other, task, next);
      if (kConfig.ordered_dq && part == 0) dq.semaphore.acquire(task, tile);
      if (next < kParts) {
        wgmma_wait<kTurns - 1>();
      } else {
        wgmma_wait<0>();
      }
      fence_operand(sums[part % kTurns]);
      const int column = first_peer_column<kConfig>(task) + part * kAtOnce;
      dq.add_to_memory(sums[part % kTurns], task, tile, column / 8);
    }
  }

  REGARD_DEVICE void await_peer_keys(const BackwardTask& task) const {
    const Memory& memory = dq.memory;
    mbarrier_wait(memory.barrier(Memory::kPeerKeysFull), 0);
    if constexpr (!kConfig.varlen) return;
    // As KeyWarpgroup::kClears.
    const int count = larger(task.seq.len_k - peer_first_key<kConfig>(task), 0);
    if (count >= Memory::kKeys) return;
    clear_rows(memory.peer_keys(), panels_of(kColumns), Memory::kKeys, count, Memory::kKeys,
               thread_index(), 128, NamedBarrier::dq_warpgroup);
  }

  // With two buffers, dq of a tile is made once dS^T of the next has been sent, so that no copy is
  // waited for.
  REGARD_DEVICE void mainloop(const BackwardTask& task, RowWalk<kConfig> tile) const {
    constexpr int kLag = kTurns - 1;
    Memory& memory = dq.memory;
    mbarrier_wait(memory.barrier(Memory::kKeysFull), 0);
    await_peer_keys(task);
#pragma unroll 1
    for (int iteration = 0; iteration < task.iterations + kLag; ++iteration) {
      make_opaque(memory.begin);
      if (iteration < task.iterations) {
        memory.await_full(Memory::kDscoreFull, iteration);
        send(iteration);
      }
      if (iteration < kLag) continue;
      make_dq(task, tile, iteration - kLag);
      advance<kConfig>(tile, dq.params, task);
    }
  }
};

}  // namespace regard
