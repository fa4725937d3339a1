// The launches and the workspace of a forward pass.
#include "plan/cuda/decoding.hpp"
#include "plan/cuda/facts.hpp"
#include "plan/cuda/families.hpp"
#include "plan/cuda/input_copies.hpp"
#include "plan/cuda/kernel/wgmma_layout.h"
#include "plan/cuda/launches.hpp"
#include "plan/cuda/splits.hpp"

namespace regard {
namespace {

// How many heads are interleaved. Under intervals, and where tiles are ordered, the longest tiles
// of a group of heads begin first. Its keys and values are to stay in the cache, and because
// persistent blocks read them at many places at once, a third of the cache is the most that pays.
int64 heads_per_group(const Facts& f, const KernelConfig& c) {
  if (c.cluster > 1) return 1;  // its blocks are neighbours
  const Sizes& s = f.problem.sizes;
  const int64 batch = batch_of_bias(f.problem);
  if (!(c.features.interval || c.tile_order) || batch > 1) return batch;
  const int64 bytes = larger<int64>(1, s.len_k * (s.dim + s.dim_v) * int64(size_of(c.type)));
  const int64 group = c.pack_gqa ? 1 : s.group();
  if (c.family != Family::wgmma) return larger<int64>(1, f.chip.l2 * 3 / 5 / bytes) * group;
  return even_group(larger<int64>(1, s.batch * s.heads_kv), f.chip.l2 / 3 / bytes) * group;
}

// Tiles of query rows, over all heads.
int64 row_tiles(const TilingRequest& request, const KernelConfig& main) {
  return request.heads * divide_up(request.rows, main.tiling.rows);
}

void split_keys(Draft& d, const TilingRequest& request) {
  const int64 tiles = row_tiles(request, d.main);
  if (d.main.family == Family::wgmma) {
    if (has_slices_of_blocks(d.main)) return;
    d.plan.splits = key_splits_of_wgmma(d.main, d.p, d.facts.chip.multiprocessors, tiles);
    d.main.split_kv = d.plan.splits > 1;
    d.main.out_by_tma &= !d.main.split_kv;
    return;
  }
  const int64 key_tiles = divide_up(keys_in_reach(d.p), d.main.tiling.keys);
  // On mma, only combine merges a continued call with out and lse, even with one split.
  const bool continues = d.p.continues && d.main.family == Family::mma;
  if (d.main.tiling.key_warps == 1) {
    d.plan.splits = splits_for(d.main, d.facts.chip, tiles, key_tiles);
  } else {
    const DecodingSplits found = splits_of_decoding(
        d.main, d.facts.chip, request,
        {.tiles = tiles,
         .key_tiles = key_tiles,
         .entries = d.p.sizes.batch,
         .lengths_vary = d.p.varlen || (d.p.features.interval && d.p.features.positions),
         .continues = continues,
         .is_limited = d.facts.is_limited});
    d.plan.splits = found.splits;
    d.main.stream_k = found.stream_k;
    d.main.cluster = found.cluster;
    d.main.merges_splits = found.last_merges;
  }
  d.main.split_kv = (d.plan.splits > 1 && !d.main.stream_k) || continues;
}

void add_main_launch(Draft& d, const TilingRequest& request) {
  const KernelConfig& main = d.main;
  const int64 tiles = divide_up(request.rows, main.tiling.rows);
  if (main.stream_k) {
    // The kernel ignores the grid's splits: they only make it large enough for `resident` blocks.
    add_launch(d, main, request.heads, tiles, divide_up(d.plan.splits, request.heads), 1);
    if (d.plan.supported()) d.plan.launches.back().resident = d.plan.splits;
    return;
  }
  const int shares = has_slices_of_blocks(main) ? main.tiling.slices : d.plan.splits;
  add_launch(d, main, request.heads, tiles, shares, heads_per_group(d.facts, main));
}

void add_combine_launch(Draft& d, bool flags) {
  KernelConfig c = plain_config(d.p, Kernel::combine);
  c.features.sink = d.p.features.sink;
  c.features.dropout = d.p.features.dropout;
  c.dim_v = int(d.p.sizes.dim_v);
  c.flags_nonfinite = flags;
  c.continues = d.p.continues;
  add_simt_launch(d, c);
}

void explain_tiles(const Draft& d, int64 tiles) {
  if (d.main.pack_gqa) {
    d.because("packed GQA: the rows of ", d.p.sizes.group(),
              " query heads that share keys fill a tile");
  }
  if (d.p.continues && d.main.family == Family::mma) {
    d.because("continued: combine merges what the tensor cores made with what out and lse hold");
  }
  if (d.main.stream_k) {
    d.because("stream-K: ", d.plan.splits, " blocks have equal shares of the keys of all ", tiles,
              " tiles of rows; the block that has the last keys of a tile merges its parts");
  } else if (d.plan.splits > 1) {
    d.because("split: ", tiles,
              " tiles of rows would leave multiprocessors idle; the keys of each go to ",
              d.plan.splits,
              d.main.cluster > 1     ? " blocks of a cluster"
              : d.main.merges_splits ? " blocks, of which the last merges"
                                     : " blocks");
  }
}

bool needs_combine(const KernelConfig& main) {
  return main.split_kv && !main.merges_splits && main.cluster == 1;
}

// Whether a kernel computes rows again by itself, because a second launch would be a large part of
// the call: each of its blocks has one tile, and neither the tiles nor the keys are many. The code
// for it takes registers from the loop over keys, few of them with mma in 16 bits and up to 64
// columns, and a warp would take long over many keys. Where mma has few tiles of keys, the loop is
// short.
bool is_small(const Draft& d, int64 tiles) {
  constexpr int64 kFewTiles = 4;
  const bool is_mma = d.main.family == Family::mma;
  if (has_slices_of_blocks(d.main)) return false;
  const bool is_narrow = larger(d.p.sizes.dim, d.p.sizes.dim_v) <= 64 && d.p.type != Type::f32;
  if (is_mma && d.p.sizes.len_k <= kFewTiles * d.main.tiling.keys) return true;
  const int64 most_keys = is_mma && !is_narrow ? 512 : 2048;
  const int64 blocks = is_mma && is_narrow ? 8 : 1;  // of a multiprocessor
  return tiles <= blocks * d.facts.chip.multiprocessors && keys_in_reach(d.p) <= most_keys;
}

void lay_out_workspace(Draft& d, int64 tiles, bool flags) {
  const Problem& p = d.p;
  const KernelConfig& main = d.main;
  const Count rows = Count(p.sizes.heads_q) * p.sizes.rows_q;
  const bool combines = needs_combine(main);
  const Count split_rows = combines ? rows * d.plan.splits : 0;
  const Count parts = main.merges_splits ? Count(tiles) * d.plan.splits
                      : main.stream_k    ? Count(2) * d.plan.splits
                                         : Count(0);
  using enum WorkspacePart;
  CudaWorkspace& w = d.plan.workspace;
  w = lay_out({{tile_counter, counts_tiles(main) ? kTileCounterBytes : 0},
               {any_flag, flags ? kAnyFlagBytes : 0},
               {flags_q, flags ? rows : 0},
               {partial_out, split_rows * p.sizes.dim_v * 4 +
                                 parts * main.tiling.rows * partial_row_bytes(main)},
               {partial_rows, split_rows * 2 * 4},
               {arrivals, parts * 8},
               {tile_map, tile_map_bytes(d)},
               {hi_lo, hi_lo_bytes(p, main)},
               {copies, copies_bytes(p, copies_at_most(d.plan, p))}});
  // The counter and any_flag need no clearing, because they are compared with the call's nonce.
  // Every row's flag is written, except by those that have slices of a row.
  if (main.flags_nonfinite && main.tiling.slices > 1) w.clear = w.begin(row_states);
}

}  // namespace

void add_forward_launches(Draft& d) {
  KernelConfig& main = d.main;
  if (main.family == Family::simt) return add_simt_launch(d, main);
  const TilingRequest request = d.request(main, true);
  const int64 tiles = row_tiles(request, main);
  split_keys(d, request);
  const bool again = needs_fixup(d.p, main);
  main.repeats_rows = again && !main.split_kv && main.tiling.key_warps == 1 && is_small(d, tiles);
  const bool flags = again && !main.repeats_rows;
  const bool combines = needs_combine(main);
  main.flags_nonfinite = flags && !combines;
  add_map_launch(d);
  add_copies_launch(d);
  add_split_launch(d);
  add_main_launch(d, request);
  explain_tiles(d, tiles);
  if (combines) add_combine_launch(d, flags);
  if (again) explain_fixup(d.because);
  if (flags) add_fixup_launch(d, Kernel::forward);
  lay_out_workspace(d, tiles, flags);
}

}  // namespace regard
