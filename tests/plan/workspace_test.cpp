// A caller's workspace: exactly what workspace() says is enough, wherever it begins; less is
// refused.
#include <doctest/doctest.h>

#include <cstring>

#include "tests/cpu/case.hpp"

using namespace regard;
using namespace regard::tests;

namespace {

std::vector<Settings> problems() {
  std::vector<Settings> list;
  const Settings plain{.batch = 2, .heads_q = 4, .heads_kv = 2, .len_q = 70, .len_k = 300};
  for (Type type : {f64, f32, f16, bf16}) {
    Settings s = plain;
    s.type = type;
    list.push_back(s);
    s.mask = s.sink = true;
    s.causal = Causal::bottom_right;
    list.push_back(s);
    s = plain;
    s.type = type;
    s.bias = f16;
    list.push_back(s);
    s.packed = true;
    s.bias = Type::none;
    list.push_back(s);
    s.len_q = 3;
    s.len_k = 9000;  // the keys are split among workers
    s.heads_q = s.heads_kv = 1;
    list.push_back(s);
    s.batch = 9;  // more sequences than are split
    list.push_back(s);
    s.batch = plain.batch;
    s.packed = false;
    list.push_back(s);
    s.len_q = 64;  // split only because few of the rows are real
    s.seqused = true;
    list.push_back(s);
  }
  return list;
}

// Few real queries, all real keys.
void shorten(const Case& c) {
  if (!c.used_q.given()) return;
  for (std::int64_t b = 0; b < c.s.batch; ++b) {
    c.used_q.set(b, double(std::min<std::int64_t>(c.s.len_q, b + 1)));
    c.used_k.set(b, double(c.s.len_k - b));
  }
}

// Calls forward and backward in a workspace of exactly the size asked for. It lies `shift` bytes
// before a page that nobody may touch; the bytes between are watched.
void run_in(const Case& c, std::size_t shift, int threads) {
  for (Pass pass : {Pass::forward, Pass::backward}) {
    const std::size_t size = workspace(c.attention(), pass, {.threads = threads});
    const Guarded memory(size + shift);
    std::memset(memory.data(), 0xff, memory.size());
    const Run run{.workspace = {memory.data(), size}, .threads = threads};
    pass == Pass::forward ? c.forward(run) : c.backward(run);
    CHECK(memory.lead_intact());
    CHECK(std::string(memory.data() + size, shift) == std::string(shift, char(0xff)));
  }
}

}  // namespace

TEST_SUITE_BEGIN("plan");

TEST_CASE("exactly workspace() bytes are enough, between memory that is watched") {
  for (const Settings& s : problems()) {
    CAPTURE(to_string(s));
    const Case own(s), given(s);
    shorten(own);
    shorten(given);
    own.both({.threads = 2});
    for (std::size_t shift : {0, 1, 63}) run_in(given, shift, 2);
    CHECK(given.result_bytes() == own.result_bytes());
  }
}

TEST_CASE("sequences that are split only because few of their rows are real") {
  const Settings s{.batch = 2,
                   .heads_q = 16,
                   .heads_kv = 16,
                   .len_q = 64,
                   .len_k = 12300,
                   .dim = 2,
                   .dim_v = 16,
                   .causal = Causal::bottom_right,
                   .seqused = true};
  const Case got(s), want(s, Case::Values::exact);
  shorten(got);
  shorten(want);
  const std::size_t size = workspace(got.attention(), Pass::forward, {.threads = 2});
  const Guarded memory(size);
  got.forward({.workspace = {memory.data(), size}, .threads = 2});
  want.forward({.backend = "reference"});
  CHECK(row_error(got.out, want.out) < 1e-6);
  CHECK(row_error(got.lse, want.lse) < 1e-6);
  CHECK(memory.lead_intact());
}

TEST_CASE("one byte less is refused, or a size without memory, and nothing is written") {
  const Case c(Settings{.bias = f16});
  for (Pass pass : {Pass::forward, Pass::backward}) {
    c.forward({.threads = 1});
    const std::size_t size = workspace(c.attention(), pass, {.threads = 1});
    try {
      const Run run{.workspace = {nullptr, size}, .threads = 1};
      pass == Pass::forward ? c.forward(run) : c.backward(run);
      FAIL_CHECK("was accepted");
    } catch (const Error& error) {
      CHECK(error.argument() == "workspace.data");
    }
    const Guarded memory(size);
    std::memset(memory.data(), 0x55, size);
    const std::string before = c.result_bytes(), memory_before(memory.data(), size);
    const Run run{.workspace = {memory.data(), size - 1}, .threads = 1};
    try {
      pass == Pass::forward ? c.forward(run) : c.backward(run);
      FAIL_CHECK("was accepted");
    } catch (const Error& error) {
      CHECK(error.argument() == "workspace.size");
      CHECK(error.value() == std::to_string(size - 1));
      CHECK(std::string(error.what()) == "workspace.size = " + std::to_string(size - 1) +
                                             ": must be at least " + std::to_string(size) +
                                             " bytes");
    }
    CHECK(c.result_bytes() == before);
    CHECK(std::string(memory.data(), size) == memory_before);
  }
}

TEST_CASE("an allocator is asked once for workspace() bytes; without memory nothing is written") {
  struct Asked {
    Guarded memory;
    std::vector<std::size_t> sizes{};
    static void* allocate(void* self, std::size_t size) {
      auto& asked = *static_cast<Asked*>(self);
      asked.sizes.push_back(size);
      return size <= asked.memory.size() ? asked.memory.data() : nullptr;
    }
  };
  const Settings s{.bias = f16};
  const Case own(s), given(s);
  own.both({.threads = 1});
  given.forward({.threads = 1});
  const std::size_t size = workspace(given.attention(), Pass::backward, {.threads = 1});
  Asked enough{.memory = Guarded(size)}, little{.memory = Guarded(size - 1)};
  const std::string before = given.result_bytes();
  try {
    given.backward({.allocator = {.allocate = Asked::allocate, .self = &little}, .threads = 1});
    FAIL_CHECK("was accepted");
  } catch (const Error& error) {
    CHECK(error.code() == Code::out_of_memory);
    CHECK(error.argument() == "allocator");
  }
  CHECK(given.result_bytes() == before);
  given.backward({.allocator = {.allocate = Asked::allocate, .self = &enough}, .threads = 1});
  CHECK(enough.sizes == std::vector{size});
  CHECK(enough.memory.lead_intact());
  CHECK(given.result_bytes() == own.result_bytes());
}

TEST_CASE("workspace() covers every choice of gradients and their types") {
  for (Type type : {f64, f32, bf16}) {
    for (Type bias : {f64, f32, f16}) {
      const Settings s{.type = type, .len_q = 40, .len_k = 300, .bias = bias};
      const Case c(s);
      c.forward({.threads = 1});
      const std::size_t size = workspace(c.attention(), Pass::backward, {.threads = 1});
      const Guarded memory(size);
      const Run run{.workspace = {memory.data(), size}, .threads = 1};
      const Array wide(f32, {1, 1, 40, 300});
      const Array strided(bias, {1, 1, 40, 300}, true);
      for (int bits = 0; bits < 8; ++bits) {
        for (const Tensor& dbias : {Tensor(c.dbias), Tensor(wide), Tensor(strided), Tensor()}) {
          CAPTURE(to_string(s));
          CAPTURE(to_string(dbias));
          const Gradients to{.dq = bits & 1 ? Tensor(c.dq) : Tensor(),
                             .dk = bits & 2 ? Tensor(c.dk) : Tensor(),
                             .dv = bits & 4 ? Tensor(c.dv) : Tensor(),
                             .dbias = dbias};
          CHECK_NOTHROW(backward(c.attention(), c.inputs(), to, run));
        }
      }
    }
  }
}

TEST_CASE("shapes alone are enough to ask") {
  const auto shape = [](std::int64_t heads, std::int64_t length) {
    return Tensor(nullptr, f32, {2, heads, length, 16});
  };
  const Attention a{.q = shape(4, 100), .k = shape(2, 50), .v = shape(2, 50)};
  for (Pass pass : {Pass::forward, Pass::backward}) {
    CHECK(workspace(a, pass) > 0);
    CHECK(workspace(a, pass) == explain(a, pass).workspace);
    CHECK(workspace(a, pass, {.backend = "reference"}) == 0);
  }
}

TEST_SUITE_END();
