// What the tiles of a forward pass visit.
#pragma once

#include "plan/cuda/tiling.hpp"

namespace regard {

// Keys in whole blocks: of the tiles of a head together, and of the tile that visits most.
struct VisitedKeys {
  double all = 0, most = 0;
};

// The visited keys of a head of so many rows and keys. Each `step` rows of a tile skip the blocks
// that none of them sees; the tile takes the mean of its steps.
inline VisitedKeys visited_keys(const MaskParams& mask, int64 rows, int64 keys, const Tiling& t,
                                int64 step) {
  VisitedKeys found;
  for (int64 first = 0; first < rows; first += t.rows) {
    double of_tile = 0;
    for (int64 row = first; row < first + t.rows; row += step) {
      const int64 last = smaller(row + step, rows) - 1;
      const Interval seen{visible_keys(mask, smaller(row, last), rows, keys).begin,
                          visible_keys(mask, last, rows, keys).end};
      if (seen.empty()) continue;
      of_tile += double(step * t.keys) *
                 double(divide_up(seen.end, int64(t.keys)) - seen.begin / t.keys) / t.rows;
    }
    found.all += of_tile;
    found.most = larger(found.most, of_tile);
  }
  return found;
}

}  // namespace regard
