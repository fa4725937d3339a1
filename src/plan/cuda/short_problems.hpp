// Rules for short problems that mma's tilings and the refusals of wgmma share, fitted to an H100.
#pragma once

#include "plan/cuda/tiling.hpp"
#include "problem/problem.h"

namespace regard {

// Whether rows fill little more than half a tile of wgmma, or one of 64 rows of mma, and lower
// tiles of mma are faster: for few heads, and where pairs are hidden. `heads`: for each
// multiprocessor. Figures: docs/notes/gpu-random-problems.md, "Rows between two tiles".
inline bool is_between_tiles(int64 rows, int64 keys, int64 columns, bool hides, double heads) {
  constexpr int64 kKeys = 96;
  if (rows <= 64 || rows > 96) return false;
  if (heads < 0.4) return keys <= kKeys;
  if (columns > 192) return hides && keys <= kKeys;
  if (heads <= 1.1) return false;
  if (columns <= 64 && hides) return keys <= 128 && heads < 4;
  return keys <= kKeys && heads < 2 && (hides || columns <= 96);
}

// The rows of the tiles of mma that are faster for packed sequences of different lengths, of 65
// rows and more on average, because these end anywhere in a tile of 128; 0: none are. `tests`: mask
// or spans, which with more keys than three tiles would have a map. `heads`: of the batch, for each
// multiprocessor. Figures: docs/notes/gpu-random-problems.md, "Packed sequences of 65 rows and
// more".
inline int rows_of_packed_tile(int64 rows, int64 usual_rows, int64 columns, bool hides, bool tests,
                               double heads) {
  const bool low = rows <= (tests ? 96 : 128) && usual_rows <= 96 && heads < 3;
  if (low && columns <= (hides ? 128 : 64)) return 32;
  const bool square = rows <= 192 && usual_rows <= 140 && heads < 2;
  return square && hides && columns <= 64 ? 64 : 0;
}

// Whether there are so few rows that tiles of 16, whose keys four warps share out, are faster than
// higher ones on fewer multiprocessors. `heads`: for each multiprocessor. Figures:
// docs/notes/gpu-random-problems.md, "Warps share out the keys of few tiles".
inline bool repays_shared_keys(int64 rows, int64 keys, int64 columns, bool hides, double heads) {
  constexpr int64 kLeast = 65, kFewKeys = 256;
  const double tiles = heads * double(divide_up(rows, int64(16)));
  const int64 least_keys = !hides ? kLeast : columns <= 64 ? 161 : 129;
  if (rows < kLeast || keys < least_keys || columns > 256) return false;
  if (columns > 192) return keys <= 800 && tiles <= 1;
  if (columns > 128) return !hides && keys <= kFewKeys && tiles <= 1;
  if (columns > 64) return keys <= 1200 && tiles <= 1;
  if (hides) return keys <= 2048 && tiles <= (keys < 300 ? 1.6 : keys < 700 ? 3 : 4);
  if (keys <= 512) return tiles <= (keys < 300 ? 2 : 3);
  return columns > 32 && keys <= 1200 && tiles <= 2.3;
}
// Whether a call has no terms except intervals: others were not measured.
inline bool may_share_keys(const Features& f, bool varlen) {
  return !varlen && is_plain(f) && !tests_pairs(f) && !f.dropout && !f.sink && !f.positions;
}

// Whether a window is narrower than a few tiles of mma, up to 64 columns, and the tiles are few:
// higher tiles compute mostly what the window hides. Figures: docs/notes/gpu-random-problems.md,
// "Narrow windows".
inline bool has_narrow_window(const TilingRequest& r) {
  constexpr int64 kColumns = 64, kRows = 512, kWidth = 160, kTiles = 5;
  const MaskParams& mask = r.mask;
  const int64 width = mask.left + mask.right;
  return larger(r.dim, r.dim_v) <= kColumns && mask.left >= 0 && mask.right >= 0 &&
         r.rows <= kRows && width < smaller(r.rows, kWidth) &&
         r.heads * divide_up(r.rows, 32) <= kTiles * r.multiprocessors;
}

}  // namespace regard
