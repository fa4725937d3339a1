// stream_k: which keys of which heads a block has.
//
// A head is that of a tile of rows: a key head of a batch entry (pack_gqa), or a query head. Its
// visible keys are counted in units, each a tile of keys for each key warp, and kStart units come
// first, for the time of beginning and ending a head. The units of all heads, one head after
// another, are dealt to the blocks in equal shares. A share that would begin or end within a head's
// first kStart units does so in front of the head. A head without rows has no units. All heads of a
// batch entry have equally many.
#pragma once

#include "cuda/kernels/tile/mma/forward_tile.cuh"

namespace regard {

// The slots of a tile's parts: `step` apart; the first may be `first_offset` further on.
struct PartSlots {
  int first;
  int count;
  int step = 1;
  int first_offset = 0;

  REGARD_DEVICE int at(int n) const { return first + n * step + (n == 0 ? first_offset : 0); }
};

// How many units each block has: equally many, except that the first `larger_shares` blocks have
// one more.
struct EqualShares {
  int each = 0, larger_shares = 0;

  REGARD_DEVICE EqualShares(int units, int blocks)
      : each(units / blocks), larger_shares(units - each * blocks) {}
  REGARD_DEVICE int begin_of(int block) const {
    return block * each + smaller(block, larger_shares);
  }
  REGARD_DEVICE int block_of(int unit) const {
    const int in_larger = larger_shares * (each + 1);
    return unit < in_larger ? unit / (each + 1) : larger_shares + (unit - in_larger) / each;
  }
};

template <KernelConfig kConfig>
struct KeyShares {
  using Tile = ForwardTileMma<kConfig>;
  static constexpr bool kVaries =
      kConfig.varlen || (kConfig.features.interval && kConfig.features.positions);
  static constexpr int kWarps = kConfig.tiling.warps, kStart = kStreamStart;

  // A head and the units of it that the block has. Units are counted over all heads.
  struct Part {
    int entry, head;     // of the batch, and of the entry
    int first_of_entry;  // units
    int first_of_head, end_of_head;
    int begin, end;

    REGARD_DEVICE bool exists() const { return begin < end; }
    REGARD_DEVICE bool began_before() const { return begin > first_of_head; }
    REGARD_DEVICE bool ends_later() const { return end < end_of_head; }
    REGARD_DEVICE bool is_whole() const { return !began_before() && !ends_later(); }
  };

  const KernelParams& params;
  const int heads = int(params.by.entry.value);  // of a batch entry
  int entry = 0, first_of_entry = 0;             // of the first unit
  EqualShares shares{0, 1};
  int begin = 0, end = 0;  // of the share, as dealt

  REGARD_DEVICE explicit KeyShares(const KernelParams& kernel_params) : params(kernel_params) {
    if constexpr (kVaries) {
      find_among_entries();
    } else {
      const int of_entry = units_of_head(0) * heads;
      deal(of_entry * int(params.problem.sizes.batch));
      if (of_entry == 0) return;
      entry = begin / of_entry;
      first_of_entry = entry * of_entry;
    }
  }

  REGARD_DEVICE Tile tile_of(int b, int head) const {
    const BlockCoords place{.head = b * heads + head, .tile = 0, .split = 0};
    return Tile(params, place, Divided{b, head});
  }
  REGARD_DEVICE int units_of_head(int b) const {
    const Tile tile = tile_of(b, 0);
    if (tile.row_count == 0) return 0;
    const ShortInterval tiles = tile.key_tiles();
    const int keys = (larger(tiles.end - tiles.begin, 0) + Tile::kKeyWarps - 1) / Tile::kKeyWarps;
    return kStart + keys;
  }
  REGARD_DEVICE void deal(int units) {
    shares = EqualShares(units, params.splits);
    begin = shares.begin_of(block_index());
    end = shares.begin_of(block_index() + 1);
  }

  // The sums of units before each thread's entries; the thread that has the first unit of the share
  // tells its entry.
  REGARD_DEVICE void find_among_entries() {
    const SharedAddress sums = shared_address(&shared_memory<uint8>()), found = sums + kWarps * 8;
    const int batch = int(params.problem.sizes.batch);
    const int each = (batch + kWarps * 32 - 1) / (kWarps * 32);
    const int first = smaller(thread_index() * each, batch), last = smaller(first + each, batch);
    int own = 0;
    for (int b = first; b < last; ++b) own += units_of_head(b) * heads;
    int before = sum_of_lower_lanes(own), total = 0;
    if (lane_index() == 31) store_shared_32(sums + warp_index() * 4, uint32(before + own));
    sync_block();
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const int sum = int(load_shared_32(sums + warp * 4));
      if (warp < warp_index()) before += sum;
      total += sum;
    }
    deal(total);
    if (begin < end && begin >= before && begin < before + own) {
      int b = first;
      for (int units; (units = units_of_head(b) * heads) <= begin - before && b < last - 1; ++b) {
        before += units;
      }
      store_shared_64(found, uint32(b), uint32(before));
    }
    sync_block();
    if (begin < end) {
      entry = int(load_shared_32(found));
      first_of_entry = int(load_shared_32(found + 4));
    }
    sync_block();  // Q and keys take the place
  }
  static REGARD_DEVICE int sum_of_lower_lanes(int own) {
    int sum = own;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = shuffle(sum, larger(lane_index() - distance, 0));
      if (lane_index() >= distance) sum += other;
    }
    return sum - own;
  }

  // ----------------------------------------------------------------------------------------- parts

  REGARD_DEVICE Part first_part() const { return part_at(begin, entry, first_of_entry); }
  REGARD_DEVICE Part next(const Part& part) const {
    return part_at(part.end_of_head, part.entry, part.first_of_entry);
  }
  // The part that begins with this unit, which is in entry b or behind it. A head that goes on in
  // the next block has no next part: its end is not below the share's. No entry has it if lengths
  // change while the kernel runs.
  REGARD_DEVICE Part part_at(int unit, int b, int first) const {
    if (unit >= end) return {};
    int of_head;
    while (of_head = units_of_head(b), unit - first >= of_head * heads) {
      first += of_head * heads;
      if (++b == int(params.problem.sizes.batch)) return {};
    }
    const int head = (unit - first) / of_head, first_of_head = first + head * of_head;
    return {.entry = b,
            .head = head,
            .first_of_entry = first,
            .first_of_head = first_of_head,
            .end_of_head = first_of_head + of_head,
            .begin = cut(unit, first_of_head),
            .end = cut(smaller(end, first_of_head + of_head), first_of_head)};
  }
  static REGARD_DEVICE int cut(int unit, int first_of_head) {
    return unit < first_of_head + kStart ? first_of_head : unit;
  }
  REGARD_DEVICE Tile tile_of(const Part& part) const { return tile_of(part.entry, part.head); }
  REGARD_DEVICE ShortInterval key_tiles_of(const Part& part, const Tile& tile) const {
    const ShortInterval all = tile.key_tiles();
    const int first = larger(part.begin - part.first_of_head - kStart, 0) * Tile::kKeyWarps;
    const int last = (part.end - part.first_of_head - kStart) * Tile::kKeyWarps;
    return {all.begin + first, smaller(all.end, all.begin + last)};
  }
  // A block has two parts of heads at most: at the beginning of its share, and at the end.
  REGARD_DEVICE int slot_of(const Part& part) const {
    return 2 * int(block_index()) + (part.first_of_head >= begin ? 1 : 0);
  }
  // The parts of a head that ends in this block.
  REGARD_DEVICE PartSlots slots_of(const Part& part) const {
    const int first = shares.block_of(part.first_of_head + kStart - 1);
    return {.first = 2 * first,
            .count = int(block_index()) - first + 1,
            .step = 2,
            .first_offset = part.first_of_head >= shares.begin_of(first) ? 1 : 0};
  }
};

}  // namespace regard
