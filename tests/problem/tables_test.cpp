// Tables of sequences that change while a call runs.
#include <doctest/doctest.h>

#include <cstring>

#include "tests/cpu/case.hpp"

using namespace regard;
using namespace regard::tests;

namespace {

// A pool that, before the first task, writes wild numbers over the caller's tables.
struct Spoiler {
  std::vector<Tensor> tables;

  static void run(void* self, int tasks, void (*task)(void*, int), void* context) {
    for (const Tensor& table : static_cast<Spoiler*>(self)->tables) {
      std::memset(table.data, 0x7e, std::size_t(table.sizes[0]) * sizeof(std::int32_t));
    }
    for (int n = 0; n < tasks; ++n) task(context, n);
  }
};

std::vector<Tensor> tables_of(const Attention& a) {
  std::vector<Tensor> given;
  for (const Tensor& t : {a.cu_seqlens_q, a.cu_seqlens_k, a.seqused_q, a.seqused_k}) {
    if (t.given()) given.push_back(t);
  }
  return given;
}

}  // namespace

TEST_SUITE_BEGIN("problem");

TEST_CASE("tables are read once: what changes after the check changes nothing") {
  for (const bool packed : {true, false}) {
    for (const char* backend : {"cpu", "reference"}) {
      const Settings s{.batch = 5,
                       .heads_q = 2,
                       .heads_kv = 2,
                       .len_q = 90,
                       .len_k = 150,
                       .packed = packed,
                       .seqused = !packed};
      CAPTURE(to_string(s));
      CAPTURE(backend);
      const Case want(s), got(s);
      want.both({.threads = 2, .backend = backend});
      Spoiler spoiler{tables_of(got.attention())};
      const std::vector<Tensor> unspoiled = tables_of(want.attention());
      const Run run{
          .threads = 2, .executor = {.run = Spoiler::run, .self = &spoiler}, .backend = backend};
      got.forward(run);
      for (std::size_t n = 0; n < unspoiled.size(); ++n) {
        std::memcpy(spoiler.tables[n].data, unspoiled[n].data,
                    std::size_t(unspoiled[n].sizes[0]) * sizeof(std::int32_t));
      }
      got.backward(run);
      CHECK(got.result_bytes() == want.result_bytes());
    }
  }
}

TEST_SUITE_END();
