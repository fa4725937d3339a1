#include "distributed/call_of_heads.hpp"

namespace regard::distributed {
namespace {

void take(Tensor& x, const Heads& heads) {
  if (x.given()) x = heads_of(x, heads);
}

// Of what broadcasts to (B, Hq, rows, S).
void take_of_scores(Tensor& x, const Heads& heads) {
  if (has_heads(x)) x = slice(x, x.rank - 3, heads);
}

void take_of_all(Tensor& x, const Heads& heads) {
  if (x.given()) x = slice(x, x.rank - 1, heads);
}

}  // namespace

CallOfHeads CallOfHeads::of(const Heads& run, const Heads& queries, const Heads& keys) const {
  CallOfHeads one = *this;
  one.a.head_begin += run.begin;
  for (Tensor* x : {&one.a.q, &one.outputs.out, &one.outputs.lse, &one.inputs.out, &one.inputs.lse,
                    &one.inputs.dout, &one.inputs.dlse, &one.inputs.delta, &one.gradients.dq}) {
    take(*x, queries);
  }
  for (Tensor* x : {&one.a.k, &one.a.v, &one.gradients.dk, &one.gradients.dv}) take(*x, keys);
  for (Tensor* x : {&one.a.bias, &one.a.mask, &one.gradients.dbias}) take_of_scores(*x, queries);
  for (Tensor* x : {&one.a.alibi_slopes, &one.a.sink, &one.gradients.dsink}) take_of_all(*x, run);
  return one;
}

}  // namespace regard::distributed
