// What the wgmma kernels take, and their table of tiles.
#include "plan/cuda_wgmma.hpp"

#include "plan/boxed_tensor.hpp"
#include "plan/cuda_facts.hpp"
#include "plan/wgmma_layout.h"

namespace regard {
namespace {

constexpr int64 kLargestHead = 256;  // accumulators of out are 128 registers then

struct Line {
  int dim;  // the largest that it is meant for
  int dim_v;
  Tiling tiling;
};

// The first line for the head sizes whose rows are not too many. Accumulators and weights take
// keys * 3 / 4 + dim_v / 2 registers of a thread; two consumer warpgroups leave it 232, three 160.
constexpr Line kLines[] = {
    {64, 64, {.rows = 192, .keys = 128, .warps = 16, .stages = 3}},
    {64, 64, {.rows = 128, .keys = 128, .warps = 12, .stages = 3}},
    {128, 128, {.rows = 128, .keys = 128, .warps = 12, .stages = 2}},
    {192, 128, {.rows = 128, .keys = 128, .warps = 12, .stages = 2}},
    {192, 192, {.rows = 128, .keys = 96, .warps = 12, .stages = 2}},
    {256, 128, {.rows = 128, .keys = 96, .warps = 12, .stages = 2}},
    {256, 256, {.rows = 128, .keys = 64, .warps = 12, .stages = 2}},
};

bool is_possible(const KernelConfig& c) {
  const Tiling& t = c.tiling;
  const int consumers = consumers_of(t);
  const int registers = t.keys * 3 / 4 + c.dim_v / 2;
  return t.warps % 4 == 0 && (consumers == 2 || consumers == 3) &&
         t.rows == consumers * kWarpgroupRows && t.keys % 16 == 0 && t.keys <= 256 &&
         (!c.features.dropout || t.keys % 32 == 0) && t.stages <= kMostWgmmaStages &&
         t.slices * t.walkers == 1 && t.blocks == 1 && registers <= (consumers == 2 ? 196 : 132);
}

// Three warpgroups have no registers for elementwise terms, and leave more of a short row idle:
// under intervals at its diagonal, without at its end.
bool is_too_high(const KernelConfig& c, const TilingWish& wish) {
  const Features& f = c.features;
  if (c.tiling.rows <= 128) return false;
  const bool terms = f.softcap || f.bias || f.mask || f.alibi || f.sink || f.dropout;
  return terms || (f.interval ? wish.rows < 4096 : wish.rows <= 128);
}

void set_tiling(KernelConfig& c, const TilingWish& wish, const Tiling& tiling) {
  c.tiling = tiling;
  if (wish.forced) {
    for (int Tiling::*const member : {&Tiling::rows, &Tiling::keys, &Tiling::warps, &Tiling::stages,
                                      &Tiling::slices, &Tiling::walkers, &Tiling::blocks}) {
      if (wish.forced->*member > 0) c.tiling.*member = wish.forced->*member;
    }
    if (wish.forced->warps == 0) c.tiling.warps = 4 * (c.tiling.rows / kWarpgroupRows + 1);
  }
  c.dim = int(round_up(wish.dim, 16));
  c.dim_v = int(round_up(wish.dim_v, 16));
}

}  // namespace

const char* why_not_wgmma(const Problem& p, const Chip& chip, int level) {
  if (chip.major != 9 || level < 90) {
    return "products of warpgroups are of compute capability 9.0 alone";
  }
  if (p.type != Type::f16 && p.type != Type::bf16) return "wgmma kernels multiply f16 and bf16";
  if (p.sizes.dim > kLargestHead || p.sizes.dim_v > kLargestHead) {
    return "wgmma kernels have no tile for head sizes above 256";
  }
  if (p.sizes.len_k == 0 || p.sizes.rows_k == 0) return "there is no key to load";
  const ForwardBoxes boxes = forward_boxes(p, kLines[0].tiling);
  for (const BoxedTensor* x : {&boxes.q, &boxes.k, &boxes.v}) {
    if (x->sizes[1] > 0 && x->sizes[3] > 0 && !is_boxable(*x)) {
      return "the copy engine takes neither q, k, v that do not begin rows at multiples of 16 "
             "bytes, nor strides of 0 or below";
    }
  }
  return nullptr;
}

const char* why_rather_mma(const Problem& p, const Chip& chip) {
  const Sizes& s = p.sizes;
  constexpr int64 kRows = 128;
  if (s.len_q <= kRows / 2) return "so few query rows leave most of a tile of 128 idle";
  if (2 * s.batch * s.heads_q * divide_up(s.len_q, kRows) < chip.multiprocessors) {
    return "tiles of 128 rows would leave most multiprocessors idle";
  }
  if (p.features.bias && is_bias_of_keys(p, false)) {
    return "mma kernels read a bias of keys once for all rows of a tile";
  }
  return nullptr;
}

KernelConfig wgmma_config(const Problem& p, int level) {
  return {.kernel = Kernel::forward,
          .family = Family::wgmma,
          .level = level,
          .type = p.type,
          .bias_type = p.features.bias ? p.bias.type : Type::none,
          .features = p.features,
          .boxed_out =
              !p.out.given() ||
              (p.out.type == p.type && is_boxable_result(forward_boxes(p, kLines[0].tiling).out)),
          .bias_aligned = is_bias_aligned(p),
          .mask_copy = bytes_of_mask_copy(p),
          .ragged = p.ragged};
}

Fit take_wgmma_tiling(KernelConfig& c, const TilingWish& wish) {
  for (const Line& line : kLines) {
    if (wish.dim > line.dim || wish.dim_v > line.dim_v) continue;
    set_tiling(c, wish, line.tiling);
    if (wish.forced && !is_possible(c)) return Fit::impossible;
    if (!wish.forced && is_too_high(c, wish)) continue;
    if (shared_bytes_of(c) <= wish.limits.block) return Fit::fits;
    if (wish.forced) break;
  }
  if (!stages_bias(c) && !stages_mask(c)) return Fit::no_room;
  // Then the bias and the mask are read where they are.
  c.bias_aligned = false;
  c.mask_copy = 1;
  return take_wgmma_tiling(c, wish);
}

}  // namespace regard
