// Problems whose kernels stand for all.
#include "plan/cuda/representative.hpp"

#include <algorithm>

#include "plan/cuda/planner.hpp"
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

Attention attention(const Shape& s) {
  return {
      .q = Tensor(nullptr, s.type, {s.batch, kHeads, s.len_q, s.dim}),
      .k = Tensor(nullptr, s.type, {s.batch, s.heads_kv, kLength, s.dim}),
      .v = Tensor(nullptr, s.type, {s.batch, s.heads_kv, kLength, s.dim_v > 0 ? s.dim_v : s.dim})};
}

Attention causal(const Shape& shape) {
  Attention a = attention(shape);
  a.causal = Causal::bottom_right;
  return a;
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
          .v = Tensor(nullptr, s.type, {kBatch * kLength, s.heads_kv, s.dim}),
          .cu_seqlens_q = begins,
          .cu_seqlens_k = begins,
          .max_seqlen_q = kLength,
          .max_seqlen_k = kLength,
          .causal = Causal::bottom_right};
}

}  // namespace

std::vector<Problem> representative_problems() {
  std::vector<Problem> problems;
  const auto add = [&](const Attention& a, Pass pass) {
    problems.push_back(describe(a, pass, NullData::allowed));
  };
  const auto add_both = [&](const Attention& a) {
    add(a, Pass::forward);
    add(a, Pass::backward);
  };
  for (const std::int64_t dim : {64, 128, 512}) add_both(attention({.dim = dim}));
  add_both(attention({.type = f16, .dim = 128}));
  add_both(attention({.type = f16, .dim = 256}));
  add(causal({.dim = 192, .dim_v = 128}), Pass::backward);
  add(attention({.type = f16, .dim = 32}), Pass::forward);
  add(attention({.type = f16, .dim = 96}), Pass::forward);
  add(short_rows(Causal::none), Pass::forward);
  add(short_rows(Causal::bottom_right), Pass::forward);
  add_both(attention({.type = f32, .dim = 64}));
  add(attention({.type = f32, .dim = 128}), Pass::forward);
  add_both(causal({.type = f32}));
  add_both(attention({.type = f64, .dim = 64}));
  add_both(causal({}));
  add_both(packed({}));

  Attention features = causal({});
  features.softcap = 50;
  features.sink = Tensor(nullptr, f32, {kHeads});
  features.dropout.p = 0.1;
  add_both(features);
  features = packed({.dim = 256});
  features.dropout.p = 0.1;
  features.alibi_slopes = Tensor(nullptr, f32, {kHeads});
  add(features, Pass::backward);
  features = attention({.dim = 64});
  features.bias = Tensor(nullptr, bf16, {1, kHeads, kLength, kLength});
  features.mask = Tensor(nullptr, boolean, {kBatch, 1, 1, kLength});
  features.alibi_slopes = Tensor(nullptr, f32, {kHeads});
  add_both(features);

  // What TMA cannot load as it is.
  features = attention({});
  features.k = Tensor(nullptr, bf16, {kBatch, kHeads, kLength, 128}, {0, 0, 129, 1});
  add(features, Pass::forward);

  // Gradients of biases: summed by the blocks of a cluster, and added to f32 sums in memory.
  features = attention({});
  features.bias = Tensor(nullptr, bf16, {1, kHeads, kLength, kLength});
  add_both(features);
  features.bias = Tensor(nullptr, bf16, {kBatch, 1, kLength, kLength});
  add(features, Pass::backward);
  features.bias = Tensor(nullptr, bf16, {kBatch, 1, 1, kLength});
  add(features, Pass::backward);
  features = attention({.dim = 64});
  features.bias = Tensor(nullptr, bf16, {1, kHeads, kLength, kLength});
  add(features, Pass::forward);

  // One query after many keys.
  add(attention({.heads_kv = 4, .len_q = 1, .batch = 1}), Pass::forward);
  add(attention({.dim = 64, .len_q = 1}), Pass::forward);
  add(attention({.type = f16, .dim = 256, .heads_kv = 4, .len_q = 1}), Pass::forward);
  // A few: with and without warps that split the keys.
  features = causal({.heads_kv = 8, .len_q = 8, .batch = 1});
  features.softcap = 50;
  features.sink = Tensor(nullptr, f32, {kHeads});
  add(features, Pass::forward);
  add(attention({.heads_kv = 4, .len_q = 8, .batch = 1}), Pass::forward);
  return problems;
}

std::vector<KernelConfig> representative_kernels(const Chip& chip) {
  std::vector<KernelConfig> kernels;
  for (const Problem& problem : representative_problems()) {
    for (const CudaLaunch& launch : plan_cuda(problem, chip, {}, Reasons::left_out).launches) {
      kernels.push_back(launch.config);
    }
  }
  remove_repetitions(kernels);
  return kernels;
}

}  // namespace regard
