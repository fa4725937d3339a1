// dq = dS K of a tile of rows and the block's keys, and its way to the f32 sums in memory.
#pragma once

#include "cuda/kernels/tile/dq_order.cuh"
#include "cuda/kernels/tile/wgmma/backward/dq_semaphore.cuh"
#include "cuda/kernels/tile/wgmma/backward/loads.cuh"
#include "cuda/kernels/tile/wgmma/products.cuh"

namespace regard {

// The sums and the semaphore, which CtaPairDq and F32Dq use too.
template <KernelConfig kConfig>
struct DqSums {
  using Memory = BackwardMemory<kConfig>;
  using Format = typename ElementOf<Memory::kF32 ? Type::f16 : kConfig.type>::Format;
  static constexpr int kRows = Memory::kRows, kKeys = Memory::kKeys;
  static constexpr int kAtOnce = 8;  // blocks of 8 columns, whose sums are in registers
  static constexpr int kBlocks = kConfig.dim / 8;
  static constexpr int kWhole = kBlocks / kAtOnce, kRest = kBlocks % kAtOnce;
  static constexpr int kLastPart = kWhole + (kRest > 0) - 1;
  static constexpr int kPanels = kRows / kPanelColumns;  // of dS^T, and of rows of dq
  static constexpr int kOnePanel = 16;  // a stride that is not used: the operand has one panel

  const KernelParams& params;
  Memory memory;
  const DqRows<kConfig> rows;
  DqSemaphore<kConfig> semaphore{params};

  template <int kCount>
  REGARD_DEVICE void add_to_memory(const Accumulator (&sums)[kCount], const BackwardTask& task,
                                   const RowTile& tile, int first_block, int first_row = 0) const {
    if (tile.index * kRows + first_row + warp_index() * 16 >= task.seq.len_q) return;
    const int64 unit = (rows.of(tile) + first_row) / 16 + warp_index();
    float* const to =
        params.buffers.dq_sums + dq_offset(kConfig, unit, first_block, lane_index(), 0);
#pragma unroll
    for (int n = 0; n < kCount; ++n) red_add_4(to + n * 128, sums[n]);
  }
  REGARD_DEVICE void free_dscores(int iteration) const {
    if (Memory::kF32 || lane_index() == 0) {
      mbarrier_arrive(memory.barrier(Memory::kDscoreEmpty, iteration & 1));
    }
  }

  // sums = (adds ? sums : 0) + dS K over kSumKeys keys from `first_key` on, by kParts parts.
  template <int kSumKeys, int kCount>
  REGARD_DEVICE void multiply(Accumulator (&sums)[kCount], int buffer, int panel, int first_block,
                              int first_key = 0, bool adds = false) const {
    constexpr int kParts = Memory::kParts;
    const uint32 a = descriptor_word(
        memory.dscores(buffer) + panel * panel_bytes(kKeys) + panel_bytes(first_key), kOnePanel);
    const uint32 b = descriptor_word(
        memory.keys() + first_block / 8 * panel_bytes(kKeys) + panel_bytes(first_key), kOnePanel);
    wgmma_fence();
#pragma unroll
    for (int product = 0; product < kPartProducts<kParts>; ++product) {
      const uint32 of_a = a + part_of_a<kParts>(product) * part_words(kPanelColumns, kKeys);
      const uint32 of_b = b + part_of_b<kParts>(product) * part_words(kConfig.dim, kKeys);
#pragma unroll
      for (int k = 0; k < kSumKeys / 16; ++k) {
        wgmma_ss_tn<Format>(sums, matrix_descriptor(of_a + k * panel_bytes(16) / 16),
                            matrix_descriptor(of_b + k * panel_bytes(16) / 16),
                            adds || product + k > 0);
      }
    }
    wgmma_commit();
  }

  // ---------------------------------------------------------------------------------- f16 and bf16

  // `panel`: 64 of the tile's rows. `meanwhile` is called while the first product runs.
  template <int kCount, class Meanwhile>
  REGARD_DEVICE void make_part(const BackwardTask& task, const RowTile& tile, int iteration,
                               int panel, int part, Meanwhile meanwhile) {
    Accumulator sums[kCount];
    multiply<kKeys>(sums, iteration & 1, panel, part * kAtOnce);
    if (panel + part == 0) meanwhile();
    if (kConfig.ordered_dq && panel + part == 0) semaphore.acquire(task, tile);
    wgmma_wait<0>();
    fence_operand(sums);
    if (panel == kPanels - 1 && part == kLastPart) free_dscores(iteration);
    add_to_memory(sums, task, tile, part * kAtOnce, panel * kPanelColumns);
  }
  template <class Meanwhile>
  REGARD_DEVICE void make_dq(const BackwardTask& task, const RowTile& tile, int iteration,
                             Meanwhile meanwhile) {
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll 1
      for (int part = 0; part < kWhole; ++part) {
        make_part<kAtOnce>(task, tile, iteration, panel, part, meanwhile);
      }
      if constexpr (kRest > 0) make_part<kRest>(task, tile, iteration, panel, kWhole, meanwhile);
    }
  }
};

}  // namespace regard
