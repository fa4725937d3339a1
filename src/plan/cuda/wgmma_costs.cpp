// Tiles of wgmma's forward pass in 16 bits, chosen by a model of their time.
//
// A block takes, for each row of a tile, `of_key` for each key of the blocks of keys that the tile
// visits (whole blocks), `first` for each key of one block, because nothing hides the first
// product's wait, and a time that depends on the number of rows alone. The unit is what a key takes
// in the longest blocks. Small blocks leave less of the last one empty, and the first one is there
// sooner; long blocks take less time for each key.
//
// The numbers were fitted on an H100 to the times of six to eleven tilings of 230 problems (D 32 to
// 256, 8 to 928 heads, 40 to 2048 keys). The tiling that the model prefers took, on geometric mean,
// 1.004 (up to D 64), 1.006 (up to D 128), 1.002 (up to D 192) and 1.005 (up to D 256, seven
// problems) times what the fastest one took.
#include <cmath>
#include <optional>
#include <span>

#include "plan/cuda/config_members.hpp"
#include "plan/cuda/families.hpp"
#include "plan/cuda/kernel/wgmma_layout.h"
#include "plan/cuda/visited_keys.hpp"

namespace regard {
namespace {

struct Candidate {
  int rows, keys, stages;
  double of_key;
};

// The tilings for head sizes up to `columns`.
struct Candidates {
  int columns;
  double first;  // of a key of a block
  std::span<const Candidate> tilings;
};

constexpr Candidate kTo64[] = {{192, 128, 3, 1.00}, {192, 112, 3, 1.00}, {192, 96, 3, 1.04},
                               {192, 80, 4, 1.08},  {192, 64, 4, 1.15},  {256, 64, 4, 1.06},
                               {128, 128, 3, 1.22}, {128, 96, 3, 1.33},  {128, 80, 4, 1.39},
                               {128, 64, 4, 1.53}};
constexpr Candidate kTo128[] = {{128, 128, 2, 1.00},
                                {128, 96, 3, 1.00},
                                {128, 80, 3, 1.03},
                                {128, 64, 4, 1.09},
                                {128, 48, 4, 1.20}};
// A third stage of 64 keys takes the room of a second tile of Q, which short tiles need more.
constexpr Candidate kTo192[] = {{128, 96, 2, 1.00},
                                {128, 80, 2, 1.00},
                                {128, 64, 2, 1.01},
                                {128, 64, 3, 1.01},
                                {128, 48, 3, 1.06}};
constexpr Candidate kTo256[] = {{128, 64, 2, 1.00}, {128, 48, 3, 1.03}};
constexpr int64 kKeysOfTwoStages = 256, kKeysUnderIntervals = 512;

int64 row_tiles(const TilingRequest& r, int rows) {
  return r.heads * divide_up(r.rows, int64(rows));
}

constexpr Candidates kCandidates[] = {
    {64, 1.1, kTo64}, {128, 0.85, kTo128}, {192, 1.3, kTo192}, {256, 0.5, kTo256}};

double fixed_of(int rows) { return rows == 128 ? 71 : rows == 192 ? 75 : 61; }

// Under intervals. Warpgroups skip blocks that none of their rows sees, if a block has at most as
// many keys as a warpgroup has rows, except in packed batches.
VisitedKeys visited_keys(const KernelConfig& c, const TilingRequest& r, const Candidate& t) {
  const int64 step = t.keys <= kWarpgroupRows && !c.varlen ? kWarpgroupRows : t.rows;
  return visited_keys(r.mask, r.mean_rows, r.mean_keys, {.rows = t.rows, .keys = t.keys}, step);
}

// On the multiprocessor that has most tiles. Equally long ones end in waves; under intervals the
// longest begin first, and the others fill the gaps.
double cost_of(const KernelConfig& c, const TilingRequest& r, const Candidates& of,
               const Candidate& t) {
  constexpr double kLongest = 0.75;
  const double blocks = double(larger<int64>(r.multiprocessors, 1)), heads = double(r.heads);
  const double start = of.first * t.keys + fixed_of(t.rows);
  if (c.features.interval) {
    const VisitedKeys keys = visited_keys(c, r, t);
    const double tiles = double(divide_up(r.mean_rows, int64(t.rows)));
    return t.rows * ((t.of_key * keys.all + start * tiles) * heads / blocks +
                     kLongest * (t.of_key * keys.most + start));
  }
  // Lengths of packed sequences end anywhere in a tile.
  const bool any = r.mean_keys < r.keys || r.mean_rows < r.rows;
  const double keys =
      any ? double(r.mean_keys) + t.keys / 2.0 : double(round_up(r.keys, int64(t.keys)));
  const double tiles = any && r.mean_rows > t.rows ? double(r.mean_rows) / t.rows + 0.5
                                                   : double(divide_up(r.mean_rows, int64(t.rows)));
  return t.rows * (t.of_key * keys + start) * std::ceil(heads * tiles / blocks);
}

// Measured without score terms. Causal masks: up to 1024 keys; up to 64 columns not packed, and of
// more than 512 rows, few heads ((45, 3, 788 / 788, 64) 49.9 us, and 54.1 with the model).
bool is_known(const KernelConfig& c, const TilingRequest& r, int64 columns) {
  constexpr int64 kKeys = 2048, kCausalKeys = 1024, kCausalRows = 512, kWideKeys = 1024;
  constexpr int64 kCausalColumns = 192, kPackedColumns = 192;
  const Features& f = c.features;
  if (c.products != Products::direct || r.mean_rows == 0 || r.mean_keys == 0) return false;
  if (!is_within(f, {.sink = columns > 64, .interval = true, .signed_scale = true})) return false;
  if (columns > 128 && smaller(r.dim, r.dim_v) <= 128) return false;
  if (f.interval) {
    if (larger(r.rows, r.keys) > kCausalKeys) return false;
    if (columns > 64) return columns <= kCausalColumns;
    const bool few = row_tiles(r, 2 * kWarpgroupRows) <= 5 * r.multiprocessors;
    return !c.varlen && (few || r.rows <= kCausalRows);
  }
  if (c.varlen && columns > kPackedColumns) return false;
  return r.keys <= (columns <= 64 ? kKeys : kWideKeys);
}

// 256 rows: of a sequence whose out TMA stores, and where so many tiles share out no keys.
bool may_have(const KernelConfig& c, const TilingRequest& r, const Candidate& t, int64 columns) {
  if (t.rows > 128 && r.rows <= 128) return false;
  if (t.keys < 64 && c.features.interval) return false;  // never the fastest of a causal problem
  if (t.rows > 192) {
    return !c.varlen && c.out_by_tma && 4 * row_tiles(r, t.rows) >= 3 * r.multiprocessors;
  }
  const bool wide_64 = columns > 128 && columns <= 192 && t.keys == 64;
  const int64 keys = c.features.interval ? kKeysUnderIntervals : kKeysOfTwoStages;
  return !wide_64 || (t.stages == 2) == (r.keys <= keys);
}

}  // namespace

std::optional<Tiling> cheapest_wgmma_tiling(const KernelConfig& c, const TilingRequest& r) {
  const int64 columns = larger(r.dim, r.dim_v);
  if (!is_known(c, r, columns)) return {};
  for (const Candidates& of : kCandidates) {
    if (columns > of.columns) continue;
    const Candidate* best = nullptr;
    double least = 0;
    for (const Candidate& t : of.tilings) {
      if (!may_have(c, r, t, columns)) continue;
      const double cost = cost_of(c, r, of, t);
      if (!best || cost < least) best = &t, least = cost;
    }
    return Tiling{.rows = best->rows, .keys = best->keys, .stages = best->stages};
  }
  return {};
}

}  // namespace regard
