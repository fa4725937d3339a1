// Tilings of short f32 problems, and the family of a forward pass, chosen by models of their time.
//
// Times are in microseconds, for 64 columns unless stated, of an H100 behind a busy kernel.
// Forward, they were fitted to 51 random problems of up to 400 rows and keys with up to seven
// tilings each: what the model prefers took 1.03 times what the fastest tiling took, on geometric
// mean, and 1.18 times at most. Backward, above 128 columns, to 14 of up to 430.
#include <cmath>
#include <optional>

#include "plan/cuda/config_members.hpp"
#include "plan/cuda/families.hpp"
#include "plan/cuda/visited_keys.hpp"

namespace regard {
namespace {

int64 columns_of(const TilingRequest& r) { return larger(r.dim, r.dim_v); }

// Other terms than intervals were not measured, but change nothing of a tile's size. Rows that have
// positions may see anything.
bool is_short(const Features& f, const TilingRequest& r, int64 most_rows, int64 most_keys) {
  return !f.positions && r.mean_rows > 0 && r.mean_keys > 0 && r.rows <= most_rows &&
         r.keys <= most_keys;
}

// ------------------------------------------------------------------------------------ forward

struct Forward {
  Family family;
  int least, most;  // columns
  Tiling tiling;
  double of_key;  // nanoseconds that a row of a tile takes for a key, of a multiprocessor's time
  double of_step = 0;  // mma: for which a block of keys keeps a tile waiting
};

// Two or four warps with 16 rows each are fastest where tiles are many. Warps that share rows, each
// with a part of the columns, wait for less.
constexpr Tiling kTwoWarps{.rows = 32, .keys = 16, .warps = 2, .stages = 1};
constexpr Tiling kNarrow{.rows = 32, .keys = 32, .warps = 2, .stages = 1};
constexpr Tiling kHigh{.rows = 64, .keys = 16, .warps = 4, .stages = 1};
constexpr Tiling kHighNarrow{.rows = 64, .keys = 32, .warps = 4, .stages = 1};
constexpr Tiling kHalves{.rows = 32, .keys = 16, .warps = 4, .stages = 1, .slices = 2};
constexpr Tiling kQuarters{.rows = 16, .keys = 16, .warps = 4, .stages = 1, .slices = 4};

constexpr Tiling of_wgmma(int keys, int stages) {
  return {.rows = 128, .keys = keys, .stages = stages};
}

constexpr Forward kForward[] = {
    {Family::mma, 1, 64, kNarrow, 0.56, 0.87},
    {Family::mma, 1, 64, kHighNarrow, 0.52, 0.70},
    {Family::mma, 1, 64, kHalves, 1.24, 0.39},
    {Family::mma, 65, 128, kTwoWarps, 0.72, 0.42},
    {Family::mma, 65, 128, kNarrow, 0.62, 0.96},
    {Family::mma, 65, 128, kHigh, 0.62, 0.48},
    {Family::mma, 65, 128, kHalves, 1.15, 0.25},
    {Family::mma, 65, 128, kQuarters, 2.07, 0.22},
    {Family::mma, 129, 192, kTwoWarps, 0.64, 0.50},
    {Family::mma, 129, 192, kHigh, 0.59, 0.51},
    {Family::mma, 129, 192, kHalves, 0.80, 0.40},
    {Family::mma, 129, 192, kQuarters, 1.79, 0.28},
    {Family::mma, 193, 256, kTwoWarps, 0.91, 0.64},
    {Family::mma, 193, 256, kHigh, 0.72, 0.70},
    {Family::mma, 193, 256, kHalves, 1.07, 0.47},
    {Family::mma, 193, 256, kQuarters, 1.93, 0.28},
    {Family::wgmma, 1, 64, of_wgmma(128, 2), 0.10},
    {Family::wgmma, 1, 64, of_wgmma(64, 2), 0.15},
    {Family::wgmma, 65, 128, of_wgmma(64, 2), 0.14},
    {Family::wgmma, 65, 128, of_wgmma(48, 2), 0.15},
    {Family::wgmma, 129, 192, of_wgmma(64, 1), 0.11},
    {Family::wgmma, 193, 224, of_wgmma(48, 1), 0.16},
    {Family::wgmma, 225, 256, of_wgmma(32, 1), 0.18},
};

struct Visits {
  double tiles, keys, most;  // of a head; `most`: of the tile that visits most, of any sequence
};

// The last tile of a packed sequence that may have several is half full on average.
Visits visits_of(const TilingRequest& r, const Tiling& t) {
  const double whole = double(divide_up(r.mean_rows, int64(t.rows)));
  const bool any = r.mean_rows < r.rows && r.rows > t.rows;
  const double tiles = any ? double(r.mean_rows) / t.rows + 0.5 : whole;
  return {tiles, visited_keys(r.mask, r.mean_rows, r.mean_keys, t, t.rows).all * tiles / whole,
          visited_keys(r.mask, r.rows, r.keys, t, t.rows).most};
}

// A multiprocessor has several tiles at once. Together they take what its units take; a single one
// waits for each of its blocks of keys.
double time_of_mma(const Forward& of, const TilingRequest& r, double heads) {
  constexpr double kCall = 4.3, kTile = 0.015;  // of a row
  const Visits v = visits_of(r, of.tiling);
  const double columns = double(columns_of(r)) / 64;
  const double work = 1e-3 * of.of_key * v.keys + kTile * v.tiles;
  return kCall + columns * (of.of_step * v.most / of.tiling.keys + heads * of.tiling.rows * work);
}

// The split into parts reads and writes 8 bytes an element. A tile's start and end take as long as
// some blocks of keys. Under intervals and in packed batches tiles are unequal: the longest begin
// first, and the others fill the gaps.
double time_of_wgmma(const Forward& of, const TilingRequest& r, bool interval, double heads) {
  constexpr double kCall = 5.3, kBytes = 2.2e6, kBlocks = 3.3;
  const Visits v = visits_of(r, of.tiling);
  const double of_key = 1e-3 * of.of_key * double(columns_of(r)) / 64 * of.tiling.rows;
  const auto time = [&](double keys) { return of_key * (keys + kBlocks * of.tiling.keys); };
  const double elements = double(r.heads * r.mean_rows + 2 * r.heads_kv * r.mean_keys);
  const double split = 8 * elements * double(columns_of(r)) / kBytes;
  const bool equal = !interval && r.mean_rows == r.rows && r.mean_keys == r.keys;
  const double tiles = heads * v.tiles, each = time(v.keys / v.tiles);
  return kCall + split + (equal ? std::ceil(tiles) * each : tiles * each + 0.5 * time(v.most));
}

double time_of(const Forward& of, const TilingRequest& r, bool interval) {
  const double heads = double(r.heads) / double(larger<int64>(r.multiprocessors, 1));
  return of.family == Family::mma ? time_of_mma(of, r, heads)
                                  : time_of_wgmma(of, r, interval, heads);
}

// ----------------------------------------------------------------------------------- backward

struct Backward {
  Tiling tiling;
  double of_step;  // that a tile of keys takes for a tile of rows, for 256 columns
};

constexpr Backward kBackward[] = {
    {{.rows = 32, .keys = 64, .warps = 8, .stages = 1, .slices = 2}, 17.3},
    {{.rows = 64, .keys = 32, .warps = 8, .stages = 1, .slices = 4}, 16.1},
    {{.rows = 32, .keys = 32, .warps = 4, .stages = 1, .slices = 2}, 14.3},
};

// The time of a head's tiles of keys together, and of the longest one.
struct KeyTiles {
  double all = 0, longest = 0;
};

// The times for sequences of so many rows and keys. Loading and storing a tile take kStart.
KeyTiles key_tiles(const Backward& of, const TilingRequest& r, int64 rows, int64 keys) {
  constexpr double kStart = 22;
  KeyTiles found;
  const int64 group = r.heads / larger<int64>(r.heads_kv, 1), step = of.tiling.rows;
  for (int64 first = 0; first < keys; first += of.tiling.keys) {
    const int64 last = smaller(first + of.tiling.keys, keys) - 1;
    const Interval seen{visible_queries(r.mask, first, rows, keys).begin,
                        visible_queries(r.mask, last, rows, keys).end};
    const int64 steps = seen.empty() ? 0 : divide_up(seen.end, step) - seen.begin / step;
    const double time = kStart + of.of_step * double(group * steps);
    found.all += time;
    found.longest = larger(found.longest, time);
  }
  return found;
}

// A multiprocessor has one block at a time, of the smallest tile two up to 192 columns, which
// disturb each other little. Equal tiles end in waves.
double time_of(const Backward& of, const TilingRequest& r, bool interval) {
  constexpr double kBoth = 1.17;
  const int64 columns = round_up(columns_of(r), 16 * of.tiling.slices);
  const bool two = of.tiling.warps == 4 && columns <= 192;
  const double at_once = double(larger<int64>(r.multiprocessors, 1) * (two ? 2 : 1));
  const KeyTiles usual = key_tiles(of, r, r.mean_rows, r.mean_keys);
  const double count = double(divide_up(r.mean_keys, int64(of.tiling.keys)));
  const double heads = double(r.heads_kv) / at_once, each = usual.all / count;
  const bool equal = !interval && r.mean_rows == r.rows && r.mean_keys == r.keys;
  const double longest = key_tiles(of, r, r.rows, r.keys).longest;
  const double time =
      equal ? std::ceil(heads * count) * each : larger(longest, heads * usual.all + 0.25 * each);
  return time * double(columns) / 256 * (two ? kBoth : 1);
}

}  // namespace

// H100, us: (2, 8, 64 / 64, 256) 19.4 -> 14.5, (2, 8, 128 / 128, 208) 27.8 -> 21.1, (11, 1, 110 /
// 110, 128) 15.2 -> 10.8, (1, 1, 130 / 130, 128) 18.9 -> 10.1; with 200 keys, higher tiles.
bool has_few_low_tiles_of_f32(const TilingRequest& r) {
  constexpr int64 kMost = 160;
  return columns_of(r) > 64 && r.rows > 32 && larger(r.rows, r.keys) <= kMost &&
         r.heads * divide_up(r.rows, 16) <= r.multiprocessors;
}

std::optional<F32Forward> cheapest_f32_forward(const Features& f, const TilingRequest& r,
                                               std::optional<Family> family) {
  // The model also preferred the fastest tiling in each of six problems of 700 to 2048 rows.
  constexpr int64 kMostRows = 2048, kMostKeys = 512;
  if (!is_short(f, r, kMostRows, kMostKeys)) return {};
  std::optional<F32Forward> best;
  double least = 0;
  for (const Forward& of : kForward) {
    if (columns_of(r) < of.least || columns_of(r) > of.most) continue;
    if (family && *family != of.family) continue;
    const double time = time_of(of, r, f.interval);
    if (!best || time < least) best = {of.family, of.tiling}, least = time;
  }
  return best;
}

std::optional<Tiling> cheapest_f32_backward(const Features& f, const TilingRequest& r) {
  constexpr int64 kMost = 512;
  if (!is_short(f, r, kMost, kMost) || columns_of(r) <= 128 || columns_of(r) > 256) return {};
  const Backward* best = nullptr;
  double least = 0;
  for (const Backward& of : kBackward) {
    const double time = time_of(of, r, f.interval);
    if (!best || time < least) best = &of, least = time;
  }
  return best->tiling;
}

}  // namespace regard
