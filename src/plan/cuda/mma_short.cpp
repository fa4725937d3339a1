// Tilings of the mma family for short sequences, where a block has one tile or a few.
//
// The times are those of H100 GPUs behind a busy kernel, in microseconds, (batch, heads, rows /
// keys, head size): with the tiling that mma.cpp has for longer sequences -> with the one chosen
// here.
#include <optional>

#include "plan/cuda/families.hpp"
#include "plan/cuda/short_problems.hpp"

namespace regard {
namespace {

// Bytes of a multiprocessor's shared memory, which hold three blocks whose warps share out keys:
// those of Hopper, where these were measured.
constexpr int64 kRoomOfMeasured = 200 << 10;

struct Short {
  Short(const KernelConfig& c, const TilingRequest& request)
      : columns(larger(request.dim, request.dim_v)),
        rows(request.rows),
        usual_rows(request.usual_rows),
        keys(request.keys),
        tiles(request.heads),
        multiprocessors(request.multiprocessors),
        pack_gqa(c.pack_gqa),
        packed(request.mean_rows < request.rows),
        has_tests(tests_pairs(c.features)),
        may_share_keys(request.limits.multiprocessor >= kRoomOfMeasured &&
                       regard::may_share_keys(c.features, c.varlen)),
        narrow(c.features.interval && !c.varlen && !c.features.positions && !c.pack_gqa &&
               has_narrow_window(request)),
        hides(c.features.interval || c.features.bias || has_tests) {}

  bool fills(double times) const { return double(tiles) >= times * double(multiprocessors); }
  bool is_between_tiles() const {
    return regard::is_between_tiles(rows, keys, columns, hides,
                                    double(tiles) / double(multiprocessors));
  }
  bool repays_shared_keys() const {
    return may_share_keys && regard::repays_shared_keys(rows, keys, columns, hides,
                                                        double(tiles) / double(multiprocessors));
  }
  int rows_of_packed_tile() const {
    return regard::rows_of_packed_tile(larger(rows, keys), usual_rows, columns, hides, has_tests,
                                       double(tiles) / double(multiprocessors));
  }
  // Whether most packed sequences would fill a quarter of it at most. With half of it filled,
  // (10, 4, 42 / 42, 64) packed took 5.6 -> 4.2.
  bool is_too_high(const Tiling& t) const { return t.rows >= 4 * round_up(usual_rows, 16); }
  // Mask and spans would have a tile map, which is one more launch.
  bool needs_map(const Tiling& t) const { return has_tests && keys > 3 * t.keys; }

  int64 columns, rows, usual_rows, keys;
  int64 tiles;  // heads of the batch: one holds all of its rows
  int64 multiprocessors;
  bool pack_gqa, packed, has_tests, may_share_keys, narrow;
  bool hides;  // pairs: a block without key warps computes rows that are not finite again itself
};

constexpr Tiling kLow{.rows = 32, .keys = 32, .warps = 2, .stages = 1};
constexpr Tiling kSquare{.rows = 64, .keys = 64, .warps = 4, .stages = 1};
constexpr Tiling kSliced{.rows = 16, .keys = 32, .warps = 4, .stages = 1, .slices = 4};

// Up to 16 rows: one warp a block, because many blocks hide each other's waits, and no parts of
// warps are merged. (256, 16/4, 1 / 64, 128) 18.7 -> 11.0, (64, 16, 12 / 12, 64) 13.0 -> 4.4,
// (32, 8, 12 / 64, 200) 12.5 -> 8.2; 256 keys: level. Few heads: (16, 8, 12 / 64, 64) 4.3 -> 3.8.
std::optional<Tiling> of_one_warp(const Short& s) {
  constexpr int64 kKeys = 128, kFewKeys = 64, kMoreKeys = 320, kWide = 128;
  // (64, 32/8, 1 / 200, 64) 11.3 -> 9.9; 256 and 1024 heads: level.
  if (s.columns <= 64 && s.keys > kKeys && s.keys <= kMoreKeys && s.fills(3) && !s.fills(6)) {
    return Tiling{.rows = 16, .keys = 64, .warps = 1, .stages = 1};
  }
  const bool fits = s.fills(2)              ? s.keys <= kKeys
                    : s.columns > kWide     ? s.hides && s.keys <= 16
                    : s.fills(1) || s.hides ? s.keys <= kFewKeys
                                            : s.keys <= 16 && !s.pack_gqa;
  if (!fits) return {};
  const bool narrow = s.keys <= 16 || (s.fills(4) && (s.columns <= 64 || s.columns > kWide));
  return Tiling{.rows = 16,
                .keys = narrow ? 16 : 32,
                .warps = 1,
                .stages = narrow && s.columns <= 64 ? 2 : 1};
}

// 17 to 32 rows: two warps with all keys instead of four that split them. (64, 16, 31 / 31, 128)
// 30.3 -> 10.0, (32, 8, 24 / 300, 128) 18.3 -> 15.9, (8, 8, 24 / 24, 64) 4.7 -> 3.4. One warp of 32
// rows reads half as many fragments of keys: (64, 16, 24 / 64, 64) 9.3 -> 7.9, but (32, 8, ...) 4.0
// -> 5.3.
std::optional<Tiling> of_two_warps(const KernelConfig& c, const Short& s) {
  constexpr int64 kKeys = 512, kFewKeys = 128, kWide = 128;
  if (s.keys > (s.fills(0.5) ? kKeys : kFewKeys)) return {};
  const bool plain = !c.features.softcap && !c.features.bias && !s.has_tests;
  const bool one =
      plain && s.fills(4) && s.columns > 32 && s.columns <= (s.keys <= 32 ? kWide : 64);
  const bool wide = s.columns > kWide || s.keys <= 32 || one;
  return Tiling{.rows = 32, .keys = wide ? 32 : 64, .warps = one ? 1 : 2, .stages = 1};
}

// 17 to 32 rows and more keys, as in decoding: where K and V are few bytes, many blocks read them
// twice sooner than half as many once. (3, 75/3, 1 / 311, 56) 7.6 -> 5.4, (4, 60/2, 1 / 1086, 128)
// 12.2 -> 10.1, (1, 32/1, 1 / 32768, 64) 15.3 -> 13.4. Above 128 columns 32 rows leave no room for
// several tiles at once: (64, 24/1, 1 / 700, 200) 34.8 -> 19.1.
std::optional<Tiling> of_two_tiles(const Short& s) {
  constexpr int64 kWide = 128;
  constexpr double kBytes = 16 << 20;
  if (s.columns > kWide) {
    return Tiling{.rows = 16, .keys = 16, .warps = 4, .stages = 3, .key_warps = 4};
  }
  if (4.0 * double(s.tiles) * double(s.keys) * double(s.columns) > kBytes) return {};
  return Tiling{.rows = 16, .keys = 16, .warps = 8, .stages = 2, .key_warps = 8};
}

// f32, 33 and more rows. Few tiles are as low as they can be.
std::optional<Tiling> of_f32(const KernelConfig& c, TilingRequest request) {
  if (request.rows <= 32) return {};
  if (has_few_low_tiles_of_f32(request)) {
    return Tiling{.rows = 16, .keys = 16, .warps = 4, .stages = 1, .slices = 4};
  }
  if (c.products != Products::tf32x3) return {};
  if (c.pack_gqa) request.mask = {};  // which speaks of one head's rows
  const auto found = cheapest_f32_forward(c.features, request, Family::mma);
  return found ? std::optional(found->tiling) : std::nullopt;
}

// 33 and more rows above 192 columns: two warps where heads are few, or pairs hidden, or rows few.
// (8, 21, 43 / 43, 256) 9.3 -> 8.3, (1, 56/4, 4 / 287, 216) causal 16.9 -> 11.8, (10, 33/3, 64 /
// 64, 240) causal 19.3 -> 16.1, (14, 60/2, 34 / 34, 208) causal 27.6 -> 26.1; packed (33, 23, 74 at
// most, 240) 40.9 -> 30.6, (26, 32/4, 45 at most, 232) 28.1 -> 20.6. Many heads: (64, 16, 40 / 40,
// 256) causal 46.3 -> 41.8, (25, 28/14, 50 / 50, 224) 33.0 -> 30.5 with 64 rows.
std::optional<Tiling> of_wide_heads(const Short& s) {
  constexpr int64 kKeys = 512, kManyHeads = 7;
  constexpr Tiling kLowest{.rows = 32, .keys = 16, .warps = 2, .stages = 1};
  const bool is_short = s.packed && s.usual_rows <= (s.hides ? 128 : 64);
  if (s.keys > kKeys || (s.rows > 64 && !is_short)) return {};
  if (!s.fills(0.5)) return kLowest;
  if (s.rows > 64 || (is_short && (s.hides || s.fills(4)))) return kLow;
  if (s.keys > 64) return s.fills(4.5) ? std::nullopt : std::optional(kSquare);
  if ((s.rows <= 48 || s.hides) && !s.fills(kManyHeads)) return kLowest;
  return kSquare;
}

// Above 256 columns, 33 and more rows. Two blocks of four warps: (64, 64, 48 / 48, 512) 237 -> 217,
// (4, 16, 1024 / 100, 512) 129 -> 123, (16, 16, 128 / 40, 512) 37 -> 35; D 320: level.
std::optional<Tiling> of_widest_heads(const KernelConfig& c, const Short& s) {
  constexpr int64 kFew = 100;
  if (c.kernel == Kernel::backward || c.type == Type::f32) return {};
  if (s.rows <= 32 || smaller(s.rows, s.keys) > kFew) return {};
  return Tiling{.rows = 32, .keys = 32, .warps = 4, .stages = 1, .slices = 2, .min_blocks = 2};
}

// 33 to 96 rows above 128 columns, so few that they all run at once: four warps with a part of the
// columns each. (2, 10, 95 / 95, 248) 10.7 -> 6.6, (4, 3, 33 / 33, 256) causal 6.7 -> 4.7, (3, 12,
// 33 / 33, 184) causal 6.5 -> 5.1; with 32 rows (33, 2, 54 / 54, 256) 7.0 -> 5.3, (5, 24, 58 / 58,
// 152) causal 6.6 -> 6.3. Not (4, 24, 33 / 33, 248): 7.7, with two warps 7.2 (H200).
std::optional<Tiling> of_few_wide_heads(const Short& s) {
  constexpr int64 kRows = 96, kKeys = 128, kWide = 128, kWider = 192;
  if (s.columns <= kWide || s.rows > kRows || s.keys > kKeys || s.packed) return {};
  if (s.tiles * divide_up(s.rows, 16) <= s.multiprocessors) {
    return kSliced;
  }
  const int64 at_once = (s.columns > kWider && s.rows <= 48 ? 1 : 2) * s.multiprocessors;
  if (s.tiles * divide_up(s.rows, 32) > at_once) return {};
  return Tiling{.rows = 32, .keys = 32, .warps = 4, .stages = 1, .slices = 2};
}

Tiling of_shared_keys(const Short& s) {
  if (s.columns <= 64) {
    return {.rows = 16, .keys = 32, .warps = 4, .stages = 2, .key_warps = 4};
  }
  return {.rows = 16, .keys = 16, .warps = 4, .stages = 3, .key_warps = 4};
}

std::optional<Tiling> forward_tiling(const KernelConfig& c, const Short& s) {
  constexpr int64 kKeys = 512;
  if (s.rows <= 16) return of_one_warp(s);
  if (s.rows <= 32) {
    const std::optional<Tiling> tiling = of_two_warps(c, s);
    return tiling ? tiling : of_two_tiles(s);
  }
  if (s.narrow) return kLow;
  if (const std::optional<Tiling> tiling = of_few_wide_heads(s)) return tiling;
  if (s.repays_shared_keys()) return of_shared_keys(s);
  if (s.is_between_tiles()) return kLow;
  if (s.columns > 192) return of_wide_heads(s);
  if (s.rows > 64 || s.keys > kKeys) return {};
  // (4, 8, 40 / 40, 160) 4.8 -> 4.5, causal 5.6 -> 5.1; (20, 8, 40 / 40, 128) causal 6.5 -> 5.6.
  if (s.keys <= 96 && (s.fills(0.5) ? s.hides && !s.fills(2) : s.hides || s.columns > 64)) {
    if (s.rows > 48 || !s.fills(0.5)) return kLow;
    return Tiling{.rows = 32, .keys = 16, .warps = 2, .stages = 1};
  }
  // More blocks a multiprocessor, because one stage takes half the shared memory. (32, 8, 64 / 128,
  // 64) 7.6 -> 5.9, (64, 16, 50 / 50, 64) 13.6 -> 11.3; 3072 heads 41.1 -> 42.0. D 96: (32, 8, 64 /
  // 300) 16.4 -> 13.8; 1024 heads, 50 keys: 20.7 -> 23.0.
  if (s.fills(s.columns <= 64 ? 12 : 4.5)) return {};
  const int blocks = s.columns <= 32 ? 3 : s.columns <= 64 ? 4 : 1;
  return Tiling{.rows = 64, .keys = 64, .warps = 4, .stages = 1, .min_blocks = blocks};
}

// (64, 16, 12 / 12, 128) 20.4 -> 13.1; (64, 16, 24 / 24, 32) 11.2 -> 8.2;
// (64, 16, 48 / 48, 128) 68.9 -> 61.4.
std::optional<Tiling> backward_tiling(const Short& s) {
  if (s.columns > 128) return {};
  if (s.rows <= 16 && s.keys <= 16) return Tiling{.rows = 16, .keys = 16, .warps = 1, .stages = 1};
  if (s.rows <= 32 && s.keys <= 32) {
    if (s.columns > 64 || !s.fills(4)) return {};
    return Tiling{.rows = 32, .keys = 32, .warps = 1, .stages = 1};
  }
  if (s.rows > 64 || s.keys > 64 || s.keys <= 32 || s.columns <= 64) return {};
  return Tiling{.rows = 64, .keys = 64, .warps = 4, .stages = 1, .slices = 2};
}

// Packed sequences of up to 128 rows and 64 on average: low tiles, because lengths end anywhere in
// one; and rows_of_packed_tile. (23, 12, 63 at most, 192) causal 13.9 -> 8.4, (42, 10, 51 at most,
// 152) causal 13.2 -> 8.8, (17, 16, 77 at most, 64) 6.4 -> 5.9. Few above 128 columns: (10, 2/1, 25
// at most, 176) causal 8.2 -> 4.8, (20, 4/2, 30, 256) causal 12.4 -> 8.2, (30, 4, 60, 176) causal
// 9.2 -> 7.9.
std::optional<Tiling> of_packed(const Short& s) {
  constexpr int64 kRows = 128, kUsualRows = 64, kWide = 128, kWidest = 192;
  if (!s.packed || s.rows <= 32) return {};
  if (s.usual_rows > kUsualRows) {
    const int rows = s.rows_of_packed_tile();
    return rows == kLow.rows      ? std::optional(kLow)
           : rows == kSquare.rows ? std::optional(kSquare)
                                  : std::nullopt;
  }
  if (s.columns > kWide && larger(s.rows, s.keys) <= kRows &&
      s.tiles * divide_up(s.usual_rows, 16) <= 2 * s.multiprocessors) {
    return kSliced;
  }
  if (larger(s.rows, s.keys) > kRows || s.columns > kWidest) return {};
  if (s.columns > kWide && s.usual_rows <= 32) {
    return Tiling{.rows = 16, .keys = 16, .warps = 1, .stages = 1};
  }
  return kLow;
}

std::optional<Tiling> tiling_of(const KernelConfig& c, const TilingRequest& request,
                                const Short& s) {
  const bool is_f32 = c.type == Type::f32;
  if (s.columns > 256) return of_widest_heads(c, s);
  if (c.kernel == Kernel::backward) {
    return is_f32 ? cheapest_f32_backward(c.features, request) : backward_tiling(s);
  }
  if (is_f32) return of_f32(c, request);
  const std::optional<Tiling> tiling = of_packed(s);
  return tiling ? tiling : forward_tiling(c, s);
}

}  // namespace

std::optional<Tiling> short_mma_tiling(const KernelConfig& c, const TilingRequest& request) {
  const Short s(c, request);
  if (request.forced) return {};
  const std::optional<Tiling> tiling = tiling_of(c, request, s);
  return tiling && !s.needs_map(*tiling) && !s.is_too_high(*tiling) ? tiling : std::nullopt;
}

}  // namespace regard
