// Costs of splits of keys in decoding, by measurements.
//
// Decoding waits for memory: costs are in bytes that a multiprocessor could read meanwhile. Blocks
// that run at once share the memory's bandwidth; one alone on a multiprocessor reads little more
// than the share of one. Where some multiprocessors have two blocks and others one, these are done
// early, and a part of the bandwidth idles: on an H100, 136 and 160 tiles of 4096 keys take 5 and 9
// % more than the bandwidth allows, 192 tiles 3 %.
#include "plan/cuda/decoding.hpp"

#include <cstdint>

#include "plan/cuda/facts.hpp"
#include "plan/cuda/kernel/mma_layout.h"
#include "plan/cuda/splits.hpp"

namespace regard {
namespace {

constexpr int64 kMostBlocksOfCluster = 8;  // of a portable cluster

struct Decoding {
  const KernelConfig& c;
  const Chip& chip;
  const TilingRequest& request;
  const DecodingRequest& asked;

  const Tiling& tiling = c.tiling;
  int64 tile_bytes = tiling.keys * (c.dim + c.dim_v) * int64(element_bytes(c.type));
  int64 of_block = (int64(40) << 10) * tiling.rows / 16;  // before its first tile, after its last
  int64 of_merge = 64 << 10, of_combine = 144 << 10;
  int64 on_multiprocessor = resident_blocks(c, chip);
  int64 at_once = chip.multiprocessors * on_multiprocessor;
  double multiprocessors = double(chip.multiprocessors);

  // ---------------------------------------------------------------------------------- who merges

  // What one block reads to merge the splits of a tile: only rows that exist.
  int64 bytes_of_merge(int64 splits) const {
    return smaller<int64>(request.rows, tiling.rows) * splits * partial_row_bytes(c);
  }
  // The last block: where that takes less time than a launch that all the chip works on.
  bool last_merges(int64 splits) const {
    constexpr int64 kMost = 80 << 10;
    return splits * partial_row_bytes(c) <= merge_room(c) && bytes_of_merge(splits) <= kMost;
  }
  bool has_one_tile() const { return request.rows <= tiling.rows; }
  // A cluster spares flags and parts in memory. Few numbers of splits, because each is a kernel of
  // its own. Products of f32 take longer than the merge spares. The blocks must find room next to
  // each other: on an H200, clusters of four and eight that would fill 128 of 132 multiprocessors
  // take 1.03 to 1.33 times as long as free blocks.
  bool cluster_merges(int64 splits) const {
    if (c.level < 90 || c.type == Type::f32 || !has_one_tile() || asked.continues) return false;
    if ((tiling.key_warps + 1) * tiling.rows * partial_row_bytes(c) > merge_room(c)) return false;
    const int64 blocks = asked.tiles * splits;
    if (splits == 2) return blocks <= chip.multiprocessors;
    return (splits == 4 || splits == kMostBlocksOfCluster) &&
           blocks <= chip.multiprocessors * 3 / 4;
  }

  // ------------------------------------------------------------------------------------- splits

  double cost(int64 splits) const {
    const int64 blocks = asked.tiles * splits, waves = (blocks - 1) / at_once;
    constexpr double kAlone = 0.93;  // of the time that its share of the bandwidth would take
    constexpr double kUneven = 0.12;
    const double last = double(blocks - waves * at_once) / multiprocessors;
    const double uneven = last > 1 && last < 2 ? 1 + kUneven * (2 - last) : 1;
    const double each = double(divide_up(asked.key_tiles, splits) * tile_bytes + of_block);
    const int64 merge = splits == 1 || cluster_merges(splits) ? 0
                        : last_merges(splits)                 ? of_merge + bytes_of_merge(splits)
                                                              : of_combine;
    return each * (double(waves * at_once) / multiprocessors + larger(uneven * last, kAlone)) +
           double(merge);
  }

  // Whole tiles of rows take longer to merge than few keys, and a second wave of blocks longer than
  // splits spare. H100, us, with splits, and of more heads, which have none: (2 heads, 200 rows and
  // keys, D 256) 10.4 and 8.4, (2, 360, 128) 7.9 and 6.9, (1, 512, 64) 6.1 and 4.9. In two waves
  // (2, 632, 256) 23, and wgmma 18.
  bool has_whole_tiles() const {
    constexpr int64 kRows = 64;
    return request.usual_rows > kRows;
  }
  bool is_too_short_to_merge() const {
    constexpr int64 kElements = 80000;  // of the keys of a head
    return has_whole_tiles() && request.keys * larger(request.dim, request.dim_v) <= kElements;
  }
  int64 best_splits() const {
    if (is_too_short_to_merge()) return 1;
    const int64 most = smaller(kMostSplits, asked.key_tiles / larger(2, tiling.key_warps));
    int64 best = 1;
    const auto consider = [&](int64 splits) {
      if (splits < 2 || (has_whole_tiles() && asked.tiles * splits > at_once)) return;
      if (cost(splits) < cost(best)) best = splits;
    };
    for (int64 each = 1; each <= 4; ++each) {
      consider(smaller(each * chip.multiprocessors / asked.tiles, most));
    }
    for (int64 splits = 2; splits <= smaller(most, kMostBlocksOfCluster); splits *= 2) {
      if (cluster_merges(splits)) consider(splits);
    }
    return best;
  }

  // ----------------------------------------------------------------------------------- stream-K

  // Units of a head, as key_shares.cuh counts them; one more, because a window may begin and end
  // within tiles.
  int64 units() const { return divide_up(asked.key_tiles, tiling.key_warps) + 1 + kStreamStart; }
  bool can_stream() const {
    return has_one_tile() && !asked.continues &&
           double(asked.tiles) * double(units()) <= double(INT32_MAX);
  }
  // The parts of a row must find room where they are merged. All heads of a sequence are equally
  // long, so that none has more than 1 / heads of all units; shares are rounded down, at worst to
  // half of the mean: a head meets at most 2 blocks / heads + 2 blocks.
  int64 stream_blocks() const {
    const int64 room = merge_room(c) / partial_row_bytes(c), heads = asked.tiles / asked.entries;
    const int64 each = asked.is_limited ? 1 : smaller<int64>(on_multiprocessor, 2);
    const int64 blocks = chip.multiprocessors * each;
    if (smaller(blocks, 2 * blocks / heads + 2) <= room) return blocks;
    return room >= chip.multiprocessors ? chip.multiprocessors : room;
  }
  double cost_of_stream() const {
    constexpr int64 kScan = 32 << 10;  // of lengths
    const double blocks = double(stream_blocks());
    const double each = larger(1.0, blocks / multiprocessors);
    const double heads = 1 + double(asked.tiles) / blocks;  // of a block
    const int64 bytes =
        asked.tiles * divide_up(asked.key_tiles, tiling.key_warps) * tiling.key_warps * tile_bytes;
    return double(bytes) / smaller(blocks, multiprocessors) + each * heads * double(of_block) +
           double(of_merge + bytes_of_merge(int64(blocks) / asked.tiles + 1)) +
           (asked.lengths_vary ? kScan : 0);
  }
  // Where lengths vary, other splits wait for the longest sequence, while these costs are of equal
  // lengths. Where they do not, measured gains are smaller than computed ones.
  bool repays_stream(int64 splits) const {
    constexpr double kMostIfUneven = 1.15, kMostIfEqual = 0.9;
    const bool may_be_uneven = asked.lengths_vary && asked.entries > 1;
    return can_stream() &&
           cost_of_stream() <= (may_be_uneven ? kMostIfUneven : kMostIfEqual) * cost(splits);
  }
};

}  // namespace

DecodingSplits splits_of_decoding(const KernelConfig& c, const Chip& chip,
                                  const TilingRequest& request, const DecodingRequest& asked) {
  if (asked.tiles == 0) return {};
  const Decoding decoding{c, chip, request, asked};
  const int64 splits = decoding.best_splits();
  if (decoding.repays_stream(splits)) {
    return {.splits = int(decoding.stream_blocks()), .stream_k = true};
  }
  DecodingSplits found{.splits = int(splits)};
  if (splits == 1 || asked.continues) return found;
  if (decoding.cluster_merges(splits)) {
    found.cluster = int(splits);
  } else {
    found.last_merges = decoding.last_merges(splits);
  }
  return found;
}

}  // namespace regard
