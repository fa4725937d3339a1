// Reasons for the main kernel of a plan.
#include "plan/cuda/reasons.hpp"

#include "plan/cuda/config_text.hpp"
#include "plan/cuda/facts.hpp"
#include "plan/cuda/kernel/mma_layout.h"

namespace regard {
namespace {

std::string family_reason(const CudaChoice& choice, Family family) {
  const std::string name = name_of(family);
  if (!choice.any_family) {
    return choice.family == family ? name + ": asked for by name"
                                   : name + ": the backward pass of " + name_of(choice.family);
  }
  return name + (family == Family::wgmma ? ": this chip's warpgroups multiply this type"
                                         : ": the chip's tensor cores multiply this type");
}

const char* why_bias_is_not_staged(const Problem& p) {
  if (p.bias.type == Type::f64) return "it is f64";
  if (is_bias_aligned(p)) return "shared memory has no room for its tiles";
  return "its rows do not begin at multiples of 16 bytes, or all keys share it";
}

}  // namespace

void explain_family(const Because& because, const Problem& p, const CudaChoice& choice,
                    const KernelConfig& main) {
  if (!because.asked()) return;
  if (main.family == Family::simt) {
    if (!choice.any_family) because("simt: asked for by name");
    return;
  }
  because(family_reason(choice, main.family).c_str());
  if (main.products == Products::tf32x3) {
    because("tf32x3: three tf32 products of two-term splits keep the accuracy of f32");
  } else if (main.products == Products::f16x3) {
    because("f16x3: three f16 products of hi and lo parts, split first, keep the accuracy of f32");
  } else if (main.products == Products::tf32) {
    because("tf32: one tf32 product for each f32 product, as the precision asks for");
  }
  if (choice.has_tiling) because("tiling: asked for by name");
  if (main.tiling.key_warps > 1) {
    because("split over warps: each warp has all rows of the tile and some of the keys");
  }
  if (!main.aligned) {
    because(
        "slow path: rows of q, k, v or dout do not begin at multiples of 16 bytes; elements are "
        "read "
        "one by one");
  }
  if (main.family == Family::wgmma && main.products == Products::direct && !main.out_by_tma) {
    const bool is_wide = !p.backward && (main.dim > 256 || main.tiling.slices > 1);
    because("out: written from registers, because ",
            is_wide ? "shared memory has no room for it" : "TMA cannot store it");
  }
  if (p.features.bias && !main.bias.aligned && !main.bias.one_row) {
    because("slow path: the bias is read one by one: ", why_bias_is_not_staged(p));
  }
}

void explain_mask(const Because& because, const Problem& p, const KernelConfig& main) {
  if (!p.features.mask || main.family == Family::simt) return;
  if (main.mask.as_bits) {
    if (bytes_of_mask_copy(p) == 1) because(kMapOfSingleBytes);
  } else if (!stages_mask(main)) {
    because("slow path: the mask's bytes are read one by one");
  } else if (main.mask.copy_bytes == 1) {
    because(
        "slow path: the mask is copied byte by byte: its rows are not aligned to 4 bytes, or its "
        "keys "
        "lie apart");
  }
}

void explain_gradients(const Because& because, const Problem& p, const KernelConfig& main,
                       bool sums_dbias_in_place) {
  if (main.ordered_dq) {
    because("deterministic: blocks add to dq in the order of their keys, by a semaphore");
  }
  if (!p.features.bias || !p.wants(p.dbias)) return;
  switch (main.dbias.how) {
    case BiasGradient::none:
      because(main.family == Family::simt
                  ? "dbias: a separate pass"
                  : "deterministic: a broadcast bias gets its gradient from a separate pass "
                    "without tensor cores");
      break;
    case BiasGradient::store:
      because(main.cluster > 1 ? "dbias: clusters of blocks sum over the batch; every element is "
                                 "written once"
                               : "dbias: not broadcast; every element is written once");
      break;
    default:
      because("dbias: added to f32 sums ",
              sums_dbias_in_place ? "in dbias itself" : "in the workspace");
  }
}

}  // namespace regard
