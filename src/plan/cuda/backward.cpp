// The launches and the workspace of a backward pass.
#include "plan/cuda/facts.hpp"
#include "plan/cuda/families.hpp"
#include "plan/cuda/input_copies.hpp"
#include "plan/cuda/launches.hpp"
#include "plan/cuda/splits.hpp"

namespace regard {
namespace {

// Tiles of a head's keys; even where blocks form pairs.
int64 key_tiles(const KernelConfig& c, int64 len_k) {
  const int64 tiles = divide_up(len_k, c.tiling.keys);
  return c.cta_pair ? round_up(tiles, 2) : tiles;
}

// What a head's blocks read and add to while they walk over its rows: q, dout, and sums of dq.
int64 bytes_of_rows(const Sizes& s, Type type) {
  return larger<int64>(1, s.len_q * (int64(size_of(type)) * (s.dim + s.dim_v) + 4 * s.dim));
}

// Whether some keys of the longest sequence are seen by many more rows than others.
bool is_uneven(const Problem& p) {
  if (p.features.positions) return false;  // nothing is known of them
  const Sizes& s = p.sizes;
  const auto seen = [&](int64 key) {
    const Interval rows = visible_queries(p.mask_params, key, s.len_q, s.len_k);
    return larger<int64>(0, rows.end - rows.begin);
  };
  return 2 * larger(seen(0), seen(s.len_k - 1)) > 3 * seen(s.len_k / 2);
}

// Many query heads that share keys: under a causal mask, blocks that took head after head would be
// at different rows all the time, and the cache would have to hold all of them (H100, D 128, 1366
// rows: 16/2 heads, batch 16: 1065 us -> 901; 55/5 heads, batch 5: 1289 -> 1028; four query heads a
// key head: 570 -> 597). Long sequences are slower that way (64/8 heads, 4096 rows: 6141 -> 6482).
bool takes_rows_outer(const Draft& d) {
  constexpr int64 kManyHeads = 6, kMostRows = 3072;
  const KernelConfig& c = d.main;
  const Sizes& s = d.p.sizes;
  return c.family == Family::wgmma && c.features.interval && s.group() >= kManyHeads &&
         s.len_q <= kMostRows && !c.ordered_dq && !c.tile_map && !c.split_q &&
         c.dbias.how == BiasGradient::none && is_uneven(d.p);
}
// The heads of such blocks that are interleaved: eight, or twice as many rather than few at last.
int64 heads_of_rows_outer(int64 heads, int64 tiles, int64 multiprocessors) {
  constexpr int64 kHeads = 8, kFew = 4;
  if (heads * tiles <= multiprocessors) return heads;
  const int64 last = heads % kHeads;
  return last > 0 && last < kFew ? 2 * kHeads : kHeads;
}

// How many heads are interleaved. With ordered additions to dq, a key tile waits for the one before
// it, and tiles of other heads run in between: about two blocks for each multiprocessor, because
// the cache can hold their sums.
//
// Under a causal mask, the most rows see the first keys. The first tiles of as many heads as fill
// the chip begin first, so that no long tile begins last. Heads of few tiles are not interleaved,
// because the cache would have to hold too many of them, except where several query heads share
// keys: each tile then takes long, and the heads are few. Half of the cache for their rows is a
// compromise (H100, D 128: 55/5 heads, batch 2, 1366 rows: 562 us -> 464; 32/8 heads, batch 8, 1024
// rows: 647 -> 568).
int64 heads_per_group(const Facts& f, const KernelConfig& c) {
  constexpr int64 kFewTiles = 16, kHeadsOfMma = 16;
  const int64 multiprocessors = f.chip.multiprocessors;
  const Sizes& s = f.problem.sizes;
  const int64 tiles = larger<int64>(key_tiles(c, s.len_k), 1);
  int64 heads = 1;
  if (c.ordered_dq) {
    heads = c.family == Family::mma ? kHeadsOfMma : 2 * multiprocessors / tiles;
  } else if (c.rows_outer) {
    heads = heads_of_rows_outer(s.batch * s.heads_kv, tiles, multiprocessors);
  } else if (c.features.interval || c.tile_order) {
    if (tiles >= kFewTiles) {
      heads = multiprocessors / tiles;
    } else if (c.family == Family::wgmma && s.group() > 1 && is_uneven(f.problem)) {
      heads = even_group(s.batch * s.heads_kv, f.chip.l2 / 2 / bytes_of_rows(s, c.type));
    }
  }
  return round_up(larger<int64>(heads, 1), batch_of_bias(f.problem));
}

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

// Few tiles of keys with many iterations leave multiprocessors idle.
void split_rows(Draft& d) {
  KernelConfig& main = d.main;
  if (main.repeats_rows) return;  // a block has flags of all rows of its keys
  // Where wgmma may compute it, data that does not begin at 16 bytes has as many splits on mma.
  const bool may_be_wgmma = d.choice.any_family || d.choice.family == Family::wgmma;
  const int64 resident = d.facts.level >= 90 && may_be_wgmma ? 1 : main.tiling.min_blocks;
  d.plan.splits = row_splits_for(d.p, d.facts.chip.multiprocessors * resident);
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
    main.rows_outer = takes_rows_outer(d);
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
  const bool fits = shared_bytes_of(room) <= d.limits.block;
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
