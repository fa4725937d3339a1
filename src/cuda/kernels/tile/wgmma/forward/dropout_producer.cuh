// The dropout warpgroup of the wgmma forward kernel. Each lane generates the dropout bits of the
// same lane of every consumer warpgroup, a block of keys ahead.
#pragma once

#include "cuda/kernels/tile/wgmma/dropout_bits.cuh"
#include "cuda/kernels/tile/wgmma/forward/block_walk.cuh"

namespace regard {

template <KernelConfig kConfig>
struct ForwardDropoutProducer {
  using Memory = ForwardMemory<kConfig>;
  static constexpr int kKeys = Memory::kKeys;
  static constexpr int kRowsOfLane = 2 * consumers_of(kConfig.tiling);
  static_assert(!has_dropout_warpgroup(kConfig) || kKeys % 32 == 0);

  const KernelParams& params;
  const Memory memory;
  const int thread = thread_index() % 128;
  DropoutOf<kConfig> dropout = dropout_of<kConfig>(params.problem);
  const uint32 thresholds = dropout_thresholds(params.problem.dropout);

  // A Philox call serves a row's eight elements of a lane in 32 keys. All calls of a block at once
  // would take too many registers.
  REGARD_DEVICE void generate(uint32 (&bits)[kRowsOfLane], const ForwardTile<kConfig>& tile,
                              int first_key) const {
    const int first_row = tile.first_row + thread / 32 * 16 + lane_index() / 4;
#pragma unroll
    for (int r = 0; r < kRowsOfLane; ++r) bits[r] = 0;
#pragma unroll 1
    for (int keys = first_key; keys < first_key + kKeys; keys += 32) {
      const uint32 call = uint32(keys / 32 * 4 + lane_index() % 4);
      Philox random[kRowsOfLane];
#pragma unroll
      for (int r = 0; r < kRowsOfLane; ++r) {
        const int row = first_row + r / 2 * kWarpgroupRows + r % 2 * 8;
        random[r] = dropout_counter_of<kConfig>(params.problem, tile.b, tile.head, row, call);
      }
      draw_dropout(dropout_of_tile<kConfig>(dropout), random);
#pragma unroll
      for (int word = 0; word < 4; ++word) {
#pragma unroll
        for (int r = 0; r < kRowsOfLane; ++r) {
          append_dropout_bits(bits[r], random[r].word[word], thresholds);
        }
      }
    }
  }

  REGARD_DEVICE void run() {
    DropoutBitsWriter<Memory> writer{memory};
    for (int iteration = 0;; ++iteration) {
      const int slot = iteration % Memory::kSlots;
      mbarrier_wait(memory.query_full(slot), iteration / Memory::kSlots % 2);
      const ForwardTile<kConfig> tile = memory.tile(iteration);
      if (tile.blocks == 0) break;
      BlockWalk<kConfig> walk;
      walk.begin(tile);
#pragma unroll 1
      for (int left = tile.blocks; left > 0; --left) {
        uint32 bits[kRowsOfLane];
        generate(bits, tile, walk.block().index * kKeys);
        if (left > 1) walk.advance(params, tile);
        writer.begin();
#pragma unroll
        for (int r = 0; r < kRowsOfLane; ++r) {
          store_shared_32(memory.dropout_bits(r % 2, r / 2 * 128 + thread), bits[r]);
        }
        writer.end();
      }
    }
    writer.finish();
  }
};

}  // namespace regard
