// When a main kernel reads a tile map of mask and spans, and the kernel that makes it.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "plan/cuda/facts.hpp"
#include "plan/cuda/families.hpp"
#include "plan/cuda/kernel/simt_layout.h"
#include "plan/cuda/kernel/tile_map_layout.h"
#include "plan/cuda/launches.hpp"

namespace regard {
namespace {

constexpr int64 kLeastTiles = 4;  // of a head: fewer are not worth another launch
constexpr int64 kMostBytes = int64(1) << 28;
// Own tiles whose order is worth its time, and can be found by comparing each two.
constexpr int64 kFewestOrdered = 64, kMostOrdered = 4096;

bool has_few_tiles(const Problem& p, const KernelConfig& main) {
  const int64 rows = divide_up(p.sizes.len_q, main.tiling.rows);
  return (Count(rows) * divide_up(p.sizes.len_k, main.tiling.keys)).value() < kLeastTiles;
}
bool may_order_tiles(const Problem& p, const KernelConfig& main) {
  const int64 tiles = own_tiles(p, main);
  return main.family == Family::wgmma && tiles >= kFewestOrdered && tiles <= kMostOrdered;
}
// Additions to dq in a fixed order need blocks in the order of their keys.
bool orders_tiles(const Problem& p, const KernelConfig& main) {
  return may_order_tiles(p, main) && !main.ordered_dq;
}
// Strides of 0 make sizes that wrap around in plain integers.
Count map_rows_at_most(const Problem& p, const KernelConfig& main) {
  const int64 rows = maps_keys(main) ? p.sizes.rows_k : p.sizes.rows_q;
  const Count of_head = p.packed ? Count(rows / own_tile(main)) + p.sizes.batch
                                 : Count(map_batch(p)) * own_tiles(p, main);
  return of_head * map_heads(p);
}
// Bytes of the mask's bits, all tiles together.
Count mask_bits_bytes(const Problem& p, const KernelConfig& main) {
  return map_rows_at_most(p, main) * other_tiles(p, main) * mask_tile_bytes(main);
}
Count map_bytes(const Problem& p, const KernelConfig& main, bool with_bits) {
  const Count rows = map_rows_at_most(p, main);
  Count words = rows * map_words(p, main);
  Count bytes;
  if (with_bits) {
    words = words.rounded_up(2);
    bytes = mask_bits_bytes(p, main);
  }
  // While the wanted gradients are unknown, dq may turn out not to be one of them.
  const bool is_unknown = p.backward && !p.gradients_named;
  if (is_unknown ? may_order_tiles(p, main) : orders_tiles(p, main))
    words = words + rows + Count(2) * map_batch(p) * map_heads(p);
  return bytes + words * kMapWordBytes;
}
// The mask's own bytes: rows, keys, heads or batch entries may share them.
Count mask_bytes(const Problem& p) {
  const Strides& s = p.mask.strides;
  const auto own = [](int64 stride, int64 count) { return stride == 0 ? 1 : count; };
  return Count(own(s.batch, p.sizes.batch)) * own(s.head, p.sizes.heads_q) *
         own(s.row, p.sizes.len_q) * own(s.column, p.sizes.len_k);
}
// Why partial tiles read the bytes of the mask.
Refusal why_no_bits(const Problem& p, const KernelConfig& main) {
  const int64 bits = mask_bits_bytes(p, main).value();
  if (p.mask.strides.row == 0) return "all rows share it";
  if (p.mask.strides.column == 0) return "all keys share it";
  if (bits > mask_bytes(p).value()) return "bits of all pairs would take more memory than it does";
  if (bits > kMostBytes) return "bits of all pairs would take more than 256 MB";
  return {};
}
bool reads_bits(const Problem& p, const KernelConfig& main) {
  return p.features.mask && !why_no_bits(p, main);
}
bool is_too_large(const Problem& p, const KernelConfig& main) {
  const Count blocks =
      Count(map_batch(p)) * map_heads(p) * own_tiles(p, main) * map_groups(p, main);
  return blocks.value() > INT32_MAX || map_bytes(p, main, false).value() > kMostBytes;
}

// Why the main kernel tests the pairs of every tile.
Refusal why_no_map(const Problem& p, const KernelConfig& main) {
  if (main.family == Family::simt) return "kernels without tensor cores read no tile map";
  if (main.pack_gqa) return "a tile has rows of several heads";
  if (main.tiling.key_warps > 1) return "warps split the keys of a tile";
  if (main.dbias.how != BiasGradient::none) return "the gradient of the bias needs every tile";
  if (is_too_large(p, main)) return "a tile map would take more than 256 MB";
  return {};
}

bool makes_map(const Draft& d) {
  const std::vector<CudaLaunch>& all = d.plan.launches;
  return std::any_of(all.begin(), all.end(),
                     [](const CudaLaunch& x) { return makes_tile_map(x.config.kernel); });
}
// A workspace is asked for before the wanted gradients are known. Some of them rule out a map.
bool may_make_map(const Problem& p, const KernelConfig& main) {
  return p.backward && !p.gradients_named && main.family != Family::simt &&
         tests_pairs(p.features) && !has_few_tiles(p, main) && !is_too_large(p, main);
}

}  // namespace

void choose_tile_map(Draft& d) {
  if (!tests_pairs(d.p.features)) return;
  if (has_few_tiles(d.p, d.main)) {
    d.because("mask and spans are tested pair by pair: so few tiles are not worth a tile map");
    return;
  }
  if (const Refusal refusal = why_no_map(d.p, d.main)) {
    d.because("slow path: mask and spans are tested pair by pair, in every tile: ", refusal.why);
    return;
  }
  d.main.tile_map = true;
  d.main.skips_blocks = false;
  d.main.tile_order = orders_tiles(d.p, d.main);
  d.because(
      "tile map: tiles that mask and spans hide are skipped, and those that they show as a "
      "whole are not tested");
  if (!d.p.features.mask) return;
  if (const Refusal refusal = why_no_bits(d.p, d.main)) {
    d.because("mask: partial tiles read its bytes, because ", refusal.why);
    return;
  }
  d.main.mask = {.as_bits = true};
  d.because("mask: partial tiles read a bit for each pair, made with the tile map");
}

void add_map_launch(Draft& d) {
  if (!d.main.tile_map) return;
  KernelConfig c = plain_config(d.p, maps_keys(d.main) ? Kernel::key_map : Kernel::row_map);
  c.type = Type::none;
  c.features.mask = d.p.features.mask;
  c.features.row_spans = d.p.features.row_spans;
  c.features.key_spans = d.p.features.key_spans;
  c.tile_order = d.main.tile_order;
  c.features.interval = c.tile_order && d.p.features.interval;
  c.features.positions = c.features.interval && d.p.features.positions;
  c.mask = {.copy_bytes = bytes_of_mask_copy(d.p), .as_bits = d.main.mask.as_bits};
  c.tiling = {.rows = d.main.tiling.rows, .keys = d.main.tiling.keys, .warps = 8, .stages = 1};
  // A batch of any lengths has tiles enough, many of which may not exist. Spans are quickly read.
  const int64 splits = d.p.varlen ? 1 : c.features.mask ? map_groups(d.p, c) : map_words(d.p, c);
  add_launch(d, c, map_batch(d.p) * map_heads(d.p), own_tiles(d.p, c), splits);
}

Count tile_map_bytes(const Draft& d) {
  if (!makes_map(d) && !may_make_map(d.p, d.main)) return 0;
  return map_bytes(d.p, d.main, reads_bits(d.p, d.main));
}

}  // namespace regard
