// The choice of a family, by a table of rules.
#include "plan/cuda/planner.hpp"

#include <cstdint>
#include <span>

#include "plan/cuda/config_text.hpp"
#include "plan/cuda/facts.hpp"
#include "plan/cuda/families.hpp"
#include "plan/cuda/input_copies.hpp"
#include "plan/cuda/launches.hpp"

namespace regard {
namespace {

// The rules are in order of preference; simt computes everything.
constexpr Rule kRules[] = {
    {.family = Family::wgmma,
     .backward = false,
     .why_not = why_not_wgmma_forward,
     .why_rather_next = why_rather_mma_forward,
     .config = wgmma_forward_config,
     .choose_tiling = choose_wgmma_forward_tiling,
     .no_tiling = "no tile of the wgmma kernels fits"},
    {.family = Family::wgmma,
     .forward = false,
     .why_not = why_not_wgmma_backward,
     .why_rather_next = why_rather_mma_backward,
     .config = wgmma_backward_config,
     .choose_tiling = choose_wgmma_backward_tiling,
     .no_tiling = "no tile of the wgmma kernels fits"},
    {.family = Family::mma,
     .why_not = why_not_mma,
     .config = mma_config,
     .choose_tiling = choose_mma_tiling,
     .no_tiling = "no tile of these head sizes fits the shared memory of a block"},
    {.family = Family::simt,
     .config = simt_main_config,
     .choose_tiling = choose_simt_tiling,
     .no_tiling = "no tile fits the shared memory of a block"},
};

// Where wgmma is asked for by name, mma does what it cannot do of the backward pass.
bool applies(const Rule& rule, const CudaChoice& choice, bool backward) {
  return (backward ? rule.backward : rule.forward) &&
         (choice.any_family || choice.family == rule.family ||
          (backward && choice.family == Family::wgmma && rule.family == Family::mma));
}

Refusal refused_tiling(Fit fit) {
  return fit == Fit::impossible ? "the kernel cannot have the tiling that was asked for by name"
                                : "the tiling that was asked for by name needs more shared memory "
                                  "than a block may use";
}

// Sets the main kernel, if the family takes it; `is_final`: a refusal that no other family changes.
Refusal try_rule(Draft& d, const Rule& rule, bool& is_final) {
  Refusal refusal;
  if (rule.why_not) refusal = rule.why_not(d.facts);
  if (!refusal && rule.why_rather_next && d.choice.any_family) {
    refusal = rule.why_rather_next(d.facts);
  }
  if (refusal) return refusal;
  d.main = rule.config(d.facts);
  const Fit fit = rule.choose_tiling(d.main, d.request(d.main, true));
  if (fit == Fit::fits) return {};
  // A tiling that wgmma cannot have may be meant for mma.
  is_final = d.choice.has_tiling && !(d.choice.any_family && rule.family == Family::wgmma);
  return is_final ? refused_tiling(fit) : rule.no_tiling;
}

Refusal choose_family(Draft& d) {
  constexpr int kWgmmaLevel = 90;
  Refusal refusal;
  const Rule* refused = nullptr;
  bool is_final = false;
  for (const Rule& rule : kRules) {
    if (is_final || !applies(rule, d.choice, d.p.backward)) continue;
    if (refused && (refused->family != Family::wgmma || d.facts.level >= kWgmmaLevel)) {
      d.because("not ", name_of(refused->family), ": ", refusal.why);
    }
    refusal = try_rule(d, rule, is_final);
    if (!refusal) {
      d.plan.family = rule.family;
      if (rule.family != Family::simt) d.plan.level = d.facts.level;
      if (rule.family == Family::wgmma) d.plan.copies = d.facts.copies;
      if (rule.family == Family::mma) d.plan.copies = inputs_to_align(d.p);
      explain_family(d.because, d.p, d.choice, d.main);
      choose_tile_map(d);
      explain_mask(d.because, d.p, d.main);
      return {};
    }
    refused = &rule;
  }
  return refusal;
}

// Why no family does it.
Refusal why_not_any(const Problem& p, const Chip& chip, const CudaChoice& choice) {
  if (chip.capability() < 50) return "GPUs before compute capability 5.0 are not served";
  if (p.sizes.dim > kLargestGpuHead || p.sizes.dim_v > kLargestGpuHead) {
    return "head sizes above 512 are not served on a GPU";
  }
  if (choice.shared > chip.shared_per_block) {
    return "the chip has less shared memory than was asked for by name";
  }
  if (p.sizes.batch * p.sizes.heads_q > INT32_MAX) {
    return "batch times heads must be below 2^31 on a GPU";
  }
  if (larger(p.sizes.len_q, p.sizes.len_k) > kMostGpuLength) {
    return "sequences of more than 2^31 - 1024 rows or keys are not served on a GPU";
  }
  if (choice.level > level_of(chip)) {
    return "the chip lacks the instructions of the level that was asked for by name";
  }
  return {};
}

// The chip as if it had no more multiprocessors than the call may occupy.
Chip limited(Chip chip, const CudaChoice& choice) {
  if (choice.multiprocessors > 0) {
    chip.multiprocessors = smaller(chip.multiprocessors, choice.multiprocessors);
  }
  return chip;
}

// Which kernels the limit holds for, and which have more blocks.
void explain_limit(const Draft& d) {
  if (d.choice.multiprocessors == 0 || !d.because.asked()) return;
  std::string held, others;
  for (const CudaLaunch& launch : d.plan.launches) {
    std::string& names = launch.blocks() <= d.facts.chip.multiprocessors ? held : others;
    names.append(names.empty() ? "" : ", ").append(name_of(launch.config.kernel));
  }
  if (!held.empty()) {
    d.because("at most ", d.facts.chip.multiprocessors, " multiprocessors: ", held);
  }
  if (!others.empty()) {
    d.because("not limited to ", d.facts.chip.multiprocessors,
              " multiprocessors, because each tile has a block: ", others);
  }
}

}  // namespace

TilingRequest Facts::request(bool pack_gqa) const {
  const Problem& p = problem;
  const Sizes& s = p.sizes;
  const int64 group = pack_gqa ? s.group() : 1;
  return {.dim = s.dim,
          .dim_v = s.dim_v,
          .rows = group * s.len_q,
          .usual_rows = group * usual_rows(p),
          .keys = s.len_k,
          .mean_rows = group * mean_length(p, s.rows_q, s.len_q),
          .mean_keys = mean_length(p, s.rows_k, s.len_k),
          .mask = p.mask_params,
          .heads = s.batch * (pack_gqa ? s.heads_kv : s.heads_q),
          .heads_kv = s.batch * s.heads_kv,
          .multiprocessors = chip.multiprocessors,
          .limits = {}};
}

TilingRequest Draft::request(const KernelConfig& c, bool is_main) const {
  TilingRequest request = facts.request(c.pack_gqa);
  request.limits = limits;
  if (is_main && choice.has_tiling) request.forced = &choice.tiling;
  return request;
}

Facts::Facts(const Problem& p, const Chip& c, int instruction_level, bool limited)
    : problem(p),
      chip(c),
      level(instruction_level),
      is_limited(limited),
      copies(inputs_to_copy(p)),
      copies_fit(copies_bytes(p, copies).fits()) {
  if (copies_fit && !copies.empty()) copied_ = with_copies(p, copies, nullptr);
}

std::string CudaPlan::name() const { return std::string("cuda:") + name_of(family); }

std::vector<KernelConfig> configs_of(const CudaPlan& plan) {
  std::vector<KernelConfig> configs;
  for (const CudaLaunch& launch : plan.launches) configs.push_back(launch.config);
  remove_repetitions(configs);
  return configs;
}

void remove_repetitions(std::vector<KernelConfig>& configs) {
  auto end = configs.begin();
  for (const KernelConfig& config : configs) {
    if (std::find(configs.begin(), end, config) == end) *end++ = config;
  }
  configs.erase(end, configs.end());
}

CudaPlan plan_cuda(const Problem& p, const Chip& whole_chip, const CudaChoice& choice,
                   Reasons reasons) {
  CudaPlan plan;
  const Chip chip = limited(whole_chip, choice);
  if (const Refusal refusal = why_not_any(p, chip, choice)) {
    plan.refusal = refusal.why;
    return plan;
  }
  const Facts facts(p, chip, choice.level > 0 ? choice.level : level_of(chip),
                    chip.multiprocessors < whole_chip.multiprocessors);
  Draft draft{.facts = facts,
              .p = p,
              .choice = choice,
              .limits = choice.shared > 0
                            ? SharedLimits{choice.shared, choice.shared + 1024}
                            : SharedLimits{chip.shared_per_block, chip.shared_per_multiprocessor},
              .plan = plan,
              .because = Because(plan.reasons, reasons == Reasons::given)};
  if (const Refusal refusal = choose_family(draft)) {
    draft.refuse(refusal);
    return plan;
  }
  plan.launches.reserve(8);
  p.backward ? add_backward_launches(draft) : add_forward_launches(draft);
  explain_limit(draft);
  if (plan.supported() && !Count(plan.workspace.size).fits()) draft.refuse(kRefusedAsTooLarge);
  if (!plan.supported()) {
    plan.launches.clear();
    plan.workspace = {};
  }
  return plan;
}

}  // namespace regard
