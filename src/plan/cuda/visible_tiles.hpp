// How many tiles of the other side the tiles of query rows, or of keys, see.
#pragma once

#include "semantics/mask.h"

namespace regard {

struct VisibleTiles {
  int64 most, mean;

  bool equal() const { return double(mean) > 0.75 * double(most); }
};

// What the first, the middle and the last tile of `own` rows or keys see, in tiles of `other_tile`.
// interval(first, last): what those see, from the first of them to the last.
template <class IntervalOf>
VisibleTiles visible_tiles(int64 own, int64 own_tile, int64 other_tile, IntervalOf interval) {
  const auto seen = [&](int64 tile) {
    const Interval x = interval(tile * own_tile, smaller((tile + 1) * own_tile, own) - 1);
    return x.empty() ? 0 : divide_up(x.end, other_tile) - x.begin / other_tile;
  };
  const int64 last = divide_up(own, own_tile) - 1, of[] = {seen(0), seen(last / 2), seen(last)};
  return {larger(larger(of[0], of[1]), of[2]), divide_up(of[0] + of[1] + of[2], 3)};
}

}  // namespace regard
