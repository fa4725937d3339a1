// Every decision of the CPU: instruction set, tiles, workspace.
#include "plan/cpu/plan.hpp"

#include <algorithm>

#include "plan/cpu/kernel/visits.h"

namespace regard {
namespace {

// Whether all sequences have the problem's lengths. Results of one must not depend on others, so
// that the longest of a batch chooses nothing.
bool has_one_length(const Problem& p) { return !p.varlen && !p.packed; }

// Backward: keys, values and their gradients of a chunk stay in a core's own cache. Every chunk
// loads the rows and adds to their dq, but a long sequence has five or more, for threads to share.
int64 keys_of_chunk(const Problem& p, int64 size) {
  constexpr int64 kStep = 128, kChunks = 6;  // whole blocks of keys
  const int64 least = size <= 256 ? 256 : size <= 512 ? 128 : 64;
  const int64 most = !has_one_length(p) ? least : size <= 128 ? 512 : size <= 256 ? 384 : least;
  return larger(least, smaller(most, round_up(divide_up(p.sizes.len_k, kChunks), kStep)));
}

// Whether many rows see most keys. Then blocks of 128 rows have few hidden pairs and empty rows.
bool has_long_columns(const Problem& p) {
  constexpr int64 kRows = 2048;
  const MaskParams& mask = p.mask_params;
  const auto is_short = [](int64 side) { return side >= 0 && side < kRows; };
  const bool is_window = p.features.interval && is_short(mask.left) && is_short(mask.right);
  return has_one_length(p) && p.sizes.len_q >= kRows && !is_window;
}

// Forward: query rows of a task, which share packed keys and values. Tile products are quick, and
// packing is not: there, a task has as many rows as half of a core's second cache holds, and as
// leave eight tasks for each worker. Causal rows see few or many keys: their tasks have 128 rows
// where there are less than four of 256 for each worker. No bit of a result depends on it: f16 by
// terms computes 256 rows again where some are not finite, whatever the task has.
int64 rows_of_task(const Problem& p, const CpuShape& shape, int workers) {
  if (!shape.tiles) return 128;
  constexpr int64 kMost = 1024, kCache = 1 << 20;
  const bool is_causal = p.features.interval && p.mask_params.right >= 0 && p.mask_params.left < 0;
  const Sizes& s = p.sizes;
  const int64 row = padded(shape, s.dim_v) * shape.real_size +
                    padded_units(shape, s.dim) * shape.unit_size * shape.terms;
  const Count all = Count(s.rows_q) * s.heads_q;
  int64 rows = is_causal && shape.terms == 1 ? 128 : 256;
  while (rows < smaller(kMost, s.len_q) && 2 * rows * row <= kCache &&
         all.value() / (2 * rows) >= (rows < 256 ? 4 : 8) * int64(workers)) {
    rows *= 2;
  }
  return rows;
}

// Tile sizes are chosen from head sizes, and backward from lengths and windows that all sequences
// share: results must not depend on threads or on the rest of the batch.
CpuTiling tiling_for(const Problem& p, CpuShape shape, int workers) {
  const int64 size = p.sizes.dim + p.sizes.dim_v;
  const int64 panel = shape.panel();
  CpuTiling t{.shape = shape};
  if (p.backward) {
    t.chunk_k = keys_of_chunk(p, size);
    // Longer products read and write their sums in memory less often, most of all those of tile
    // registers: 256 rows of one term where they fit into a core's second cache.
    const int64 side = smaller<int64>(128, t.chunk_k);
    const int64 rows = shape.terms == 1 && size <= 256 ? 2 * side : side;
    t.block_q = round_up(shape.tiles ? rows : has_long_columns(p) ? 128 : kBackwardBlock, panel);
    t.block_k = shape.tiles ? side : kBackwardBlock;
  } else {
    t.block_q = round_up(rows_of_task(p, shape, workers), panel);
    // Sums in tile registers are loaded and stored once a block. With small heads that costs less
    // than scores that leave the first cache.
    t.block_k = size > 512 ? 64 : shape.tiles && size > 128 ? 256 : 128;
    // Packed values of 64 blocks at most stay in a core's second cache.
    const int64 most =
        smaller<int64>(64, (1 << 18) / (t.block_k * shape.terms * larger<int64>(1, size)));
    t.pack_k = t.block_k * (shape.tiles ? larger<int64>(1, most) : 1);
    t.pack_k = smaller(t.pack_k, round_up(larger<int64>(1, p.sizes.len_k), t.block_k));
    t.chunk_k = 4096;
  }
  return t;
}

// Sizes that no memory could hold become Count::kMost.
CpuWorkspace workspace_for(const Problem& p, const CpuTiling& t, int workers) {
  const Sizes& s = p.sizes;
  const HeadSizes dims{s.dim, s.dim_v};
  ScratchLayout l;
  CpuWorkspace w;
  const Count rows_q = Count(s.rows_q) * s.heads_q, rows_k = Count(s.rows_k) * s.heads_kv;
  if (p.backward) {
    const Count blocks = p.wants(p.dq) ? dq_blocks_bound(p, t) : 0;
    w.dq = l.take(blocks * t.block_q * padded(t.shape, s.dim) * t.shape.real_size);
    w.dq_semaphores = l.take(blocks * 4);
    w.deltas = l.take(blocks * t.block_q * t.shape.real_size);
    w.delta_states = l.take(blocks * 4);
    const int64* b = p.bias_sizes;
    w.dbias = l.take(p.features.bias && p.wants(p.dbias) && !sums_dbias_in_place(p)
                         ? Count(b[0]) * b[1] * b[2] * b[3] * t.shape.real_size
                         : 0);
    w.scratch_size =
        larger(backward_scratch(t, dims).size, backward_scratch(without_terms(t), dims).size);
  } else {
    w.partials =
        l.take(Count(split_chunks_bound(p, t)) * s.heads_kv * partial_layout(t, dims).size);
    w.scratch_size = forward_scratch(t, dims).size;
  }
  w.nonfinite_q = l.take(hides_pairs(p) ? rows_q : 0);
  w.nonfinite_k = l.take(hides_pairs(p) && p.backward ? rows_k : 0);
  w.scratch = l.take(Count(w.scratch_size) * workers);
  l.take(64);  // the caller's memory may begin anywhere
  w.size = l.size();
  return w;
}

bool parse_isa(const std::string& name, Isa& isa) {
  for (int i = 0; i < kIsaCount; ++i) {
    if (name == name_of(Isa(i))) {
      isa = Isa(i);
      return true;
    }
  }
  return false;
}

bool contains(const std::vector<Isa>& list, Isa isa) {
  return std::find(list.begin(), list.end(), isa) != list.end();
}

// Why terms do not serve the pass; null: they do, of some sequence at least.
const char* why_not_terms(const Problem& p) {
  if (!p.backward || p.type != Type::f16) return nullptr;
  if (p.dout.given() && p.dout.type != Type::f16) {
    return "two terms would round a dout of f32; avx512 serves it";
  }
  if (!p.varlen && !repays_terms(p.sizes.len_q, p.sizes.len_k)) {
    return "so few rows or keys do not repay two terms backward; avx512 serves them";
  }
  return nullptr;
}

// The widest instruction set; of those that multiply bf16, one that pays.
Isa default_isa(const Problem& p, const Processor& processor, const char* (&reasons)[2]) {
  const char*& why = reasons[0];
  const auto& usable = processor.usable;
  const bool has_dots = contains(usable, Isa::avx512bf16), is_bf16 = p.type == Type::bf16;
  why = "the widest instruction set that this processor has";
  const bool has_tiles = contains(usable, Isa::amx) && processor.amx_pays;
  if (has_tiles) reasons[1] = why_not_terms(p);
  if (has_tiles && kernels_for(Isa::amx, p.type) == Isa::amx && !reasons[1]) {
    why =
        "the widest instruction set that this processor has; its tile products of bf16 are faster "
        "than f32 FMA (measured)";
    return Isa::amx;
  }
  if (is_bf16 && has_dots && processor.bf16_dot_pays) {
    why =
        "the widest instruction set that this processor has; its bf16 dot products are faster "
        "than f32 FMA (measured)";
    return Isa::avx512bf16;
  }
  if (is_bf16 && has_dots) {
    why =
        "the widest instruction set that this processor has; its bf16 dot products are slower "
        "than f32 FMA (measured), so bf16 is converted";
  }
  return *std::find_if_not(usable.begin(), usable.end(), multiplies_bf16);
}

Plan refused(std::string why, bool too_large = false) {
  Plan plan;
  plan.refusal = std::move(why);
  plan.too_large = too_large;
  return plan;
}

// Whether an element of dbias is the sum of several terms.
bool repeats_bias(const Problem& p) {
  const int64* b = p.bias_sizes;
  const Sizes& s = p.sizes;
  return b[0] < s.batch || b[1] < s.heads_q || b[2] < s.len_q || b[3] < s.len_k;
}

}  // namespace

int64 chunks_of(const CpuTiling& t, int64 len_k) { return KeyChunks(t, len_k).count; }

Count dq_blocks_bound(const Problem& p, const CpuTiling& t) {
  const Sizes& s = p.sizes;
  if (chunks_of(t, s.len_k) == 1) return 0;
  if (!p.packed) return Count(s.batch) * s.heads_kv * RowBlocks(t, s.len_q, s.group()).count();
  // At most so many sequences have rows and more than one chunk.
  const int64 sequences = smaller(smaller(s.batch, s.rows_q), s.rows_k / (t.chunk_k + 1));
  const int64 rows = smaller(s.rows_q, sequences * s.len_q);
  // Each head ends with a short block; and heads with fewer rows than a panel share their blocks,
  // which are whole ones where all heads have so few rows.
  const Count by_head = Count(s.heads_q) * (rows / t.block_q + sequences);
  const int64 least = s.len_q < t.shape.panel() ? t.block_q : t.shape.panel();
  const Count by_panel = Count(s.heads_kv) * (s.group() * rows / least + sequences);
  return smaller(by_head.value(), by_panel.value());
}

Interval split_chunks(const Problem& p, const CpuTiling& t, const Sequence& s) {
  if (p.sizes.group() * s.len_q > t.shape.panel() || s.len_k < 2 * t.chunk_k) return {};
  const Interval keys = seen_keys(p.mask_params, s);
  const Interval chunks{keys.begin / t.chunk_k, divide_up(keys.end, t.chunk_k)};
  return chunks.end - chunks.begin > 1 ? chunks : Interval{};
}

int64 longest_split_bound(const Problem& p, const CpuTiling& t) {
  const int64 len_k = p.sizes.len_k;
  if (!p.varlen && !p.features.positions) {
    const Interval chunks = split_chunks(p, t, {.len_q = p.sizes.len_q, .len_k = len_k});
    return chunks.end - chunks.begin;
  }
  if (len_k < 2 * t.chunk_k) return 0;
  const MaskParams& mask = p.mask_params;
  if (mask.left < 0 || mask.right < 0 || p.features.positions) return chunks_of(t, len_k);
  // The keys that a panel's rows see together may begin anywhere in a chunk.
  const int64 keys = smaller(mask.left, len_k) + smaller(mask.right, len_k) + t.shape.panel();
  return smaller(chunks_of(t, len_k), divide_up(keys - 1, t.chunk_k) + 1);
}

// A split sequence fills at least two chunks, so that a last one, which may be short, adds at most
// half as many.
int64 split_chunks_bound(const Problem& p, const CpuTiling& t) {
  const Sizes& s = p.sizes;
  return smaller(s.batch * longest_split_bound(p, t), s.rows_k * 3 / (2 * t.chunk_k));
}

bool sums_dbias_in_place(const Problem& p) {
  // Terms added to what an element holds would each be rounded there. What is not given yet may
  // have to be added.
  if (repeats_bias(p) && (p.accumulate || !p.dbias.given())) return false;
  if (computes_in_f64(p)) return p.dbias.given() && p.dbias.type == Type::f64;
  // A dbias that is not given yet is taken to have the bias's type; f32 would need less.
  const Type type = p.dbias.given() ? p.dbias.type : p.bias.type;
  return type == Type::f32 || (type != Type::f64 && !repeats_bias(p));
}

Plan plan(const Problem& p, const Processor& processor, const Choice& choice, int workers) {
  Plan plan;
  plan.workers = workers;
  if (choice.name == "reference") {
    plan.backend = BackendKind::reference;
    plan.name = "reference";
    plan.reasons[0] = "asked for by name: the textbook in float64, one row at a time";
    return plan;
  }
  Isa isa = default_isa(p, processor, plan.reasons);
  if (choice.name.starts_with("cpu:")) {
    if (!parse_isa(choice.name.substr(4), isa)) {
      return refused("no backend has this name; \"regard info\" lists them");
    }
    if (!contains(processor.usable, isa)) {
      return refused("this processor or its operating system does not offer the instruction set");
    }
    plan.reasons[0] = "asked for by name";
    plan.reasons[1] = nullptr;
  } else if (!choice.name.empty() && choice.name != "cpu") {
    return refused(choice.name.starts_with("cuda")
                       ? "is for GPUs, and the device is the CPU"
                       : "no backend has this name; \"regard info\" lists them");
  }
  plan.backend = BackendKind::cpu;
  plan.name = std::string("cpu:") + name_of(isa);
  plan.isa = kernels_for(isa, p.type);
  if (plan.isa != isa) {
    plan.reasons[1] = isa == Isa::amx
                          ? "amx has kernels for bf16 and f16; avx512 serves this type"
                          : "avx512bf16 has kernels for bf16 only; avx512 serves this type";
  }
  const bool by_terms = takes_terms(plan.isa, p.type);
  if (const char* const why = by_terms ? why_not_terms(p) : nullptr) {
    plan.isa = Isa::avx512;
    plan.reasons[1] = why;
  }
  plan.tiling = tiling_for(p, shape_of(plan.isa, p.type), workers);
  plan.workspace = workspace_for(p, plan.tiling, workers);
  if (by_terms && p.backward && !p.dout.given()) {  // it may be f32
    const CpuTiling tiling = tiling_for(p, shape_of(Isa::avx512, p.type), workers);
    plan.workspace.size = larger(plan.workspace.size, workspace_for(p, tiling, workers).size);
  }
  return Count(plan.workspace.size).fits() ? plan : refused(kTooLarge, true);
}

}  // namespace regard
