// Every address that a problem holds, by name.
#pragma once

#include "problem/problem.h"

namespace regard {

// Calls work(name, pointer) for each, null ones too; the pointer is a reference, as const as the
// problem.
template <class AnyProblem, class Work>
void for_each_address(AnyProblem& p, Work work) {
  work("q", p.q.data);
  work("k", p.k.data);
  work("v", p.v.data);
  work("bias", p.bias.data);
  work("mask", p.mask.data);
  work("row_spans", p.row_spans.view.data);
  work("key_spans", p.key_spans.view.data);
  work("alibi_slopes", p.alibi_slopes.data);
  work("sink", p.sink.data);
  work("cu_seqlens_q", p.sequences.begins_q);
  work("cu_seqlens_k", p.sequences.begins_k);
  work("seqused_q", p.sequences.used_q);
  work("seqused_k", p.sequences.used_k);
  work("q_positions", p.sequences.positions.rows);
  work("out", p.out.data);
  work("lse", p.lse.data);
  work("dout", p.dout.data);
  work("dlse", p.dlse.data);
  work("delta", p.delta.data);
  work("dq", p.dq.data);
  work("dk", p.dk.data);
  work("dv", p.dv.data);
  work("dbias", p.dbias.data);
  work("dsink", p.dsink.data);
}

}  // namespace regard
