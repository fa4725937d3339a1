// Plan: how a Problem will be computed - the one answer to "supported?", "which kernel?" and "how
// much workspace?".
#pragma once

#include <string>
#include <vector>

#include "plan/cpu/kernel/isa.h"
#include "problem/problem.h"

namespace regard {

// What a CPU allows, as a value: plans for any processor can be made on any other.
struct Processor {
  std::vector<Isa> usable;     // widest first; scalar is always among them
  bool bf16_dot_pays = false;  // measured: bf16 dot products beat f32 FMA
  bool amx_pays = false;       // measured: tile products do
};

enum class BackendKind : uint8 { reference, cpu, none };

// What the caller forces, from Run::backend or REGARD_BACKEND: "", "reference", "cpu", "cpu:avx2".
struct Choice {
  std::string name;
};

// Where each part of the CPU workspace begins, in bytes.
struct CpuWorkspace {
  int64 dq = 0;             // f32 or f64 sums of dq, by row block
  int64 dq_semaphores = 0;  // which task adds to them next
  int64 deltas = 0;         // dout . out - dlse of each row, by row block
  int64 delta_states = 0;   // whether they are there
  int64 dbias = 0;     // sums of dbias where its type or strides do not let the result hold them
  int64 partials = 0;  // chunks of a forward split
  int64 nonfinite_q = 0;
  int64 nonfinite_k = 0;
  int64 scratch = 0;  // of the first worker
  int64 scratch_size = 0;
  int64 size = 0;
};

struct Plan {
  BackendKind backend = BackendKind::none;
  std::string name;        // "cpu:avx512"
  std::string refusal;     // why there is no backend
  bool too_large = false;  // no backend could do it: stride 0 makes such problems
  Isa isa = Isa::scalar;   // whose kernels run
  CpuTiling tiling;
  CpuWorkspace workspace;
  int workers = 1;
  const char* reasons[2] = {};  // for a person; null = none

  bool supported() const { return backend != BackendKind::none; }
};

Plan plan(const Problem&, const Processor&, const Choice&, int workers);

// The chunks of keys of one sequence. Where there is only one, dq needs no sum over chunks.
int64 chunks_of(const CpuTiling&, int64 len_k);

// The row blocks of all heads with a sum of dq, at most: what the tables of sequences say is not
// known where only a workspace is asked for.
Count dq_blocks_bound(const Problem&, const CpuTiling&);

// Forward: a sequence of few rows and many keys is split into chunks of keys. These are the chunks
// that some row sees; none where the sequence is not split.
Interval split_chunks(const Problem&, const CpuTiling&, const Sequence&);
// The most chunks of one sequence, and of all sequences together for each kv head.
int64 longest_split_bound(const Problem&, const CpuTiling&);
int64 split_chunks_bound(const Problem&, const CpuTiling&);

// Bias gradients are summed in place where dbias has the type of the sums, or where each element
// has one term, unless `accumulate` would round each term of an element apart.
bool sums_dbias_in_place(const Problem&);

// (query, key) pairs that the intervals leave visible, over batch and heads. Packed sequences count
// as the longest, because the lengths of a GPU's cannot be read.
double interval_pairs(const Problem&);  // all, where positions cannot be read

std::string kernel_line(const Problem&, const Plan&);
std::string explanation(const Problem&, const Plan&);

}  // namespace regard
