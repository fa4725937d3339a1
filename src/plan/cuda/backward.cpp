// The launches and the workspace of a backward pass.
#include "plan/cuda/backward_order.hpp"
#include "plan/cuda/facts.hpp"
#include "plan/cuda/families.hpp"
#include "plan/cuda/input_copies.hpp"
#include "plan/cuda/launches.hpp"
#include "plan/cuda/splits.hpp"
#include "plan/cuda/whole_keys.hpp"

namespace regard {
namespace {

// What is wanted of the tensors that query rows and keys have.
struct Results {
  bool dq;
  bool dkv;
  bool flags;  // whether results that are not finite are flagged

  bool any() const { return dq || dkv; }
};

// Whether dbias is added to sums in memory, which are not dbias itself.
bool has_dbias_sums(const Draft& d) {
  return adds_dbias(d.main) && !adds_to_dbias_itself(d.p, d.main);
}

void add_delta_launch(Draft& d, const Results& results) {
  KernelConfig c = plain_config(d.p, Kernel::delta);
  c.dim_v = int(d.p.sizes.dim_v);
  c.row_terms = row_terms_of_delta(d.main);
  c.given_delta = d.p.delta.given();
  if (d.main.family != Family::simt) {  // what delta clears
    c.wanted.dq = results.dq;
    c.dim = results.dq ? d.main.dim : 0;
    c.ordered_dq = d.main.ordered_dq;
    c.flags_nonfinite = results.flags && results.dkv;
    if (has_dbias_sums(d)) c.dbias.how = BiasGradient::add;
  }
  add_simt_launch(d, c);
}

RowBlocks row_blocks(const Draft& d) {
  const KernelConfig& main = d.main;
  // Where wgmma may compute it, data that does not begin at 16 bytes has as many splits on mma.
  const bool may_be_wgmma = d.choice.any_family || d.choice.family == Family::wgmma;
  const bool rather_mma = d.choice.any_family && main.whole_keys && repays_whole_keys(d.facts);
  if (d.facts.level >= 90 && may_be_wgmma && !rather_mma) return row_blocks_of_wgmma(d.facts);
  const int64 multiprocessors = d.facts.chip.multiprocessors;
  if (main.whole_keys) return {.at_once = multiprocessors, .whole_keys = true};
  return {.at_once = multiprocessors * main.tiling.min_blocks};
}

// Few tiles of keys with many iterations leave multiprocessors idle.
void split_rows(Draft& d) {
  KernelConfig& main = d.main;
  if (main.repeats_rows) return;  // a block has flags of all rows of its keys
  d.plan.splits = row_splits_for(d.p, row_blocks(d)).count;
  if (d.plan.splits == 1) return;
  main.split_q = true;
  main.out_by_tma = false;
  d.because(
      "split: tiles of keys would leave multiprocessors idle; the query rows of each go to ",
      d.plan.splits, " blocks",
      splits_whole_heads(main) ? ", by whole heads, for the order or the sums of a head" : "");
}

void add_combine_dkv(Draft& d, bool flags) {
  KernelConfig c = plain_config(d.p, Kernel::combine_dkv);
  c.dim = int(d.p.sizes.dim);
  c.dim_v = int(d.p.sizes.dim_v);
  c.wanted = {.dk = d.main.wanted.dk, .dv = d.main.wanted.dv};
  c.flags_nonfinite = flags;
  add_simt_launch(d, c, 2);
}

// Whether finish can count its blocks in plain integers: strides of 0 make sizes that wrap around.
bool can_count_rows(const Problem& p) {
  const Sizes& s = p.sizes;
  const int64* bias = p.bias_sizes;
  const Count rows = Count(s.batch) * s.heads_q * s.len_q;
  const Count keys = Count(s.batch) * s.heads_kv * s.len_k;
  const Count dbias = Count(bias[0]) * bias[1] * bias[2] * bias[3];
  return rows.fits() && keys.fits() && dbias.fits();
}

void add_finish_launch(Draft& d, const Results& results) {
  const bool has_sums = has_dbias_sums(d);
  if (d.main.whole_keys || (!results.dq && !results.flags && !has_sums)) return;
  if (!can_count_rows(d.p)) return d.refuse(kTooManyBlocks);
  KernelConfig c =
      results.flags ? simt_config(d.p, Kernel::finish) : plain_config(d.p, Kernel::finish);
  c.level = d.main.level;  // the order of the sums depends on it
  c.sums_dim = results.dq ? d.main.dim : 0;
  c.row_terms.used = results.dq && d.main.products == Products::f16x3;
  c.flags_nonfinite = results.flags;
  c.dout_is_f32 = results.flags && d.p.dout.given() && d.p.dout.type != d.p.type;
  if (has_sums) {
    c.dbias.how = BiasGradient::add;
    c.bias.type = d.p.bias.type;
  }
  if (results.flags) explain_fixup(d.because);
  add_simt_launch(d, c);
}

void add_main_launches(Draft& d, const Results& results) {
  KernelConfig& main = d.main;
  if (main.family == Family::simt) {
    if (results.dkv) add_simt_launch(d, main);
    if (results.dq) add_simt_launch(d, simt_config(d.p, Kernel::query_gradient));
    return;
  }
  if (results.any() || main.dbias.how != BiasGradient::none) {
    split_rows(d);
    main.rows_outer = main.family == Family::wgmma && !main.split_q && !main.tile_map &&
                      main.dbias.how == BiasGradient::none && is_for_rows_outer(d.p);
    main.flags_nonfinite = results.flags && results.dkv && !main.split_q;
    // Blocks of an order, or of a cluster, wait for blocks that a smaller grid might not run.
    main.persistent = d.choice.multiprocessors > 0 && main.family == Family::wgmma &&
                      !main.ordered_dq && cluster_size(main) == 1;
    const int64 heads = d.p.sizes.batch * d.p.sizes.heads_kv * d.plan.splits;
    add_map_launch(d);
    add_launch(d, main, heads, key_tiles(main, d.p.sizes.len_k), 1, heads_per_group(d.facts, main));
    if (main.split_q && results.dkv) add_combine_dkv(d, results.flags);
  }
  add_finish_launch(d, results);
}

// Whether a block of mma sees all keys of a sequence, and nothing needs what other kernels make of
// rows: it makes delta and dq itself, in one launch, and dq takes no sums in memory. Results that
// are not finite where pairs are hidden it computes again.
void choose_whole_keys(const Draft& d, KernelConfig& main) {
  if (main.family != Family::mma || !may_have_whole_keys(d.p)) return;
  KernelConfig c = main;
  c.whole_keys = true;
  c.repeats_rows = needs_fixup(d.p, main);
  c.given_delta = d.p.delta.given();
  c.ordered_dq = false;   // one block adds to each row
  KernelConfig room = c;  // for a bias, whether it can be staged or not
  room.bias.aligned = c.features.bias && c.bias.type != Type::f64;
  const int64 bytes = shared_bytes_of(room);
  const bool fits = bytes <= d.limits.block;
  const int64 resident = d.limits.multiprocessor / (bytes + kReservedShared);
  c.tiling.min_blocks = int(clamp_to<int64>(resident, 1, c.tiling.min_blocks));
  const bool can_flag = !c.repeats_rows || !c.tile_map;
  if (d.p.sizes.len_k <= c.tiling.keys && makes_dq_at_once(c) && can_flag && fits) main = c;
}

// The bytes of the sums of dbias, whose strides it sets.
Count lay_out_dbias_sums(Draft& d) {
  if (!adds_dbias(d.main)) return 0;
  if (adds_to_dbias_itself(d.p, d.main)) {
    d.plan.dbias_strides = d.p.dbias.strides;
    return 0;
  }
  const int64* sizes = d.p.bias_sizes;
  const int64 row = dbias_sums_row(d.p);
  const Count head = Count(sizes[2]) * row, batch = head * sizes[1];
  d.plan.dbias_strides = {.batch = sizes[0] == 1 ? 0 : batch.value(),
                          .head = sizes[1] == 1 ? 0 : head.value(),
                          .row = sizes[2] == 1 ? 0 : row,
                          .column = sizes[3] == 1 ? 0 : 1};
  return batch * sizes[0] * 4;
}

void lay_out_workspace(Draft& d, const Results& results) {
  constexpr int64 kKeyFlagBytes = 2;  // of a key: one for dk and one for dv
  const Problem& p = d.p;
  const Sizes& s = p.sizes;
  const KernelConfig& main = d.main;
  const Count rows = Count(s.heads_q) * s.rows_q, keys = Count(s.heads_kv) * s.rows_k;
  const bool sums_dq = main.family != Family::simt && results.dq && !main.whole_keys;
  const bool splits_f32 = main.products == Products::f16x3;
  const Count part = main.split_q && results.dkv ? keys * partial_dkv_columns(s) * 4 : 0;
  const bool has_inputs = results.any() || !splits_f32;
  const Count semaphores =
      main.ordered_dq ? Count(s.batch * s.heads_q) * dq_semaphores_of_head(p) : 0;
  using enum WorkspacePart;
  CudaWorkspace& w = d.plan.workspace;
  w = lay_out({{dq_semaphores, semaphores * 4},
               {any_flag, results.flags ? kAnyFlagBytes : 0},
               {flags_k, results.flags && results.dkv ? keys * kKeyFlagBytes : 0},
               {dbias_sums, lay_out_dbias_sums(d)},
               {row_states, main.whole_keys ? 0 : rows * 2 * (computes_in_f64(p) ? 8 : 4)},
               {row_terms, has_inputs ? row_terms_bytes(p, main) : 0},
               {dq_sums, sums_dq ? Count(s.heads_q) * dq_rows(p) * main.dim * 4 : 0},
               {partial_out, part * d.plan.splits},
               {tile_map, tile_map_bytes(d)},
               {hi_lo, has_inputs ? hi_lo_bytes(p, main) : 0},
               {copies, copies_bytes(p, copies_at_most(d.plan, p))}});
  // The delta kernel clears, where there are rows.
  if (s.batch * s.heads_q * s.len_q == 0) w.clear = w.begin(row_states);
}

}  // namespace

void add_backward_launches(Draft& d) {
  const Problem& p = d.p;
  Results results{p.wants(p.dq), p.wants(p.dk) || p.wants(p.dv), false};
  choose_whole_keys(d, d.main);
  results.flags = needs_fixup(p, d.main) && !d.main.whole_keys && results.any();
  if (d.main.repeats_rows && results.any()) explain_fixup(d.because);
  add_copies_launch(d);
  if (!d.main.whole_keys) add_delta_launch(d, results);
  if (results.any()) add_split_launch(d);
  add_main_launches(d, results);
  // Additions in any order are exact only where each element is added once.
  if (wants_dbias(p) && d.main.dbias.how == BiasGradient::none) {
    add_simt_launch(d, simt_config(p, Kernel::bias_gradient));
  }
  if (p.features.sink && p.wants(p.dsink)) {
    add_simt_launch(d, plain_config(p, Kernel::sink_gradient));
  }
  explain_gradients(d.because, p, d.main, adds_to_dbias_itself(p, d.main));
  lay_out_workspace(d, results);
}

}  // namespace regard
