// What the consumer warpgroups of the wgmma forward kernel share for all types (ForwardConsumer,
// F32Consumer): 64 query rows of every tile, the stages of K and V, and the products.
#pragma once

#include "cuda/kernels/tile/wgmma/forward/block_walk.cuh"
#include "cuda/kernels/tile/wgmma/forward/epilogue.cuh"
#include "cuda/kernels/tile/wgmma/products.cuh"

namespace regard {

template <KernelConfig kConfig>
struct ConsumerWarpgroup {
  using Memory = ForwardMemory<kConfig>;
  using Coords = WarpgroupCoords<kConfig>;
  static constexpr Features kOn = full_tile_features(kConfig);
  static constexpr int kRows = Memory::kRows, kKeys = Memory::kKeys, kSlots = Memory::kSlots;
  static constexpr int kParts = Memory::kParts, kKeyBlocks = Coords::kKeyBlocks;
  using Format = typename ElementOf<kParts == 1 ? kConfig.type : Type::f16>::Format;

  const KernelParams& params;
  const ForwardMaps& maps;
  const Memory memory;
  const int warpgroup;  // among the consumers
  const int warpgroup_row = warpgroup * kWarpgroupRows;
  const int warp_row = warpgroup_row + uniform(warp_index() % 4) * 16;

  typename Coords::Scores scores = {};
  typename Coords::Out out = {};
  uint32 weights[kParts][kKeys / 16][4] = {};  // P of the block before, as fragments
  Ring<Memory::kStages> keys, values;
  // Where the walk is.
  int iteration = -1;             // of the tile, among those of this thread block
  int left = 0;                   // key blocks of the tile, from the present one on
  int first_block = 0;            // of the tile
  BlockWalk<kConfig, true> walk;  // with a tile map
  ShortInterval common_keys{};    // keys that intervals show to all rows of the warpgroup
  bool has_weights = false;       // P of the block before awaits its V

  REGARD_DEVICE ConsumerWarpgroup(const KernelParams& p, const ForwardMaps& m, const Memory& shared,
                                  int index)
      : params(p), maps(m), memory(shared), warpgroup(index) {}

  // False where there is no tile left.
  REGARD_DEVICE bool next_tile() {
    ++iteration;
    mbarrier_wait(memory.query_full(iteration % kSlots), iteration / kSlots % 2);
    const ForwardTile<kConfig>& tile = memory.tile(iteration);
    left = uniform(tile.blocks);
    if (left == 0) return false;
    first_block = uniform(tile.first_block);
    if constexpr (kConfig.tile_map) walk.begin(tile);
    const ShortInterval common = Coords(params, tile, warp_row).common_keys(warpgroup_row);
    common_keys = {uniform(common.begin), uniform(common.end)};
    return true;
  }
  // The block of keys at which the walk stands.
  REGARD_DEVICE KeyBlock block() const {
    if constexpr (kConfig.tile_map) {
      const VisibleTile block = walk.block();
      return {block.index * kKeys, block.is_full};
    }
    return {(first_block + left - 1) * kKeys, true};
  }
  // With a tile map, moves to the tile's next block, if there is one.
  REGARD_DEVICE void advance(const ForwardTile<kConfig>& tile) {
    if constexpr (kConfig.tile_map) {
      if (left > 1) walk.advance(params, tile);
    }
  }
  // Whether intervals, the last key, or with a tile map mask and spans hide some pair of a block.
  REGARD_DEVICE bool is_masked(const KeyBlock& keys_of_block) const {
    return !keys_of_block.is_full || is_cut(keys_of_block.first_key);
  }
  // The same of intervals and the last key alone.
  REGARD_DEVICE bool is_cut(int first_key) const {
    return first_key < common_keys.begin || first_key + kKeys > common_keys.end;
  }

  REGARD_DEVICE void multiply_keys(int slot) {
    multiply_nt<Format, kConfig.dim, kRows, kKeys, kParts>(
        scores[0],
        descriptor_word(memory.queries(slot) + warpgroup * panel_bytes(kWarpgroupRows), 0),
        descriptor_word(memory.keys(keys.stage), 0));
    wgmma_commit();
  }
  // The first call has no P and V yet: it multiplies keys by weights of 0, and nobody reads the
  // result. Leaving it out would be a branch around a product. `panel`: the first one of V.
  template <int kBlocks>
  REGARD_DEVICE void multiply_values(Accumulator (&to)[kBlocks], bool adds, int panel = 0) {
    const uint32 b = has_weights ? descriptor_word(memory.values(values.stage), panel_bytes(kKeys))
                                 : descriptor_word(memory.keys(keys.stage), 0);
    const uint32 lo = has_weights ? part_words(kConfig.dim_v, kKeys) : 0;
    multiply_nn<Format>(to, weights, b + panel * (panel_bytes(kKeys) / 16), lo, adds);
    wgmma_commit();
  }

  REGARD_DEVICE void release(SharedAddress empty) const {
    if (lane_index() == 0) mbarrier_arrive(empty);
  }
  REGARD_DEVICE void release_values() {
    release(memory.value_empty(values.stage));
    values.advance();
  }

  REGARD_DEVICE void write_tile(int of_iteration, const WarpgroupSoftmax<kConfig>& softmax) {
    epilogue(of_iteration, softmax).write(out);
  }
  REGARD_DEVICE void write_last_tile(const WarpgroupSoftmax<kConfig>& softmax) {
    Epilogue<kConfig> last = epilogue(iteration - 1, softmax);
    const uint32 again = last.write(out);
    last.finish();
    if constexpr (kConfig.repeats_rows) last.repeat(again);
  }
  REGARD_DEVICE Epilogue<kConfig> epilogue(int of_iteration,
                                           const WarpgroupSoftmax<kConfig>& softmax) const {
    return {params, maps, memory, memory.tile(of_iteration), warp_row, softmax};
  }
};

}  // namespace regard
