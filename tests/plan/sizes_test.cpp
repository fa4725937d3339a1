// Workspaces of extreme problems, which stride 0 makes possible: large enough, or refused.
#include <doctest/doctest.h>

#include <cmath>
#include <vector>

#include "cpu/batch.hpp"
#include "plan/cpu/plan.hpp"
#include "regard/regard.hpp"
#include "tests/cpu/case.hpp"
#include "tests/plan/cuda_case.hpp"

using namespace regard;
using regard::tests::uniform;

namespace {

using Real = long double;

const Processor kAny{.usable = {Isa::avx512bf16, Isa::avx512, Isa::avx2, Isa::scalar}};
constexpr int64 kSizes[] = {0,       1,       2,       3,          16,        64,
                            65,      511,     4096,    8193,       40000,     70000,
                            1 << 20, 1 << 22, 1 << 27, 0x7ffffffe, 0x7fffffff};

struct Draw {
  std::uint64_t seed;
  std::uint64_t n = 0;

  int64 below(int64 bound) { return int64(uniform(seed, 5, n++) * double(bound)); }
  int64 size() { return kSizes[below(std::size(kSizes))]; }
  int64 some(int64 most) { return most < 1 ? 0 : std::min(most, std::max<int64>(1, size())); }
  bool flip() { return below(2) == 1; }
};

// Strides of 0 in all axes except the last.
Tensor flat(Type type, std::vector<int64> sizes) {
  Tensor t;
  t.type = type;
  t.rank = int(sizes.size());
  for (std::size_t axis = 0; axis < sizes.size(); ++axis) t.sizes[axis] = sizes[axis];
  t.strides[sizes.size() - 1] = 1;
  return t;
}

Attention extreme(std::uint64_t seed) {
  Draw draw{seed};
  const Type types[] = {f64, f32, f16, bf16};
  const Type type = types[draw.below(4)];
  const int64 heads_kv = draw.some(1 << 27), heads = heads_kv * (1 + draw.below(3));
  const int64 dims[] = {1, 64, 256, 512, draw.some(0x7fffffff)};
  const int64 dim = dims[draw.below(5)], dim_v = dims[draw.below(5)];
  const int64 batch = draw.some(draw.flip() ? 5 : 0x7ffffff0), len_q = draw.size() / batch;
  const int64 len_k = draw.size() / batch;
  Attention a;
  if (draw.flip()) {
    const int64 rows_q = std::max(len_q, draw.size()), rows_k = std::max(len_k, draw.size());
    a.q = flat(type, {rows_q, heads, dim});
    a.k = flat(type, {rows_k, heads_kv, dim});
    a.v = flat(type, {rows_k, heads_kv, dim_v});
    a.cu_seqlens_q = a.cu_seqlens_k = flat(i32, {batch + 1});
    a.max_seqlen_q = len_q;
    a.max_seqlen_k = len_k;
  } else {
    a.q = flat(type, {batch, heads, len_q, dim});
    a.k = flat(type, {batch, heads_kv, len_k, dim});
    a.v = flat(type, {batch, heads_kv, len_k, dim_v});
    if (draw.flip()) a.seqused_k = flat(i32, {batch});
  }
  const auto one_or = [&](int64 size) { return draw.flip() ? size : 1; };
  if (draw.flip()) {
    const Type bias = types[1 + draw.below(3)];
    a.bias = flat(bias, {one_or(batch), one_or(heads), one_or(len_q), one_or(len_k)});
  }
  if (draw.flip()) a.causal = Causal::bottom_right;
  a.deterministic = draw.flip();
  return a;
}

// A Problem, or none where the sizes break a rule.
bool describes(const Attention& a, Pass pass, Problem& p) {
  try {
    p = describe(a, pass, NullData::allowed);
    return true;
  } catch (const Error& error) {
    CHECK(std::string(error.what()).find("2^31") != std::string::npos);
    return false;
  }
}

Real dbias_elements(const Problem& p) {
  const int64* n = p.bias_sizes;
  return Real(n[0]) * Real(n[1]) * Real(n[2]) * Real(n[3]);
}

// ------------------------------------------------------------------------------------------ CPU

// Chunks that the tables may demand for each kv head: as many sequences as can be split, each a key
// longer than 2 chunks; or the longest alone.
Real chunks_demanded(const Problem& p, const CpuTiling& t) {
  const Sizes& s = p.sizes;
  const int64 rows = p.varlen ? 1 : s.group() * s.len_q, least = 2 * t.chunk_k;
  if (s.batch == 0 || rows == 0 || s.len_k < least || rows > t.shape.panel()) return 0;
  if (!p.packed) return Real(s.batch) * Real((s.len_k + t.chunk_k - 1) / t.chunk_k);
  const Real longest = Real((s.len_k + t.chunk_k - 1) / t.chunk_k);
  if (s.len_k == least) return Real(2 * std::min(s.batch, s.rows_k / least));
  return std::max(longest, Real(3 * std::min(s.batch, s.rows_k / (least + 1))));
}

Real cpu_bytes(const Problem& p, const CpuTiling& t, int workers) {
  const Sizes& s = p.sizes;
  const Real real = t.shape.real_size, rows_q = Real(s.rows_q) * Real(s.heads_q);
  const Real rows_k = Real(s.rows_k) * Real(s.heads_kv);
  const Real scratch = Real(workers) * Real(t.block_k) * Real(s.dim + s.dim_v) * real;
  const Real nonfinite = hides_pairs(p) ? rows_q + (p.backward ? rows_k : 0) : 0;
  if (!p.backward) {
    const Real part = Real(t.shape.panel()) * Real(s.dim_v + 2) * real;
    return chunks_demanded(p, t) * Real(s.heads_kv) * part + nonfinite + scratch / 2;
  }
  const bool sums = p.features.bias && !sums_dbias_in_place(p);
  // The sums of dq, and delta, where the longest sequence has more than one chunk of keys.
  const Real rows_dq = s.len_k <= t.chunk_k ? 0
                       : p.packed           ? Real(s.heads_q) * Real(s.len_q)
                                            : rows_q;
  return rows_dq * Real(s.dim + 1) * real + (sums ? dbias_elements(p) * real : 0) + nonfinite +
         scratch / 2;
}

void check_cpu(const Problem& p, int workers) {
  for (const char* name : {"cpu:avx512", "cpu:avx2", "cpu:scalar"}) {
    const Plan made = plan(p, kAny, {name}, workers);
    CAPTURE(name);
    if (!made.supported()) {
      CHECK(made.too_large);
      continue;
    }
    const CpuWorkspace& w = made.workspace;
    CHECK(Real(w.size) >= cpu_bytes(p, made.tiling, workers));
    const int64 parts[] = {0,       w.dq,       w.dq_semaphores, w.deltas,      w.delta_states,
                           w.dbias, w.partials, w.nonfinite_q,   w.nonfinite_k, w.scratch,
                           w.size};
    for (const int64 part : parts) CHECK((part >= 0 && part <= w.size));
    CHECK(w.scratch >= std::max(w.nonfinite_k, w.partials));
    CHECK(w.size - w.scratch >= workers * w.scratch_size);
  }
}

// ------------------------------------------------------------------------------------------ GPU

Real copied_bytes(const Problem& p, InputSet inputs) {
  Real bytes = 0;
  for (int n = 0; n < kInputs; ++n) {
    const InputShape x = shape_of(p, Input(n));
    if (inputs.has(Input(n))) {
      bytes +=
          Real(x.batch) * Real(x.heads) * Real(x.rows) * Real(x.columns) * Real(size_of(p.type));
    }
  }
  return bytes;
}

Real cuda_bytes(const Problem& p, const CudaPlan& plan) {
  const Sizes& s = p.sizes;
  const Real rows_q = Real(s.rows_q) * Real(s.heads_q), rows_k = Real(s.rows_k) * Real(s.heads_kv);
  Real bytes = copied_bytes(p, plan.copies);
  for (const CudaLaunch& launch : plan.launches) {
    const KernelConfig& c = launch.config;
    if (c.kernel == Kernel::delta) bytes += rows_q * 2 * (p.type == f64 ? 8 : 4);
    if (c.sums_dim > 0) bytes += rows_q * Real(s.dim) * 4;
    if (cuda_case::converts_dbias(c)) bytes += dbias_elements(p) * 4;
    if (c.kernel == Kernel::combine) bytes += Real(plan.splits) * rows_q * Real(s.dim_v) * 4;
    if (c.kernel == Kernel::combine_dkv) {
      bytes += Real(plan.splits) * rows_k * Real(s.dim + s.dim_v) * 4;
    }
    if (c.kernel == Kernel::split_f32) {
      bytes += 4 * (rows_q * Real(s.dim) + rows_k * Real(s.dim + s.dim_v));
    }
    if (c.flags_nonfinite && c.kernel == Kernel::forward) bytes += rows_q;
  }
  return bytes;
}

void check_cuda(const Problem& p, const char* chip, const char* name) {
  const CudaPlan made = cuda_case::planned(p, chip, name);
  CAPTURE(chip);
  CAPTURE(name);
  if (!made.supported()) {
    CHECK(made.workspace.size == 0);
    return;
  }
  const CudaWorkspace& w = made.workspace;
  CHECK(Real(w.size) >= cuda_bytes(p, made));
  int64 before = 0;
  for (int n = 0; n < kWorkspaceParts; ++n) {
    CHECK(w.begin(WorkspacePart(n)) >= before);
    before = w.end(WorkspacePart(n));
  }
  CHECK(w.size < int64(1) << 62);
}

}  // namespace

TEST_SUITE_BEGIN("plan");

TEST_CASE("no workspace of extreme sizes is smaller than what is addressed in it") {
  int described = 0;
  for (std::uint64_t seed = 0; seed < 4000; ++seed) {
    const Attention a = extreme(seed);
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      Problem p;
      if (!describes(a, pass, p)) continue;
      ++described;
      CAPTURE(seed);
      CAPTURE(to_string(p));
      check_cpu(p, seed % 2 ? 1 : 4096);
      for (const char* name : {"", "cuda:wgmma", "cuda:mma", "cuda:simt"})
        check_cuda(p, "sm_90", name);
      check_cuda(p, "sm_80", "");
    }
  }
  CHECK(described > 4000);
}

TEST_CASE("chunks of split keys are bounded wherever the rows stand") {
  int splits = 0;
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    Draw draw{seed};
    const int64 batch = 1 + draw.below(3), len_q = 1 + draw.below(8);
    const int64 len_k = 4096 + draw.below(30000);
    std::vector<std::int32_t> rows;
    for (int64 b = 0; b < batch; ++b) rows.push_back(std::int32_t(draw.below(40000)));
    Attention a;
    a.q = flat(f32, {batch, 2, len_q, 8});
    a.k = a.v = flat(f32, {batch, 2, len_k, 8});
    a.q_positions = Tensor(rows.data(), i32, {batch, 1});
    if (draw.flip()) a.causal = Causal::top_left;
    if (draw.flip()) a.window.left = draw.below(12000);
    TableCopies copies;
    const Problem p = describe(a, Pass::forward, NullData::allowed, &copies);
    const CpuTiling t = plan(p, kAny, {"cpu"}, 1).tiling;
    int64 chunks = 0;
    for (int64 b = 0; b < batch; ++b) {
      const Interval split = split_chunks(p, t, sequence(p.sequences, b));
      CHECK(split.end - split.begin <= longest_split_bound(p, t));
      chunks += split.end - split.begin;
      splits += !split.empty();
    }
    CAPTURE(seed);
    CHECK(chunks <= split_chunks_bound(p, t));
  }
  CHECK(splits > 100);
}

TEST_CASE("chunks of split keys and blocks of dq are bounded for any table of sequences") {
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    Draw draw{seed};
    const int64 batch = 1 + draw.below(40), heads_kv = 1 + draw.below(3);
    const int64 heads = heads_kv * (1 + draw.below(5));
    std::vector<std::int32_t> begins_q{0}, begins_k{0};
    int64 longest_q = 0, longest_k = 0;
    for (int64 b = 0; b < batch; ++b) {
      const int64 len_q = draw.below(3) ? 1 : draw.below(40);
      const int64 len_k = draw.below(3) ? draw.below(600) : 8192 + draw.below(20000);
      begins_q.push_back(begins_q.back() + std::int32_t(len_q));
      begins_k.push_back(begins_k.back() + std::int32_t(len_k));
      longest_q = std::max(longest_q, len_q);
      longest_k = std::max(longest_k, len_k);
    }
    Attention a;
    a.q = flat(f32, {begins_q.back(), heads, 8});
    a.k = a.v = flat(f32, {begins_k.back(), heads_kv, 8});
    a.cu_seqlens_q = Tensor(begins_q.data(), i32, {batch + 1});
    a.cu_seqlens_k = Tensor(begins_k.data(), i32, {batch + 1});
    a.max_seqlen_q = longest_q;
    a.max_seqlen_k = longest_k;
    if (draw.flip()) a.causal = Causal::bottom_right;
    if (draw.flip()) a.window.left = draw.below(12000);
    TableCopies copies;
    const Problem p = describe(a, Pass::forward, NullData::allowed, &copies);
    const CpuTiling t = plan(p, kAny, {"cpu"}, 1).tiling;
    int64 chunks = 0;
    for (int64 b = 0; b < batch; ++b) {
      const Interval split = split_chunks(p, t, sequence(p.sequences, b));
      CHECK(split.end - split.begin <= longest_split_bound(p, t));
      chunks += split.end - split.begin;
    }
    CAPTURE(seed);
    CHECK(chunks <= split_chunks_bound(p, t));
    const Problem back = describe(a, Pass::backward, NullData::allowed, &copies);
    for (const char* name : {"cpu:avx512", "cpu:scalar"}) {
      const CpuTiling tiling = plan(back, kAny, {name}, 1).tiling;
      const int64 blocks = cpu_backend::Batch(back, tiling).totals().dq_blocks * heads_kv;
      CHECK(blocks <= dq_blocks_bound(back, tiling).value());
    }
  }
}

TEST_CASE("packed decoding asks for what its rows need") {
  // 1000 sequences of 1 query: one of 131072 keys, the others of 500.
  const int64 rows_k = 131072 + 999 * 500;
  Attention a;
  a.q = flat(f32, {1000, 32, 128});
  a.k = a.v = flat(f32, {rows_k, 8, 128});
  a.cu_seqlens_q = a.cu_seqlens_k = flat(i32, {1001});
  a.max_seqlen_q = 1;
  a.max_seqlen_k = 131072;
  CHECK(workspace(a, Pass::forward, {.threads = 1}) < (64 << 20));
}

TEST_CASE("packed backward asks for what its rows need") {
  // 1000 sequences of 1 query and of 1 or 500 keys.
  for (const int64 len_k : {1, 500}) {
    Attention a;
    a.q = flat(f32, {1000, 64, 128});
    a.k = a.v = flat(f32, {1000 * len_k, 8, 128});
    a.cu_seqlens_q = a.cu_seqlens_k = flat(i32, {1001});
    a.max_seqlen_q = 1;
    a.max_seqlen_k = len_k;
    const std::size_t tensors = (1000 * 64 + 2 * 1000 * std::size_t(len_k) * 8) * 128 * 4;
    CHECK(workspace(a, Pass::backward, {.threads = 1}) < tensors / 8);
  }
}

TEST_CASE("a workspace that no memory holds is an Error that says so") {
  Attention a;
  a.q = flat(f32, {1, 0x7fffffff, 0x7fffffff, 64});
  a.k = a.v = flat(f32, {1, 0x7fffffff, 1000, 64});
  const std::string message =
      "workspace = 1 x 2147483647 heads, 2147483647 x 1000, D 64, f32: the call's intermediate "
      "results "
      "would be larger than any memory";
  try {
    workspace(a, Pass::backward, {.backend = "cpu:scalar"});
    FAIL_CHECK("was accepted");
  } catch (const Error& error) {
    CHECK(error.code() == Code::unsupported);
    CHECK(error.argument() == "workspace");
    CHECK(error.what() == message);
  }
  CHECK(!explain(a, Pass::backward, {.backend = "cpu:scalar"}).supported);
}

TEST_CASE("sizes whose plans once wrapped around") {
  // 2^22 sequences, of which one has all keys.
  Attention a;
  a.q = flat(f32, {1, 1, 1});
  a.k = flat(f32, {0x7fffffff, 1, 1});
  a.v = flat(f32, {0x7fffffff, 1, 65534});
  a.cu_seqlens_q = a.cu_seqlens_k = flat(i32, {(1 << 22) + 1});
  a.max_seqlen_q = 1;
  a.max_seqlen_k = 0x7fffffff;
  check_cpu(describe(a, Pass::forward, NullData::allowed), 1);
  // A GPU's copies of keys that are broadcast.
  a = {};
  a.q = flat(f16, {1, 1 << 23, 64, 256});
  a.k = a.v = flat(f16, {1, 1 << 23, 0x7ffffc00, 256});
  const CudaPlan made =
      cuda_case::planned(describe(a, Pass::forward, NullData::allowed), "sm_90", "cuda:wgmma");
  CHECK(made.too_large);
  CHECK(made.workspace.size == 0);
}

TEST_SUITE_END();
