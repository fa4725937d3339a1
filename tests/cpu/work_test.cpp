// Work in proportion to what is visible: operations that kernels execute, and steps of planning.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "cpu/backend.hpp"
#include "cpu/kernels/instantiate.hpp"
#include "cpu/kernels/lanes_scalar.hpp"
#include "cpu/task_lists.hpp"
#include "problem/describe.hpp"
#include "tests/cpu/case.hpp"

using namespace regard;
using namespace regard::tests;

namespace {

int64 operations = 0;
// Loads from a tensor that a test watches.
const char *watched_begin = nullptr, *watched_end = nullptr;
int64 watched_loads = 0;

// Scalar lanes that count what they load, store, set and multiply.
struct Counting : Scalar<float> {
  static Vec set(Real x) { return ++operations, x; }
  static Vec load(const Real* p) {
    const auto* const at = reinterpret_cast<const char*>(p);
    watched_loads += watched_begin <= at && at < watched_end;
    return ++operations, *p;
  }
  static void store(Real* p, Vec x) { ++operations, *p = x; }
  static Vec multiply_add(Vec sum, UnitVec a, UnitVec b) { return ++operations, sum + a * b; }
  static Vec load_as(Type type, const void* data, int64 offset, int64 count) {
    return ++operations, Scalar::load_as(type, data, offset, count);
  }
};
constexpr CpuKernels kCounting = kernels_of<Counting, Isa::scalar, f32>();

const Processor kScalar{.usable = {Isa::scalar}};

int64 operations_of(
    const Settings& s, Pass pass, const std::function<void(const Case&)>& prepare = [](auto&) {},
    const Attention& spans = {}) {
  const Case c(s);
  prepare(c);
  if (pass == Pass::backward) c.forward();
  Attention a = c.attention();
  a.row_spans = spans.row_spans;
  a.key_spans = spans.key_spans;
  TableCopies copies;
  const Problem p = pass == Pass::forward
                        ? describe_forward(a, c.outputs(), &copies)
                        : describe_backward(a, c.inputs(), c.gradients(), &copies);
  const Plan made = plan(p, kScalar, {"cpu"}, 1);
  operations = 0;
  if (pass == Pass::forward) {
    cpu_backend::forward(p, made, kCounting, {.threads = 1});
  } else {
    cpu_backend::backward(p, made, kCounting, {.threads = 1});
  }
  return operations;
}

Settings windowed(int64 len_q, int64 len_k) {
  return {.len_q = len_q,
          .len_k = len_k,
          .dim = 4,
          .dim_v = 4,
          .causal = Causal::bottom_right,
          .window = {.left = 64}};
}

// A Batch that counts the entries that are read.
struct CountingBatch {
  const cpu_backend::Batch& batch;
  mutable int64 reads = 0;

  const cpu_backend::BatchEntry& operator[](int64 b) const { return ++reads, batch[b]; }
  int64 size() const { return batch.size(); }
  const cpu_backend::BatchEntry& totals() const { return batch.totals(); }
};

// Steps of planning `count` sequences of one row and one of `count` rows.
int64 planning_steps(int64 count, Pass pass, bool with_bias, int64 workers) {
  std::vector<std::int32_t> begins{0};
  for (int64 b = 0; b <= count; ++b) {
    begins.push_back(begins.back() + std::int32_t(b == count / 2 ? count : 1));
  }
  const int64 rows = begins.back();
  Attention a;
  a.q = a.k = a.v = Tensor(nullptr, f32, {rows, 2, 8});
  a.causal = Causal::bottom_right;
  a.cu_seqlens_q = a.cu_seqlens_k = Tensor(begins.data(), i32, {count + 2});
  a.max_seqlen_q = a.max_seqlen_k = count;
  TableCopies copies;
  Problem p = describe(a, pass, NullData::allowed, &copies);
  if (with_bias) p.dbias.type = f32;  // broadcast over batch and heads
  const CpuTiling tiling = plan(p, kScalar, {"cpu"}, 1).tiling;
  const cpu_backend::Batch batch(p, tiling);
  const CountingBatch counting{batch};
  if (pass == Pass::forward) {
    const auto work = cpu_backend::forward_work(p, tiling, counting, workers, nullptr);
    return counting.reads + int64(work.tasks.size());
  }
  const auto list = cpu_backend::backward_work(p, counting, workers);
  return counting.reads + int64(list.tasks.size());
}

}  // namespace

TEST_SUITE_BEGIN("work");

TEST_CASE("under a window, twice the rows are twice the operations") {
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const int64 once = operations_of(windowed(1024, 1024), pass);
    const int64 twice = operations_of(windowed(2048, 2048), pass);
    CHECK(once > 1024 * 64);
    CHECK(twice < once * 21 / 10);
  }
}

TEST_CASE("a mask or bias that shows documents costs what the documents cost") {
  constexpr int64 kRows = 1024;
  const auto check = [](int64 size, bool by_bias, Pass pass) {
    Settings s{.len_q = size, .len_k = size, .dim = 32, .dim_v = 32};
    const int64 alone = kRows / size * operations_of(s, pass);
    s.len_q = s.len_k = kRows;
    s.mask = !by_bias;
    s.bias = by_bias ? f32 : Type::none;
    const int64 together = operations_of(s, pass, [&](const Case& c) {
      const Array& shows = by_bias ? c.bias : c.mask;
      for (int64 n = 0; n < kRows * kRows; ++n) {
        const bool same = n / kRows / size == n % kRows / size;
        shows.set(n, by_bias ? (same ? 0 : -INFINITY) : same);
      }
    });
    CAPTURE(size);
    CAPTURE(int(pass));
    CAPTURE(by_bias);
    CHECK(together < alone * (by_bias ? 130 : 115) / 100);  // each element of a bias is loaded
  };
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    check(32, false, pass);
    check(128, false, pass);
    check(128, true, pass);
  }
}

// Operations of a call with these spans of each row, or of each key: begin, end, begin, end ...
int64 operations_with_spans(const Settings& s, Pass pass, bool of_keys,
                            const std::vector<std::int32_t>& ends) {
  Attention given;
  const int64 rows = of_keys ? s.len_k : s.len_q;
  (of_keys ? given.key_spans : given.row_spans) =
      Tensor(ends.data(), i32, {rows, int64(ends.size()) / rows});
  return operations_of(
      s, pass, [](auto&) {}, given);
}

TEST_CASE("spans that show documents cost what the documents cost") {
  constexpr int64 kRows = 1024;
  for (const int64 document : {32, 128}) {
    for (const bool has_second : {false, true}) {
      std::vector<std::int32_t> ends;
      for (int64 row = 0; row < kRows; ++row) {
        const auto begin = std::int32_t(row / document * document);
        for (const int end : {0, int(document)}) ends.push_back(begin + end);
        // An empty one: a single span of a row is as cheap as an interval.
        for (const int end : {9, 3}) {
          if (has_second) ends.push_back(begin + end);
        }
      }
      for (const Pass pass : {Pass::forward, Pass::backward}) {
        Settings s{.len_q = document, .len_k = document, .dim = 32, .dim_v = 32};
        const int64 alone = kRows / document * operations_of(s, pass);
        s.len_q = s.len_k = kRows;
        for (const bool of_keys : {false, true}) {
          CAPTURE(document);
          CAPTURE(has_second);
          CAPTURE(int(pass));
          CAPTURE(of_keys);
          CHECK(operations_with_spans(s, pass, of_keys, ends) < alone * 115 / 100);
        }
      }
    }
  }
}

// Spans that show each row a window and the first `sinks` keys: two of each row, or one of each
// key.
std::vector<std::int32_t> window_spans(int64 rows, int64 window, int64 sinks, bool of_keys) {
  std::vector<std::int32_t> ends;
  for (int64 n = 0; n < rows; ++n) {
    if (of_keys) {
      for (const int64 end : {n, n < sinks ? rows : std::min(rows, n + window)}) {
        ends.push_back(std::int32_t(end));
      }
      continue;
    }
    const int64 begin = std::max(sinks, n - window + 1);
    for (const int64 end : {int64(0), std::min(sinks, n + 1), begin, n + 1}) {
      ends.push_back(std::int32_t(end));
    }
  }
  return ends;
}

TEST_CASE("spans that show a window cost what the window costs, and sinks little") {
  constexpr int64 kRows = 1024, kWindow = 65, kSinks = 2;
  const Settings s{.len_q = kRows, .len_k = kRows, .dim = 32, .dim_v = 32};
  Settings window = s;
  window.causal = Causal::bottom_right;
  window.window = {.left = kWindow - 1};
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const int64 least = operations_of(window, pass);
    for (const bool of_keys : {false, true}) {
      const auto ends = window_spans(kRows, kWindow, kSinks, of_keys);
      CAPTURE(int(pass));
      CAPTURE(of_keys);
      CHECK(operations_with_spans(s, pass, of_keys, ends) < least * 120 / 100);
    }
  }
}

TEST_CASE("backward, with sinks before a window, twice the rows are twice the operations") {
  for (const bool of_keys : {false, true}) {
    const auto with_rows = [&](int64 rows) {
      const Settings s{.len_q = rows, .len_k = rows, .dim = 2, .dim_v = 2};
      return operations_with_spans(s, Pass::backward, of_keys, window_spans(rows, 4, 1, of_keys));
    };
    const int64 once = with_rows(16'000);
    CAPTURE(of_keys);
    CHECK(once > 16'000 * 4);
    // If all chunks of keys between the sinks and the window passed dq on, it would be 2.6 times.
    CHECK(with_rows(32'000) < once * 21 / 10);
  }
}

TEST_CASE("backward, out is read once for all chunks of keys") {
  constexpr Settings kProblem{.len_q = 64, .len_k = 2048, .dim = 4, .dim_v = 4};
  int64 elements = 0;
  operations_of(kProblem, Pass::backward, [&](const Case& c) {
    elements = c.out.count();
    watched_begin = static_cast<const char*>(c.out.tensor().data);
    watched_end = watched_begin + elements * int64(sizeof(float));
    watched_loads = 0;
  });
  watched_begin = watched_end = nullptr;
  CHECK(watched_loads == elements);
}

TEST_CASE("decoding costs nothing for keys outside the window") {
  const int64 few = operations_of(windowed(1, 16'000), Pass::forward);
  const int64 many = operations_of(windowed(1, 160'000), Pass::forward);
  CHECK(many < few * 11 / 10);
}

TEST_CASE("backward, a key that no row sees costs its gradients") {
  Settings s = windowed(3, 1'000);
  s.heads_q = 64;  // packed GQA
  const int64 few = operations_of(s, Pass::backward);
  s.len_k = 11'000;
  const int64 many = operations_of(s, Pass::backward);
  // Each element of dk and dv is cleared, tested and stored; no key is loaded.
  CHECK((many - few) / 10'000 <= 6 * (s.dim + s.dim_v));
}

TEST_CASE("keys past seqused_k cost nothing") {
  Settings s = windowed(1, 9'000);
  s.seqused = true;
  const auto with_used = [&](int64 len_k, double used) {
    s.len_k = len_k;
    const Case c(s);
    c.used_q.set(0, 1);
    c.used_k.set(0, used);
    TableCopies copies;
    const Problem p = describe_forward(c.attention(), c.outputs(), &copies);
    operations = 0;
    cpu_backend::forward(p, plan(p, kScalar, {"cpu"}, 1), kCounting, {.threads = 1});
    return operations;
  };
  CHECK(with_used(90'000, 100) == with_used(9'000, 100));
}

TEST_CASE("planning ragged batches takes steps in proportion to the rows") {
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for (const bool with_bias : {false, true}) {
      if (with_bias && pass == Pass::forward) continue;
      for (const int64 workers : {1, 64}) {
        const int64 once = planning_steps(4'000, pass, with_bias, workers);
        const int64 twice = planning_steps(8'000, pass, with_bias, workers);
        CHECK(once >= 4'000);
        CHECK(twice < once * 23 / 10);  // sorting adds a logarithm
      }
    }
  }
}

TEST_CASE("chunks of keys are few, even and in order") {
  for (const int64 block : {16, 64, 128}) {
    for (const int64 chunk : {block, 2 * block, 4 * block}) {
      CpuTiling tiling;
      tiling.block_k = block;
      tiling.chunk_k = chunk;
      for (int64 len = 0; len < 5 * chunk + 3; ++len) {
        CAPTURE(block);
        CAPTURE(chunk);
        CAPTURE(len);
        const KeyChunks chunks(tiling, len);
        REQUIRE(chunks.count == std::max<int64>(1, divide_up(len, chunk)));
        int64 end = 0, most = 0, least = chunk;
        for (int64 n = 0; n < chunks.count; ++n) {
          const Interval keys = chunks.keys(n);
          REQUIRE(keys.begin == end);
          REQUIRE(keys.begin % block == 0);
          for (int64 key = keys.begin; key < keys.end; ++key) REQUIRE(chunks.of(key) == n);
          end = keys.end;
          const int64 size = divide_up(keys.end - keys.begin, block);
          most = std::max(most, size), least = std::min(least, size);
        }
        REQUIRE(end == len);
        REQUIRE(most * block <= chunk);
        REQUIRE(most - least <= 1);
      }
    }
  }
}

TEST_CASE("workers take chunks of heads in turns, and those of a head in order") {
  const std::int32_t begins[] = {0, 700, 700, 960, 1000};  // 3, 1, 2 and 1 chunks
  Attention a;
  a.q = a.k = a.v = Tensor(nullptr, f32, {1000, 2, 8});
  a.cu_seqlens_q = a.cu_seqlens_k = Tensor(begins, i32, {5});
  a.max_seqlen_q = a.max_seqlen_k = 700;
  TableCopies copies;
  const Problem p = describe(a, Pass::backward, NullData::allowed, &copies);
  const CpuTiling tiling = plan(p, kScalar, {"cpu"}, 1).tiling;
  const cpu_backend::Batch batch(p, tiling);
  for (const int64 workers : {1, 2, 3, 100}) {
    CAPTURE(workers);
    const auto list = cpu_backend::backward_work(p, batch, workers);
    std::vector<int64> next(8, 0);
    std::vector<int64> heads;
    for (const auto& task : list.tasks) {
      const int64 head = 2 * task.b + task.kv;
      CHECK(task.chunk == next[std::size_t(head)]++);
      heads.push_back(head);
    }
    for (int64 head = 0; head < 8; ++head) {
      CHECK(next[std::size_t(head)] == batch[head / 2].chunk_count);
    }
    if (workers == 1) CHECK(std::is_sorted(heads.begin(), heads.end()));
    if (workers == 2)
      CHECK(std::vector(heads.begin(), heads.begin() + 4) == std::vector<int64>{0, 1, 0, 1});
    if (workers == 100)
      CHECK(std::vector(heads.begin(), heads.begin() + 4) == std::vector<int64>{0, 1, 2, 3});
    CHECK(list.begins.size() == list.tasks.size() + 1);
  }
}

TEST_SUITE_END();
