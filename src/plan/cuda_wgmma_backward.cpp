// What the wgmma backward kernel takes, and its tiles.
#include "plan/cuda_wgmma_backward.hpp"

#include "plan/block_grid.h"
#include "plan/boxed_tensor.hpp"
#include "plan/cuda_facts.hpp"
#include "plan/wgmma_backward_layout.h"

namespace regard {
namespace {

constexpr int64 kLargestHead = 128;  // dk and dv of 64 keys are 128 registers then
constexpr int64 kLargestHeadOfSoftcapAndDropout = 64;
// Scales below it would make lse / scale pass what the sum of three f16 terms can be.
constexpr double kLeastScaleF16 = 0x1p-12;

constexpr Tiling kTiling = {.rows = 64, .keys = 128, .warps = 12, .stages = 2};

bool is_loadable(const BoxedTensor& x) { return x.sizes[1] > 0 && is_boxable(x); }

// Whether a gradient that is wanted can be written by the copy engine.
bool is_storable(const Problem& p, const View& gradient, const BoxedTensor& x) {
  return !gradient.given() || (gradient.type == p.type && is_boxable_result(x));
}

const char* why_not_bias(const Problem& p) {
  if (!p.features.bias) return nullptr;
  if (p.wants(p.dbias)) return "the wgmma backward kernel makes no gradient of the bias";
  if (!is_bias_aligned(p) && !is_bias_of_keys(p, false)) {
    return "the wgmma backward kernel reads no bias one by one: it is f64, unaligned, or all keys "
           "share it";
  }
  return nullptr;
}

}  // namespace

const char* why_not_wgmma_backward(const Problem& p, const Chip& chip, int level) {
  if (chip.major != 9 || level < 90) {
    return "products of warpgroups are of compute capability 9.0 alone";
  }
  if (p.type != Type::f16 && p.type != Type::bf16) return "wgmma kernels multiply f16 and bf16";
  if (p.sizes.dim > kLargestHead || p.sizes.dim_v > kLargestHead) {
    return "the wgmma backward kernel has no tile for head sizes above 128";
  }
  if (p.type == Type::f16 && adds_lse_by_product(p.features) && p.score.scale < kLeastScaleF16) {
    return "lse / scale would pass the range of f16 terms";
  }
  if (p.dout.given() && p.dout.type != p.type) return "dout is f32";
  if (p.features.softcap && p.features.dropout &&
      larger(p.sizes.dim, p.sizes.dim_v) > kLargestHeadOfSoftcapAndDropout) {
    return "softcap and dropout together take more registers than there are for head sizes above "
           "64";
  }
  const BackwardBoxes boxes = backward_boxes(p, kTiling);
  for (const BoxedTensor* x : {&boxes.q, &boxes.k, &boxes.v}) {
    if (x->sizes[1] == 0 || x->sizes[3] == 0) return "there are no rows to load";
  }
  for (const BoxedTensor* x : {&boxes.q, &boxes.k, &boxes.v, &boxes.dout}) {
    if (x->type != Type::none && !is_loadable(*x)) {
      return "the copy engine takes neither q, k, v, dout that do not begin rows at multiples of "
             "16 bytes, nor strides of 0 or below";
    }
  }
  return why_not_bias(p);
}

KernelConfig wgmma_backward_config(const Problem& p, int level) {
  const BackwardBoxes boxes = backward_boxes(p, kTiling);
  KernelConfig c{.kernel = Kernel::backward,
                 .family = Family::wgmma,
                 .level = level,
                 .type = p.type,
                 .bias_type = p.features.bias ? p.bias.type : Type::none,
                 .features = p.features,
                 .boxed_out = !p.accumulate && is_storable(p, p.dk, boxes.dk) &&
                              is_storable(p, p.dv, boxes.dv),
                 .bias_aligned = is_bias_aligned(p),
                 .bias_of_keys = is_bias_of_keys(p, false),
                 .mask_of_keys = is_mask_of_keys(p, false),
                 .mask_copy = bytes_of_mask_copy(p),
                 .ragged = p.ragged,
                 .wants_dq = p.wants(p.dq),
                 .wants_dk = p.wants(p.dk),
                 .wants_dv = p.wants(p.dv)};
  c.features.sink = false;  // it is in the lse
  c.ordered = p.deterministic && c.wants_dq;
  return c;
}

Fit take_wgmma_backward_tiling(KernelConfig& c, const TilingWish& wish) {
  c.tiling = kTiling;
  c.dim = int(round_up(wish.dim, 16));
  c.dim_v = int(round_up(wish.dim_v, 16));
  if (wish.forced) {
    for (int Tiling::*const member : {&Tiling::rows, &Tiling::keys, &Tiling::warps, &Tiling::stages,
                                      &Tiling::slices, &Tiling::walkers, &Tiling::blocks}) {
      const int asked = wish.forced->*member;
      if (asked > 0 && asked != kTiling.*member) return Fit::impossible;
    }
  }
  return backward_wgmma_shared(c) <= wish.limits.block ? Fit::fits : Fit::no_room;
}

void ask_for_row_terms(KernelConfig& delta, const KernelConfig& main) {
  delta.row_terms = true;
  delta.features.signed_scale = !adds_lse_by_product(main.features);
  delta.features.dropout = !adds_delta_by_product(main.features);
}

int64 row_terms_bytes(const Problem& p) { return 2 * term_rows(p) * kRowTermBytes; }

}  // namespace regard
