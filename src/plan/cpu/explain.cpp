// How a Plan explains itself to a person.
#include "plan/cpu/plan.hpp"
#include "plan/explain_rows.hpp"
#include "problem/describe.hpp"

namespace regard {
namespace {

double pairs_under(const MaskParams& mask, const Problem& p) {
  double pairs = 0;
  for (int64 b = 0; b < p.sizes.batch; ++b) {
    const Sequence seq = sequence(p.sequences, b);
    pairs += visible_pairs(mask, seq);
    if (b == 0 && !p.sequences.begins_q && !p.sequences.used_q && !p.sequences.used_k &&
        p.sequences.position_stride == 0) {
      pairs *= double(p.sizes.batch);  // every sequence is the same
      break;
    }
  }
  return pairs * double(p.sizes.heads_q);
}

const char* product_of(Isa isa, Type type) {
  if (isa == Isa::amx && type == Type::f16) {
    return "f16 as two terms of bf16, tile products summed in f32";
  }
  if (isa == Isa::amx) return "bf16 tile products summed in f32";
  if (isa == Isa::avx512bf16) return "bf16 dot products summed in f32";
  return type == Type::f64 ? "f64 arithmetic" : "f32 arithmetic";
}

std::string converts(Isa isa, Type type) {
  if (multiplies_bf16(isa) || type == Type::f32 || type == Type::f64) return "";
  return std::string(", ") + (type == Type::f16 ? "f16" : "bf16") + " converted as it is read";
}

// How short sequences are computed otherwise than the kernel's line says; empty: there are none.
std::string few_rows_line(const Problem& p, const Plan& plan) {
  const CpuShape shape = without_terms(plan.tiling).shape;
  const int64 most = p.backward ? most_rows_of_one_vector(shape) : most_few_rows(shape);
  const int64 few = most / p.sizes.group();
  if (few == 0 || (p.sizes.len_q > few && !p.varlen)) return "";
  std::string text =
      "sequences of at most " + std::to_string(few) + (few == 1 ? " query" : " queries");
  if (p.backward) {
    text += " have panels of " + std::to_string(shape.lanes);
  } else {
    text += " read keys and values row by row, without panels";
  }
  if (multiplies_bf16(plan.isa)) text += ", in f32 arithmetic";
  return row("few rows", text);
}

}  // namespace

double interval_pairs(const Problem& p) {
  const bool is_known = p.sequences.positions.rows || !p.sequences.has_row_positions;
  return pairs_under(is_known ? p.mask_params : MaskParams(), p);
}

std::string kernel_line(const Problem& p, const Plan& plan) {
  if (!plan.supported()) return "none";
  std::string text = p.backward ? "backward" : "forward";
  if (plan.backend == BackendKind::reference) return text + " rows in f64";
  const CpuTiling& t = plan.tiling;
  text += std::string(" ") + name_of(plan.isa) + ", " + product_of(plan.isa, p.type) +
          converts(plan.isa, p.type) + ", tile " + std::to_string(t.block_q) + " x " +
          std::to_string(t.block_k) + ", panel " + std::to_string(t.shape.panel());
  if (p.backward) text += ", chunks up to " + std::to_string(t.chunk_k);
  return text;
}

std::string explanation(const Problem& p, const Plan& plan) {
  std::string text = row("problem", to_string(p) + (p.backward ? ", backward" : ", forward"));
  if (!plan.supported()) return text + row("backend", "none: " + plan.refusal);
  text += row("backend", plan.name);
  for (const char* reason : plan.reasons) {
    if (reason) text += row("  because", reason);
  }
  text += row("kernel", kernel_line(p, plan));
  const double all = pairs_under({}, p);
  if (p.features.interval && all > 0) {
    text += row("mask", visible_share(p, interval_pairs(p) / all, ""));
  }
  if (plan.backend == BackendKind::reference) return text;
  text += few_rows_line(p, plan);
  if (!p.backward && longest_split_bound(p, plan.tiling) > 0) {
    text += row("split", std::string(p.varlen ? "where a sequence has " : "") +
                             "few queries, many keys: chunks of " +
                             std::to_string(plan.tiling.chunk_k) + " keys, merged in order");
  }
  if (p.features.bias || tests_pairs(p.features)) {
    text += row("note", "tiles that mask, spans or a bias of -inf hide as a whole are skipped");
  }
  if (plan.tiling.shape.terms > 1) {
    text +=
        row("note", p.backward ? "heads with an infinity or a NaN, and sequences of less than "
                                 "256 rows or keys, are computed in f32 arithmetic"
                               : "rows whose result is not finite are computed in f32 arithmetic");
  }
  if (hides_pairs(p)) {
    text +=
        row("note",
            "a row that a NaN in a hidden place reaches is computed again, from its visible pairs");
  }
  return text + row("workers", std::to_string(plan.workers)) +
         row("workspace", megabytes(plan.workspace.size) + ", of it " +
                              megabytes(plan.workspace.scratch_size) + " for each worker");
}

}  // namespace regard
