// Visits every pair once to learn which rows and bias elements are read.
//
// Rows are identified by their offset in memory, so that a row that several heads share by a stride
// of 0 counts as read if one of them reads it.
#include "verify/hidden.hpp"

#include <limits>

namespace regard::cli {

namespace {

using Offsets = std::unordered_set<Index>;

struct Seen {
  Offsets q, k, v, dout, dlse, bias;
};

bool mask_hides(const Attention& a, const PairStrides& at, Index b, Index h, Index i, Index j) {
  return a.mask.given() && load(a.mask.data, boolean, at.offset(b, h, i, j)) == 0;
}

Seen find_seen(const RandomProblem& p) {
  const Attention& a = p.attention;
  const Shape shape = p.shape();
  const PairStrides mask_at(a.mask), bias_at(a.bias);
  Seen seen;
  for (Index b = 0; b < shape.batch; ++b) {
    const Sequence s = sequence_of(a, shape, b);
    for (Index h = 0; h < shape.heads_q; ++h) {
      std::vector<char> column_seen(static_cast<std::size_t>(s.len_k));
      for (Index i = 0; i < s.len_q; ++i) {
        const Interval keys = visible_keys(a, s, i);
        bool row_seen = false;
        for (Index j = keys.begin; j < keys.end; ++j) {
          if (mask_hides(a, mask_at, b, h, i, j)) continue;
          if (!spans_show(a, shape, s, b, h, i, j)) continue;
          if (a.bias.given()) {
            const Index at = bias_at.offset(b, h, i, j);
            seen.bias.insert(at);
            if (load(a.bias.data, a.bias.type, at) == -std::numeric_limits<double>::infinity()) {
              continue;
            }
          }
          row_seen = true;
          column_seen[static_cast<std::size_t>(j)] = 1;
        }
        if (!row_seen) continue;
        seen.q.insert(row_offset(a.q, shape.packed, b, h, s.first_q, i));
        if (p.dout) {
          seen.dout.insert(row_offset(p.dout->tensor, shape.packed, b, h, s.first_q, i));
        }
        if (p.dlse) {
          seen.dlse.insert(lse_offset(p.dlse->tensor, shape.packed, b, h, s.first_q, i));
        }
      }
      const Index kv = h / shape.group();
      for (Index j = 0; j < s.len_k; ++j) {
        if (!column_seen[static_cast<std::size_t>(j)]) continue;
        seen.k.insert(row_offset(a.k, shape.packed, b, kv, s.first_k, j));
        seen.v.insert(row_offset(a.v, shape.packed, b, kv, s.first_k, j));
      }
    }
  }
  return seen;
}

void poison_elements(Slab& slab, const Offsets& seen) {
  for_each_offset(slab.tensor, [&](Index offset) {
    if (seen.contains(offset)) return;
    store(slab.tensor.data, slab.tensor.type, offset, std::numeric_limits<double>::quiet_NaN());
  });
}

}  // namespace

void poison_hidden(Random& random, RandomProblem& p, const PoisonTargets& targets) {
  const Seen seen = find_seen(p);
  targets.q->poison_rows(random, seen.q);
  targets.k->poison_rows(random, seen.k);
  targets.v->poison_rows(random, seen.v);
  if (p.dout) p.dout->poison_rows(random, seen.dout);
  // With a sink, a row that sees no key still has an lse, through which dlse reaches dsink.
  if (p.dlse && !p.attention.sink.given()) poison_elements(*p.dlse, seen.dlse);
  if (targets.bias) poison_elements(*targets.bias, seen.bias);
}

}  // namespace regard::cli
