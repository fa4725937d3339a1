// Problems whose kernels stand for all.
#include "plan/cuda/representative.hpp"

#include <algorithm>

#include "plan/cuda/planner.hpp"
#include "plan/cuda/write_rows.hpp"
#include "problem/describe.hpp"

namespace regard {
namespace {

struct Shape {
  Type type = bf16;
  std::int64_t dim = 128;
  std::int64_t dim_v = 0;  // 0: dim
  std::int64_t heads_kv = 32;
  std::int64_t len_q = 4096;
  std::int64_t batch = 8;
};

constexpr std::int64_t kBatch = 8, kHeads = 32, kLength = 4096;

std::int64_t columns_out(const Shape& s) { return s.dim_v > 0 ? s.dim_v : s.dim; }

Attention attention(const Shape& s) {
  return {.q = Tensor(nullptr, s.type, {s.batch, kHeads, s.len_q, s.dim}),
          .k = Tensor(nullptr, s.type, {s.batch, s.heads_kv, kLength, s.dim}),
          .v = Tensor(nullptr, s.type, {s.batch, s.heads_kv, kLength, columns_out(s)})};
}

Attention causal(const Shape& shape) {
  Attention a = attention(shape);
  a.causal = Causal::bottom_right;
  return a;
}

Attention few_keys() {
  const Tensor keys(nullptr, bf16, {1, 1, 256, 128});
  return {.q = Tensor(nullptr, bf16, {1, kHeads, kLength, 128}), .k = keys, .v = keys};
}

Attention short_rows(Causal causal) {
  const Tensor all(nullptr, bf16, {2 * kBatch, kHeads, 512, 64});
  Attention a{.q = all, .k = all, .v = all};
  a.causal = causal;
  return a;
}

Attention packed(const Shape& s) {
  const Tensor begins(nullptr, i32, {kBatch + 1});
  return {.q = Tensor(nullptr, s.type, {kBatch * kLength, kHeads, s.dim}),
          .k = Tensor(nullptr, s.type, {kBatch * kLength, s.heads_kv, s.dim}),
          .v = Tensor(nullptr, s.type, {kBatch * kLength, s.heads_kv, columns_out(s)}),
          .cu_seqlens_q = begins,
          .cu_seqlens_k = begins,
          .max_seqlen_q = kLength,
          .max_seqlen_k = kLength,
          .causal = Causal::bottom_right};
}

class Problems {
 public:
  std::vector<Problem> list;

  void forward(const Attention& a) { add(a, Pass::forward); }
  void backward(const Attention& a) { add(a, Pass::backward); }
  void both(const Attention& a) {
    forward(a);
    backward(a);
  }

 private:
  void add(const Attention& a, Pass pass) { list.push_back(describe(a, pass, NullData::allowed)); }
};

void add_types_and_head_sizes(Problems& problems) {
  for (const std::int64_t dim : {64, 128, 512}) problems.both(attention({.dim = dim}));
  problems.both(attention({.type = f16, .dim = 128}));
  problems.both(attention({.type = f16, .dim = 256}));
  problems.backward(causal({.dim = 192, .dim_v = 128}));
  problems.backward(attention({.dim = 192, .dim_v = 256}));
  problems.backward(attention({.dim = 256, .dim_v = 192}));
  problems.forward(attention({.dim = 320}));
  problems.forward(causal({.dim = 384}));
  problems.backward(causal({.dim = 64}));
  problems.backward(attention({.dim = 64, .len_q = 256}));
  problems.forward(attention({.type = f16, .dim = 32}));
  problems.forward(attention({.type = f16, .dim = 96}));
  problems.forward(short_rows(Causal::none));
  problems.forward(short_rows(Causal::bottom_right));
  problems.both(attention({.type = f32, .dim = 64}));
  problems.forward(attention({.type = f32, .dim = 128}));
  problems.both(causal({.type = f32}));
  problems.forward(causal({.type = f32, .dim = 256}));
  problems.both(attention({.type = f64, .dim = 64}));
}

void add_features(Problems& problems) {
  problems.both(causal({}));
  problems.both(packed({}));
  problems.backward(packed({.dim = 192, .dim_v = 128}));
  Attention a = causal({});
  a.softcap = 50;
  a.sink = Tensor(nullptr, f32, {kHeads});
  a.dropout.p = 0.1;
  problems.both(a);
  a = causal({.dim = 192, .dim_v = 128});
  a.deterministic = true;
  problems.backward(a);
  a = packed({.dim = 512});
  a.softcap = 50;
  a.dropout.p = 0.1;
  problems.forward(a);
  a = packed({.dim = 256});
  a.dropout.p = 0.1;
  a.alibi_slopes = Tensor(nullptr, f32, {kHeads});
  problems.backward(a);
  a = attention({.dim = 64});
  a.bias = Tensor(nullptr, bf16, {1, kHeads, kLength, kLength});
  a.mask = Tensor(nullptr, boolean, {kBatch, 1, 1, kLength});
  a.alibi_slopes = Tensor(nullptr, f32, {kHeads});
  problems.both(a);
  a = attention({});  // TMA cannot load its k
  a.k = Tensor(nullptr, bf16, {kBatch, kHeads, kLength, 128}, {0, 0, 129, 1});
  problems.forward(a);
}

// Masks with a tile map: documents, so long that tiles have an order, any spans, and a dense mask.
void add_masks(Problems& problems) {
  const Tensor all(nullptr, bf16, {1, kHeads, 4 * kLength, 128});
  Attention a{.q = all, .k = all, .v = all};
  a.causal = Causal::top_left;
  a.row_spans = Tensor(nullptr, i32, {4 * kLength, 2});
  problems.both(a);
  a.deterministic = true;
  problems.backward(a);
  a = attention({});
  a.row_spans = Tensor(nullptr, i32, {kLength, 4});
  a.key_spans = Tensor(nullptr, i32, {kLength, 2});
  problems.both(a);
  a = attention({});
  a.mask = Tensor(nullptr, boolean, {kBatch, 1, kLength, kLength});
  problems.both(a);
}

// Part of a longer sequence, with everything that goes by positions; continues another part.
void add_positions(Problems& problems) {
  Attention a = attention({.heads_kv = 8});
  a.q_positions = Tensor(nullptr, i32, {kLength / 128});
  a.causal = Causal::top_left;
  a.alibi_slopes = Tensor(nullptr, f32, {kHeads});
  a.dropout.p = 0.1;
  a.continue_from = true;
  problems.both(a);
}

// Gradients of biases: summed by the blocks of a cluster, and added to f32 sums in memory.
void add_biases(Problems& problems) {
  Attention a = attention({});
  a.bias = Tensor(nullptr, bf16, {1, kHeads, kLength, kLength});
  problems.both(a);
  a.bias = Tensor(nullptr, bf16, {kBatch, 1, kLength, kLength});
  problems.backward(a);
  a.bias = Tensor(nullptr, bf16, {kBatch, 1, 1, kLength});
  problems.backward(a);
  a = attention({.dim = 64});
  a.bias = Tensor(nullptr, bf16, {1, kHeads, kLength, kLength});
  problems.forward(a);
}

// One query after many keys, and a few, with and without warps that split the keys; and few keys
// after many queries.
void add_few_queries_or_keys(Problems& problems) {
  problems.forward(attention({.heads_kv = 4, .len_q = 1, .batch = 1}));
  problems.forward(attention({.heads_kv = 8, .len_q = 1}));
  Attention ragged = attention({.heads_kv = 8, .len_q = 1, .batch = 4 * kBatch});
  ragged.seqused_k = Tensor(nullptr, i32, {4 * kBatch});
  problems.forward(ragged);
  problems.forward(attention({.dim = 64, .len_q = 1}));
  problems.forward(attention({.type = f16, .dim = 256, .heads_kv = 4, .len_q = 1}));
  Attention a = causal({.heads_kv = 8, .len_q = 8, .batch = 1});
  a.softcap = 50;
  a.sink = Tensor(nullptr, f32, {kHeads});
  problems.forward(a);
  problems.forward(attention({.heads_kv = 4, .len_q = 8, .batch = 1}));
  problems.backward(few_keys());
}

// Grouped heads: rows before heads; and few tiles of rows, which share out their keys.
void add_few_tiles(Problems& problems) {
  problems.backward(causal({.heads_kv = 4}));
  problems.forward(causal({.heads_kv = 8, .len_q = 256, .batch = 1}));
  problems.forward(causal({.type = f32, .dim = 64, .len_q = 256, .batch = 1}));
  Attention a = attention({.len_q = 256, .batch = 1});
  a.mask = Tensor(nullptr, boolean, {1, 1, 256, kLength});
  a.sink = Tensor(nullptr, f32, {kHeads});
  a.dropout.p = 0.1;
  problems.forward(a);
}

// Calls of so few tiles that forward kernels compute rows again by themselves, or warps share out
// the keys, and of so short sequences that one backward kernel has all of them.
void add_small(Problems& problems) {
  for (const std::int64_t dim : {64, 128}) {
    const Tensor all(nullptr, bf16, {kBatch, kHeads, 64, dim});
    problems.backward({.q = all, .k = all, .v = all});
  }
  const auto small = [](Type type, std::int64_t length, std::int64_t dim) {
    const Tensor all(nullptr, type, {1, kHeads, length, dim});
    Attention a{.q = all, .k = all, .v = all};
    a.causal = Causal::bottom_right;
    return a;
  };
  problems.forward(small(f32, 160, 128));
  for (const std::int64_t dim : {64, 128}) {
    const Tensor all(nullptr, bf16, {1, 4, 384, dim});
    Attention a{.q = all, .k = all, .v = all};
    problems.forward(a);
    a.causal = Causal::bottom_right;
    problems.forward(a);
  }
  for (const std::int64_t length : {128, 512}) {
    for (const std::int64_t dim : {64, 128, 256}) problems.forward(small(bf16, length, dim));
    problems.forward(small(f32, length, 64));
    Attention a = small(bf16, length, 128);
    a.softcap = 50;
    a.sink = Tensor(nullptr, f32, {kHeads});
    a.alibi_slopes = Tensor(nullptr, f32, {kHeads});
    a.mask = Tensor(nullptr, boolean, {1, 1, length, length});
    a.dropout.p = 0.1;
    problems.forward(a);
  }
}

}  // namespace

std::vector<Problem> representative_problems() {
  Problems problems;
  add_types_and_head_sizes(problems);
  add_features(problems);
  add_masks(problems);
  add_positions(problems);
  add_biases(problems);
  add_few_queries_or_keys(problems);
  add_few_tiles(problems);
  add_small(problems);
  return problems.list;
}

std::vector<KernelConfig> representative_kernels(const Chip& chip) {
  std::vector<KernelConfig> kernels;
  for (const Problem& problem : representative_problems()) {
    for (const CudaLaunch& launch : plan_cuda(problem, chip, {}, Reasons::left_out).launches) {
      kernels.push_back(launch.config);
    }
  }
  kernels.push_back(write_rows_config(Type::f32, Type::f32));
  remove_repetitions(kernels);
  return kernels;
}

}  // namespace regard
