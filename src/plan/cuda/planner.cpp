// Every decision of the GPU: family, kernels, tiles, grids, splits, workspace.
#include <cstdint>
#include <optional>
#include <utility>

#include "plan/cuda/config_text.hpp"
#include "plan/cuda/facts.hpp"
#include "plan/cuda/input_copies.hpp"
#include "plan/cuda/kernel/mma_layout.h"
#include "plan/cuda/kernel/simt_layout.h"
#include "plan/cuda/kernel/wgmma_backward_layout.h"
#include "plan/cuda/plan.hpp"
#include "plan/cuda/reasons.hpp"
#include "plan/cuda/tiling.hpp"
#include "plan/cuda/wgmma_backward.hpp"
#include "plan/cuda/wgmma_forward.hpp"
#include "plan/cuda/workspace_room.hpp"

namespace regard {
namespace {

constexpr int64 kMostBlocks = INT32_MAX;  // of a grid
constexpr int64 kCounterBytes = 8;
constexpr int64 kAnyFlagBytes = 16;  // of rows and of keys: the call that marked one
constexpr int64 kKeyFlagBytes = 2;   // of a key: one for dk and one for dv
constexpr const char* kWhyMarks =
    "marks: a row or key whose result is not finite, or of which planes may have lost too much, is "
    "computed again without tensor cores: 0 * NaN of hidden pairs, split products or terms spoils "
    "it";

class Planner {
 public:
  Planner(const Problem& problem, const Chip& chip, const CudaChoice& choice, Reasons reasons)
      : p_(problem),
        s_(problem.sizes),
        chip_(chip),
        choice_(choice),
        because_(plan_.reasons, reasons == Reasons::given) {}

  CudaPlan make() {
    if (!is_reasonable() || !choose_family()) return std::move(plan_);
    plan_.launches.reserve(8);
    if (p_.backward) {
      plan_backward();
    } else {
      plan_forward();
    }
    if (plan_.refusal.empty() && !Count(plan_.workspace.size).fits()) {
      plan_.too_large = true;
      refuse(kTooLarge);
    }
    if (!plan_.refusal.empty()) {
      plan_.launches.clear();
      plan_.workspace = {};
    }
    return std::move(plan_);
  }

 private:
  bool refuse(const char* why) {
    plan_.refusal = why;
    return false;
  }

  // ---------------------------------------------------------------------------- what can be done

  bool is_reasonable() {
    if (chip_.capability() < 50) return refuse("GPUs before compute capability 5.0 are not served");
    if (s_.dim > kLargestGpuHead || s_.dim_v > kLargestGpuHead) {
      return refuse("head sizes above 512 are not served on a GPU");
    }
    if (choice_.shared > chip_.shared_per_block) {
      return refuse("the chip has less shared memory than was asked for by name");
    }
    if (s_.batch * s_.heads_q > kMostBlocks) {
      return refuse("batch times heads must be below 2^31 on a GPU");
    }
    limits_ = choice_.shared > 0
                  ? SharedLimits{choice_.shared, choice_.shared + 1024}
                  : SharedLimits{chip_.shared_per_block, chip_.shared_per_multiprocessor};
    return true;
  }

  // Null where tensor cores can compute the problem.
  const char* why_not_mma() const {
    if (p_.type == Type::f64) return "f64 is computed without tensor cores";
    if (level_ < 75) return "the chip has none of the tensor core instructions that are used here";
    if (level_ < 80 && p_.type != Type::f16) {
      return "tensor cores of level 75 multiply f16 alone";
    }
    return nullptr;
  }

  bool choose_family() {
    const int chip_level = level_of(chip_);
    level_ = choice_.level > 0 ? choice_.level : chip_level;
    if (level_ > chip_level) {
      return refuse("the chip lacks the instructions of the level that was asked for by name");
    }
    const bool simt_asked = !choice_.any_family && choice_.family == Family::simt;
    if (simt_asked) {
      because_("simt: asked for by name");
      return take_simt();
    }
    if (choose_wgmma()) return plan_.refusal.empty();
    const char* why_not = why_not_mma();
    if (!why_not) {
      main_ = mma_config();
      const Fit fit = take_mma_tiling(main_, wish(true));
      if (fit == Fit::fits) return took(Family::mma);
      if (choice_.has_tiling) return refuse_tiling(fit);
      why_not = "no tile of these head sizes fits the shared memory of a block";
    }
    if (!choice_.any_family) return refuse(why_not);
    because_("simt: ", why_not);
    return take_simt();
  }

  // Whether the choice is made: wgmma, or a refusal where it was asked for by name.
  bool choose_wgmma() {
    if (!choice_.any_family && choice_.family != Family::wgmma) return false;
    const bool back = p_.backward;
    plan_.copies = inputs_to_copy(p_);
    const bool fits = copies_bytes(p_, plan_.copies).fits();
    if (fits && !plan_.copies.empty()) copied_ = with_copies(p_, plan_.copies, nullptr);
    const Problem& p = copied_ ? *copied_ : p_;
    const char* why_not = !fits  ? kTooLarge
                          : back ? why_not_wgmma_backward(p, chip_, level_)
                                 : why_not_wgmma(p, chip_, level_);
    if (!why_not && choice_.any_family) {
      why_not = back ? why_rather_mma_backward(p) : why_rather_mma(p, chip_);
      if (!why_not) why_not = why_not_copies(p_, plan_.copies);
    }
    if (!why_not) {
      main_ = back ? wgmma_backward_config(p, level_) : wgmma_config(p, level_);
      const Fit fit = back ? take_wgmma_backward_tiling(main_, wish(true))
                           : take_wgmma_tiling(main_, wish(true));
      if (fit == Fit::fits) return took(Family::wgmma);
      why_not = "no tile of the wgmma kernels fits";
      if (choice_.has_tiling && !choice_.any_family) refuse_tiling(fit);
      main_ = {};
    }
    plan_.copies = {};
    // What they cannot do of the backward pass is mma's, also where wgmma was asked for.
    if (choice_.any_family || (back && plan_.refusal.empty())) {
      if (level_ >= 90) because_("not wgmma: ", why_not);
      return false;
    }
    if (plan_.refusal.empty()) refuse(why_not);
    plan_.too_large = !fits;
    return true;
  }

  bool took(Family family) {
    plan_.family = family;
    plan_.level = level_;
    explain_family(because_, p_, choice_, main_);
    return true;
  }

  bool refuse_tiling(Fit fit) {
    return refuse(fit == Fit::impossible
                      ? "the kernel cannot have the tiling that was asked for by name"
                      : "the tiling that was asked for by name needs more shared memory than a "
                        "block may use");
  }

  bool take_simt() {
    main_ = simt_config(p_.backward ? Kernel::key_gradient : Kernel::forward);
    const Fit fit = take_simt_tiling(main_, wish(true));
    if (fit == Fit::fits) return true;
    return choice_.has_tiling ? refuse_tiling(fit)
                              : refuse("no tile fits the shared memory of a block");
  }

  // --------------------------------------------------------------------------------------- configs

  bool wants_dbias() const { return p_.features.bias && p_.wants(p_.dbias); }
  bool wants_dsink() const { return p_.features.sink && p_.wants(p_.dsink); }

  TilingWish wish(bool main) const {
    return {.dim = s_.dim,
            .dim_v = s_.dim_v,
            .rows = main_.pack_gqa ? s_.group() * s_.len_q : s_.len_q,
            .keys = s_.len_k,
            .heads = s_.batch * (main_.pack_gqa ? s_.heads_kv : s_.heads_q),
            .multiprocessors = chip_.multiprocessors,
            .limits = limits_,
            .forced = main && choice_.has_tiling ? &choice_.tiling : nullptr};
  }

  // Sinks are in the lse that the backward pass starts from.
  Features features() const {
    Features features = p_.features;
    if (p_.backward) features.sink = false;
    return features;
  }

  KernelConfig mma_config() const {
    const bool pack_gqa = !p_.backward && packs_gqa();
    KernelConfig c{.kernel = p_.backward ? Kernel::backward : Kernel::forward,
                   .family = Family::mma,
                   .level = level_,
                   .type = p_.type,
                   .features = features(),
                   .aligned = is_aligned(p_),
                   .bias = bias_form(p_, pack_gqa),
                   .mask = mask_form(p_, pack_gqa),
                   .varlen = p_.varlen,
                   .pack_gqa = pack_gqa};
    if (p_.type == Type::f32) {
      c.products = p_.precision == 0 ? Products::tf32x3 : Products::tf32;
    }
    if (!p_.backward) return c;
    c.wanted = wanted_of(p_);
    c.dout_is_f32 = p_.dout.given() && p_.dout.type != p_.type;
    c.dbias.how = bias_gradient();
    c.ordered_dq = p_.deterministic && c.wanted.dq;
    return c;
  }

  // Rows of all heads that share keys in one tile, where that at least halves the tiles.
  bool packs_gqa() const {
    constexpr int64 kRows = 64;
    const int64 group = s_.group();
    return group > 1 && s_.len_q <= kRows &&
           2 * divide_up(group * s_.len_q, kRows) <= group * divide_up(s_.len_q, kRows);
  }

  // Tiles that intervals or lengths hide are not visited, so that nothing would be stored in them.
  bool sums_dbias() const {
    return is_broadcast(p_) || (!p_.accumulate && (p_.features.interval || p_.varlen));
  }
  // Adding in any order is exact only where each element is added once.
  bool has_bias_pass() const { return wants_dbias() && main_.dbias.how == BiasGradient::none; }
  // How the mma kernel makes dbias; not at all where a pass of its own does.
  BiasGradient bias_gradient() const {
    if (!wants_dbias() || (p_.deterministic && is_broadcast(p_))) return BiasGradient::none;
    if (!sums_dbias()) return BiasGradient::store;
    if (p_.bias_sizes[2] == 1) return BiasGradient::add_to_row;
    return p_.bias_sizes[3] == 1 ? BiasGradient::add_to_column : BiasGradient::add;
  }
  bool adds_dbias() const {
    return main_.dbias.how != BiasGradient::none && main_.dbias.how != BiasGradient::store;
  }
  bool sums_dbias_in_place() const {
    return adds_dbias() && p_.accumulate && p_.dbias.given() && p_.dbias.type == Type::f32;
  }

  // Of a kernel that knows no head sizes and no features.
  KernelConfig plain_config(Kernel kernel) const {
    return {.kernel = kernel,
            .family = Family::simt,
            .level = 50,
            .type = p_.type,
            .varlen = p_.varlen};
  }

  KernelConfig simt_config(Kernel kernel) const {
    KernelConfig c = plain_config(kernel);
    c.bias.type = p_.features.bias ? p_.bias.type : Type::none;
    c.features = features();
    c.dim = int(s_.dim);
    c.dim_v = int(s_.dim_v);
    c.aligned = is_aligned(p_);
    c.wanted.dq = kernel == Kernel::query_gradient;
    c.wanted.dk = kernel == Kernel::key_gradient && p_.wants(p_.dk);
    c.wanted.dv = kernel == Kernel::key_gradient && p_.wants(p_.dv);
    return c;
  }

  void launch(const KernelConfig& config, int64 heads, int64 tiles, int64 splits,
              int64 heads_per_group) {
    const double blocks = double(heads) * double(tiles) * double(splits);
    if (blocks == 0) return;
    if (blocks > double(kMostBlocks)) {
      refuse("the problem needs more blocks than a grid can have");
      return;
    }
    plan_.launches.push_back(
        {.config = config,
         .grid = {.heads = int32(heads),
                  .tiles = int32(tiles),
                  .splits = int32(splits),
                  .heads_per_group = int32(clamp_to<int64>(heads_per_group, 1, heads)),
                  .batch = config.family == Family::simt ? 1 : int32(batch_of_bias(p_))},
         .threads = config.tiling.warps * 32,
         .shared_bytes = shared_bytes_of(config),
         .resident = config.family == Family::wgmma && !p_.backward ? chip_.multiprocessors : 0});
  }

  // A kernel of family simt; the main one has its tiling already.
  void launch_simt(KernelConfig config) {
    const bool is_main = plan_.family == Family::simt && config.kernel == main_.kernel;
    if (!is_main && take_simt_tiling(config, wish(false)) != Fit::fits) {
      refuse("no tile fits the shared memory of a block");
    }
    launch(config, simt_heads(p_, config), simt_tiles(p_, config), 1, 1);
  }

  void launch_marked(Kernel kernel) {
    KernelConfig config = simt_config(kernel);
    config.only_flagged = true;
    launch_simt(config);
  }

  // Pairs of blocks keep lse and delta in one row of terms: what is not finite of one is multiplied
  // by the 0 of the other's product.
  bool may_spoil_results() const {
    return plan_.family != Family::simt &&
           (hides_pairs(p_) || has_two_terms(main_.products) || main_.cta_pair);
  }

  // --------------------------------------------------------------------------------------- forward

  void plan_forward() {
    if (plan_.family == Family::simt) {
      launch_simt(main_);
      return;
    }
    const bool marks = may_spoil_results();
    const int64 heads = s_.batch * (main_.pack_gqa ? s_.heads_kv : s_.heads_q);
    const int64 tiles =
        divide_up(main_.pack_gqa ? s_.group() * s_.len_q : s_.len_q, main_.tiling.rows);
    const bool wgmma = plan_.family == Family::wgmma;
    const int64 key_tiles = divide_up(keys_in_reach(p_), main_.tiling.keys);
    plan_.splits = wgmma ? 1 : splits_for(main_, chip_, wish(true), heads * tiles, key_tiles);
    main_.split_kv = plan_.splits > 1;
    main_.merges_splits = main_.split_kv && last_split_merges(main_, wish(true), plan_.splits);
    const bool combines = main_.split_kv && !main_.merges_splits;
    main_.flags_nonfinite = marks && !combines;
    add_copies_launch(plan_, p_, because_);
    add_split_launch(plan_, p_, main_);
    launch(
        main_, heads, tiles, plan_.splits,
        wgmma ? heads_of_wgmma_group(p_, chip_) : heads_sharing_cache(p_, chip_, main_.pack_gqa));
    if (main_.pack_gqa) {
      because_("packed GQA: the rows of ", s_.group(), " query heads that share keys fill a tile");
    }
    if (main_.split_kv) {
      because_("split: ", heads * tiles,
               " tiles of rows would leave multiprocessors idle; the keys "
               "of each go to ",
               plan_.splits, main_.merges_splits ? " blocks, of which the last merges" : " blocks");
    }
    if (combines) {
      KernelConfig combine = plain_config(Kernel::combine);
      combine.features.sink = p_.features.sink;
      combine.features.dropout = p_.features.dropout;
      combine.dim_v = int(s_.dim_v);
      combine.flags_nonfinite = marks;
      launch_simt(combine);
    }
    if (marks) {
      because_(kWhyMarks);
      launch_marked(Kernel::forward);
    }
    WorkspaceRoom room;
    room.take(plan_.workspace.tile_counter, counts_tiles(main_) ? kCounterBytes : 0);
    room.take(plan_.workspace.dq_semaphores, 0);
    room.take(plan_.workspace.any_flag, marks ? kAnyFlagBytes : 0);
    room.take(plan_.workspace.flags_q, marks ? Count(s_.heads_q) * s_.rows_q : 0);
    CudaWorkspace& w = plan_.workspace;
    room.take_none(w.flags_k, w.dbias_sums);
    // The counter and what says that there are marks begin as anything: they bring the number of
    // their call. Every mark is written, but by warps that have slices of a row.
    if (!main_.split_kv && main_.tiling.slices > 1) w.clear = room.size();
    room.take_none(w.row_states, w.row_terms, w.dq_sums);
    const Count rows = combines ? Count(plan_.splits) * s_.heads_q * s_.rows_q : 0;
    const Count blocks = main_.merges_splits ? Count(heads) * tiles * plan_.splits : 0;
    room.take(w.partial_out,
              rows * s_.dim_v * 4 + blocks * main_.tiling.rows * partial_row_bytes(main_));
    room.take(w.partial_rows, rows * 2 * 4);
    room.take(w.arrivals, blocks * 8);
    room.take(w.hi_lo, hi_lo_bytes(p_, main_));
    room.take(w.copies, copies_bytes(p_, copies_at_most(plan_, p_)));
    w.size = room.size();
  }

  // -------------------------------------------------------------------------------------- backward

  void plan_backward() {
    const bool mma = plan_.family != Family::simt, wgmma = plan_.family == Family::wgmma;
    const bool wants_dq = p_.wants(p_.dq), wants_dkv = p_.wants(p_.dk) || p_.wants(p_.dv);
    const bool marks = may_spoil_results() && (wants_dq || wants_dkv);
    KernelConfig delta = plain_config(Kernel::delta);
    delta.dim_v = int(s_.dim_v);
    if (mma && wants_dq) {
      delta.dim = main_.dim;
      delta.wanted.dq = true;
    }
    add_copies_launch(plan_, p_, because_);
    if (wgmma) ask_for_row_terms(delta, main_);
    launch_simt(delta);
    if (wants_dq || wants_dkv) add_split_launch(plan_, p_, main_);
    if (mma) {
      main_.flags_nonfinite = marks && wants_dkv;
      main_.dbias.pairs = !wgmma && main_.dbias.how == BiasGradient::add &&
                          (!sums_dbias_in_place() || has_aligned_pairs(p_.dbias));
      if (wants_dq || wants_dkv || main_.dbias.how != BiasGradient::none) {
        launch(main_, s_.batch * s_.heads_kv, key_tiles(main_, s_.len_k), 1,
               round_up(heads_taking_turns(main_, chip_, s_.len_k), batch_of_bias(p_)));
      }
      if (wants_dq) launch_convert_dq(marks);
      if (adds_dbias() && !sums_dbias_in_place()) launch_convert_dbias();
    } else {
      if (wants_dkv) launch_simt(main_);
      if (wants_dq) launch_simt(simt_config(Kernel::query_gradient));
    }
    if (has_bias_pass()) launch_simt(simt_config(Kernel::bias_gradient));
    if (wants_dsink()) launch_simt(plain_config(Kernel::sink_gradient));
    if (marks) {
      because_(kWhyMarks);
      if (wants_dq) launch_marked(Kernel::query_gradient);
      if (wants_dkv) launch_marked(Kernel::key_gradient);
    }
    explain_gradients(because_, p_, main_, sums_dbias_in_place());
    lay_out_backward(marks, mma && wants_dq, wants_dkv);
  }

  void launch_convert_dq(bool marks) {
    KernelConfig config = plain_config(Kernel::convert_dq);
    config.level = level_;  // the order of the sums depends on it
    config.dim = main_.dim;
    config.row_terms.used = main_.products == Products::f16x3;
    config.flags_nonfinite = marks;
    launch_simt(config);
  }
  void launch_convert_dbias() {
    KernelConfig config = plain_config(Kernel::convert_dbias);
    config.bias.type = p_.bias.type;
    config.varlen = false;
    launch_simt(config);
  }

  void lay_out_backward(bool marks, bool sums_dq, bool wants_dkv) {
    const Count rows = Count(s_.heads_q) * s_.rows_q;
    CudaWorkspace& w = plan_.workspace;
    WorkspaceRoom room;
    room.take(
        w.dq_semaphores,
        main_.ordered_dq ? Count(s_.batch * s_.heads_q) * dq_semaphores(main_, s_.len_q) * 4 : 0);
    room.take(w.any_flag, marks ? kAnyFlagBytes : 0);
    room.take(w.flags_q, marks && sums_dq ? rows : 0);
    room.take(w.flags_k, marks && wants_dkv ? Count(s_.heads_kv) * s_.rows_k * kKeyFlagBytes : 0);
    room.take(w.dbias_sums, dbias_sums_bytes());
    w.clear = room.size();
    room.take(w.row_states, rows * 2 * (computes_in_f64(p_) ? 8 : 4));
    const bool own = main_.products != Products::f16x3 || sums_dq || wants_dkv;
    room.take(w.row_terms, own && main_.family == Family::wgmma ? row_terms_bytes(p_, main_) : 0);
    room.take(w.dq_sums, sums_dq ? Count(s_.heads_q) * dq_rows(p_) * main_.dim * 4 : 0);
    room.take_none(w.partial_out, w.partial_rows, w.arrivals);
    room.take(w.hi_lo, own ? hi_lo_bytes(p_, main_) : 0);
    room.take(w.copies, copies_bytes(p_, copies_at_most(plan_, p_)));
    w.size = room.size();
  }

  // Sets the strides of the sums too.
  Count dbias_sums_bytes() {
    if (!adds_dbias()) return 0;
    if (sums_dbias_in_place()) {
      plan_.dbias_strides = p_.dbias.strides;
      return 0;
    }
    const int64* sizes = p_.bias_sizes;
    // Rows that begin at 16 bytes, for additions by pairs and fours.
    const int64 row = sizes[3] > 1 ? round_up(sizes[3], 4) : 1;
    const Count head = Count(sizes[2]) * row, batch = head * sizes[1];
    plan_.dbias_strides = {.batch = sizes[0] == 1 ? 0 : batch.value(),
                           .head = sizes[1] == 1 ? 0 : head.value(),
                           .row = sizes[2] == 1 ? 0 : row,
                           .column = sizes[3] == 1 ? 0 : 1};
    return batch * sizes[0] * 4;
  }

  const Problem& p_;
  const Sizes& s_;
  const Chip& chip_;
  const CudaChoice& choice_;
  CudaPlan plan_;
  Because because_;
  SharedLimits limits_;
  int level_ = 50;
  KernelConfig main_;
  std::optional<Problem> copied_;  // p_, with the plan's copies in place of inputs
};

}  // namespace

std::string CudaPlan::name() const { return std::string("cuda:") + name_of(family); }

CudaPlan plan_cuda(const Problem& problem, const Chip& chip, const CudaChoice& choice,
                   Reasons reasons) {
  return Planner(problem, chip, choice, reasons).make();
}

}  // namespace regard
