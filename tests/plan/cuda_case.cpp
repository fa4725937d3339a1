// What must hold for any plan for a GPU.
#include "tests/plan/cuda_case.hpp"

#include <algorithm>

#include "cuda/kernels/params.h"
#include "plan/cuda/config_text.hpp"
#include "plan/cuda/kernel/finish_layout.h"
#include "plan/cuda/kernel/mma_layout.h"
#include "plan/cuda/kernel/wgmma_backward_layout.h"

namespace regard::cuda_case {
namespace {

std::int64_t real_size(const Problem& p) { return p.type == Type::f64 ? 8 : 4; }

// Tiles times what a tile owns must reach the end, and not past it by a whole tile.
void check_reach(std::int64_t tiles, std::int64_t owned, std::int64_t length) {
  CHECK(tiles * owned >= length);
  CHECK((tiles - 1) * owned < length);
}

void check_grid(const Problem& p, const CudaLaunch& launch, int splits) {
  const KernelConfig& c = launch.config;
  const BlockGrid& g = launch.grid;
  const Sizes& s = p.sizes;
  CHECK(g.heads >= 1);
  CHECK(g.heads_per_group >= 1);
  CHECK(g.heads_per_group <= g.heads);
  CHECK(g.blocks() <= 0x7fffffff);
  if (c.only_flagged) {  // counts its tiles over all heads
    CHECK(g.heads == 1);
    check_reach(g.tiles, kFlaggedTiles, simt_own_heads(p, c) * simt_own_tiles(p, c));
    return;
  }
  switch (c.kernel) {
    case Kernel::forward: {
      CHECK(g.heads == s.batch * (c.pack_gqa ? s.heads_kv : s.heads_q));
      check_reach(g.tiles, c.tiling.rows, c.pack_gqa ? s.group() * s.len_q : s.len_q);
      break;
    }
    case Kernel::combine_dkv:
      CHECK(g.heads == s.batch * s.heads_kv);
      check_reach(g.tiles, c.tiling.keys, s.len_k);
      CHECK(g.splits == 2);
      return;
    case Kernel::backward:
    case Kernel::key_gradient:
      CHECK(g.heads == s.batch * s.heads_kv * (c.split_q ? splits : 1));
      check_reach(c.cta_pair ? g.tiles / 2 : g.tiles, c.tiling.keys * (c.cta_pair ? 2 : 1),
                  s.len_k);
      break;
    case Kernel::bias_gradient:
      CHECK(g.heads == p.bias_sizes[0] * p.bias_sizes[1]);
      break;
    case Kernel::sink_gradient:
      CHECK(g.heads == s.heads_q);
      break;
    case Kernel::finish: {
      const bool has_keys = c.flags_nonfinite && (c.wanted.dk || c.wanted.dv);
      const int64 keys = has_keys ? divide_up(s.len_k, c.tiling.keys) : 0, *bias = p.bias_sizes;
      const int64 rows = c.sums_dim > 0 ? divide_up(s.len_q, c.flags_nonfinite ? 128 : 64) : 0;
      int64 blocks = s.batch * s.heads_q * rows + divide_up(s.batch * s.heads_kv * keys, 64);
      if (c.dbias.how != BiasGradient::none) {
        blocks += bias[0] * bias[1] * divide_up(bias[2], 8) * divide_up(bias[3], 256);
      }
      CHECK(g.blocks() == blocks);
      break;
    }
    case Kernel::split_f32:
      CHECK(g.heads == s.batch * s.heads_q);
      check_reach(g.tiles, c.tiling.keys,
                  round_up(larger(s.len_q, s.len_k), c.row_terms.used ? 128 : 1));
      CHECK(g.splits == 3);
      return;
    case Kernel::copy_inputs:
      CHECK(g.heads <= s.batch * s.heads_q);
      CHECK(g.splits <= kInputs);
      CHECK(g.tiles * c.tiling.rows >= smaller(s.len_q, s.len_k));
      CHECK((g.tiles - 1) * c.tiling.rows < larger(s.rows_q, s.rows_k));
      return;
    case Kernel::row_map:
    case Kernel::key_map:
      CHECK(s.batch * s.heads_q % g.heads == 0);
      if (c.kernel == Kernel::row_map) check_reach(g.tiles, c.tiling.rows, s.len_q);
      if (c.kernel == Kernel::key_map) check_reach(g.tiles, c.tiling.keys, s.len_k);
      return;
    default:
      CHECK(g.heads == s.batch * s.heads_q);
      check_reach(g.tiles, c.tiling.rows, s.len_q);
  }
  const bool is_sliced = c.family == Family::wgmma && c.tiling.slices > 1;
  CHECK(g.splits == (c.split_kv || c.stream_k ? g.splits : is_sliced ? c.tiling.slices : 1));
}

void check_tiling(const KernelConfig& c) {
  const Tiling& t = c.tiling;
  if (c.family == Family::simt) return;
  if (c.family == Family::wgmma && c.kernel == Kernel::backward) {
    const bool may_be_tall = larger(c.dim, c.dim_v) <= 64 && c.type != Type::f32;
    CHECK((t.rows == 64 || (t.rows == 128 && may_be_tall)));
    CHECK(t.keys == (is_wide(c) ? 64 : 128));
    CHECK(t.warps == backward_warps(c));
    CHECK(t.stages >= 2);
    CHECK(t.stages <= (is_wide(c) ? kMostBackwardStages : 2));
    CHECK(c.dim % 16 + c.dim_v % 16 == 0);
    return;
  }
  if (c.family == Family::wgmma) {
    const int consumers = consumers_of(t);
    CHECK(consumers >= 2);
    CHECK(consumers <= 4);
    CHECK(t.warps == 4 * (consumers + 1 + has_dropout_warpgroup(c)));
    CHECK(t.rows == 64 * consumers);
    CHECK(t.keys % (c.features.dropout ? 32 : 16) == 0);
    CHECK(c.dim % 16 + c.dim_v % 16 == 0);
    const bool is_wide_f32 = c.type == f32 && larger(c.dim, c.dim_v) > 128;
    CHECK(t.stages >= (is_wide_f32 ? 1 : 2));
    CHECK(t.slices == (c.dim_v > 256 ? 2 : 1));
    CHECK(out_columns(c) % 16 == 0);
    CHECK(t.min_blocks == 1);
    return;
  }
  const bool backward = c.kernel == Kernel::backward;
  const int m = (backward ? t.keys : t.rows * t.key_warps) * t.slices / t.warps;
  CHECK((m == 16 || m == 32));
  CHECK(t.keys % 16 == 0);
  CHECK(t.rows % (backward ? 16 * t.slices : 16) == 0);
  CHECK(c.dim_v % (16 * t.slices) == 0);
  CHECK(c.dim % (backward ? 16 * t.slices : step_of(c.type)) == 0);
  if (t.key_warps == 1) {
    CHECK((t.stages == 1 || t.stages == 2));
  } else {
    CHECK(!backward);
    CHECK(c.level >= 80);
    CHECK(t.key_warps == t.warps);
    CHECK(t.slices == 1);
    CHECK(t.stages >= 2);
  }
  if (c.merges_splits) CHECK((!backward && c.split_kv && t.key_warps > 1));
  if (c.stream_k) CHECK((!backward && !c.split_kv && !c.merges_splits && t.key_warps > 1));
  if (c.cluster > 1) {
    CHECK((!backward && c.split_kv && t.key_warps > 1 && !c.merges_splits));
    CHECK(c.level >= 90);
    CHECK((t.key_warps + 1) * t.rows * partial_row_bytes(c) <= merge_room(c));
  }
}

// Two bits for each tile of rows and keys, of as many heads and batch entries as the map's kernel
// has; for a mask's bits, of each line four words, from a multiple of 16 bytes on; for an order, a
// word for each tile and sequence.
std::int64_t tile_map_bytes(const Problem& p, const KernelConfig& c, const BlockGrid& grid) {
  const Sizes& s = p.sizes;
  const bool of_keys = c.kernel == Kernel::key_map;
  const std::int64_t tile = of_keys ? c.tiling.keys : c.tiling.rows;
  const std::int64_t others =
      of_keys ? divide_up(s.len_q, c.tiling.rows) : divide_up(s.len_k, c.tiling.keys);
  const std::int64_t entries = p.varlen ? s.batch : 1;
  const std::int64_t rows =
      p.packed ? (of_keys ? s.rows_k : s.rows_q) / tile + s.batch : entries * grid.tiles;
  const std::int64_t own = grid.heads / entries * rows;
  const std::int64_t columns = of_keys ? c.tiling.rows : c.tiling.keys;
  const std::int64_t word = columns <= 64 ? 2 : columns <= 128 ? 4 : 8;
  const std::int64_t bits = c.mask.as_bits ? own * others * tile * 4 * word : 0;
  const std::int64_t map = round_up(own * divide_up(others, 32) * 8, bits > 0 ? 16 : 8);
  return map + bits + (c.tile_order ? (own + grid.heads) * 8 : 0);
}

void check_workspace(const Problem& p, const CudaPlan& plan) {
  const Sizes& s = p.sizes;
  const CudaWorkspace& w = plan.workspace;
  bool flags = false, flags_q = false, flags_k = false, adds = false, sliced = false;
  std::int64_t counter = 0, dq = 0, semaphores = 0, rows_states = 0, row_terms = 0, hi_lo = 0;
  std::int64_t partial_out = 0, partial_rows = 0, arrivals = 0, tile_map = 0;
  std::int64_t copies = 0;
  for (const CudaLaunch& launch : plan.launches) {
    const KernelConfig& c = launch.config;
    flags_q |= c.only_flagged;
    flags |= c.only_flagged || (c.kernel == Kernel::finish && c.flags_nonfinite);
    flags_k |= c.kernel == Kernel::finish && c.flags_nonfinite && (c.wanted.dk || c.wanted.dv);
    if (launch.resident > 0 && !c.stream_k && (p.features.interval || p.varlen || c.tile_map)) {
      counter = c.repeats_rows ? 0 : 8;
    }
    if (c.merges_splits) {
      arrivals = launch.grid.blocks() * 8;
      partial_out = launch.grid.blocks() * c.tiling.rows * partial_row_bytes(c);
      CHECK(plan.splits * partial_row_bytes(c) <= merge_room(c));
    } else if (c.stream_k) {  // two parts of heads for each block
      arrivals = 2 * plan.splits * 8;
      partial_out = 2 * plan.splits * c.tiling.rows * partial_row_bytes(c);
      CHECK(launch.blocks() == plan.splits);
      CHECK(launch.grid.tiles == 1);
      const std::int64_t heads = launch.grid.heads / s.batch;
      const std::int64_t parts = std::min<std::int64_t>(plan.splits, 2 * plan.splits / heads + 2);
      CHECK(parts * partial_row_bytes(c) <= merge_room(c));
    } else if (c.split_kv && c.cluster > 1) {  // neighbours, all of one tile
      CHECK(c.cluster == plan.splits);
      CHECK((launch.grid.tiles == 1 && launch.grid.heads_per_group == 1));
    } else if (c.split_kv) {
      partial_rows = plan.splits * s.heads_q * s.rows_q * 2 * 4;
      partial_out = plan.splits * s.heads_q * s.rows_q * s.dim_v * 4;
    }
    sliced |= c.kernel == Kernel::forward && c.tiling.slices > 1 && c.flags_nonfinite;
    adds |= converts_dbias(c);
    if (c.kernel == Kernel::delta) rows_states = s.heads_q * s.rows_q * 2 * real_size(p);
    if (c.kernel == Kernel::split_f32) hi_lo = hi_lo_layout(p, c).size;
    if (c.kernel == Kernel::delta && c.row_terms.used) {
      row_terms = 2 * (s.heads_q * dq_rows(p) + 128) * 16;
    }
    if (c.kernel == Kernel::split_f32 && c.row_terms.used) {
      row_terms = s.heads_q * hi_lo_rows(p, s.rows_q, s.len_q, 128) * (2 * 8 + 4);
    }
    if (c.kernel == Kernel::combine_dkv) {
      partial_out =
          plan.splits * s.heads_kv * s.rows_k * (round_up(s.dim, 4) + round_up(s.dim_v, 4)) * 4;
    }
    if (makes_tile_map(c.kernel)) tile_map = tile_map_bytes(p, c, launch.grid);
    if (c.kernel == Kernel::finish) dq = s.heads_q * dq_rows(p) * c.sums_dim * 4;
    if (c.kernel == Kernel::backward && c.ordered_dq) {
      semaphores = s.batch * s.heads_q * 2 * divide_up(s.len_q, 32) * 4;
      CHECK(s.batch * s.heads_q * dq_semaphores(c, s.len_q) * 4 <= semaphores);
    }
  }
  const bool is_16_bit = p.type == f16 || p.type == bf16;
  for (int n = 0; n < kInputs; ++n) {
    const bool queries = n == 0 || n == 3, of_scores = n < 2;
    const bool may_copy =
        plan.family == Family::wgmma || (plan.family == Family::mma && !plan.copies.empty());
    const bool unknown = n == 3 && p.backward && !p.dout.given() && is_16_bit && may_copy;
    if (!plan.copies.has(Input(n)) && !unknown) continue;
    copies += round_up((queries ? s.heads_q * s.rows_q : s.heads_kv * s.rows_k) *
                           round_up(of_scores ? s.dim : s.dim_v, 8) * 2,
                       256);
  }
  const std::int64_t* sizes = p.bias_sizes;
  const std::int64_t bias_row = sizes[3] > 1 ? round_up(sizes[3], 4) : 1;  // whole vectors
  // An empty problem may have planned for flags before there was nothing to launch.
  const bool is_empty = s.batch * s.heads_q * s.len_q * s.len_k == 0;
  const bool any_flag =
      is_empty ? w.end(WorkspacePart::any_flag) > w.begin(WorkspacePart::any_flag) : flags;
  // There is room for the map of mma, should data be unaligned, and while gradients are unknown for
  // a map that the wanted ones may need.
  const bool is_unknown = p.backward && !p.gradients_named && tests_pairs(p.features);
  if (is_unknown || (tile_map > 0 && plan.family == Family::wgmma)) {
    tile_map = larger(tile_map, w.bytes(WorkspacePart::tile_map));
  }
  const std::int64_t key_flags = flags_k ? s.heads_kv * s.rows_k * 2 : 0;
  const std::int64_t needed[kWorkspaceParts] = {
      counter,
      semaphores,
      any_flag ? 16 : 0,
      flags_q ? s.heads_q * s.rows_q : 0,
      key_flags,
      adds ? sizes[0] * sizes[1] * sizes[2] * bias_row * 4 : 0,
      rows_states,
      row_terms,
      dq,
      partial_out,
      partial_rows,
      arrivals,
      tile_map,
      hi_lo,
      copies};
  // The delta kernel clears, if it has rows.
  const bool undelta = p.backward && s.batch * s.heads_q * s.len_q == 0;
  CHECK(w.clear == (undelta || sliced ? w.begin(WorkspacePart::row_states) : 0));
  std::int64_t begin = 0;
  for (int n = 0; n < kWorkspaceParts; ++n) {
    CAPTURE(n);
    CHECK(w.begin(WorkspacePart(n)) == begin);
    CHECK(begin % 256 == 0);
    const std::int64_t bytes = w.end(WorkspacePart(n)) - begin;
    CHECK(bytes >= needed[n]);
    CHECK(bytes <= round_up(needed[n], 256));
    begin += bytes;
  }
}

}  // namespace

std::string kernels_of(const CudaPlan& plan) {
  std::string text;
  for (const CudaLaunch& launch : plan.launches) {
    text += (text.empty() ? "" : " ") + std::string(name_of(launch.config.kernel)) +
            (launch.config.only_flagged ? "*" : "");
  }
  return text;
}

void check_sound(const Problem& p, const Chip& chip, const CudaPlan& plan) {
  REQUIRE(plan.supported());
  for (const CudaLaunch& launch : plan.launches) {
    const KernelConfig& c = launch.config;
    CAPTURE(to_text(c));
    CHECK(c.type == (makes_tile_map(c.kernel) ? Type::none : p.type));
    CHECK(launch.threads == c.tiling.warps * 32);
    CHECK(launch.threads <= 1024);
    CHECK(launch.shared_bytes <= chip.shared_per_block);
    CHECK(launch.shared_bytes ==
          (c.kernel == Kernel::finish ? finish_shared_bytes(c)
           : c.family == Family::simt ? simt_shared_bytes(c)
           : c.family == Family::wgmma
               ? (p.backward ? backward_wgmma_shared(c) : forward_wgmma_shared(c))
           : c.kernel == Kernel::backward ? backward_mma_shared(c)
                                          : forward_mma_shared(c)));
    CHECK(c.tiling.min_blocks * (launch.shared_bytes + 1024) <=
          larger(chip.shared_per_multiprocessor, launch.shared_bytes + 1024));
    CHECK(c.level <= chip.capability());
    check_tiling(c);
    check_grid(p, launch, plan.splits);
  }
  check_workspace(p, plan);
}

}  // namespace regard::cuda_case
