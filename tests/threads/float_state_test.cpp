// Results under every floating-point state that a calling thread may bring, which it also keeps.
#include <doctest/doctest.h>

#include <cfenv>
#include <memory>
#include <thread>
#include <vector>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "tests/cpu/case.hpp"
#include "threads/float_state.hpp"

using namespace regard;
using namespace regard::tests;

namespace {

// Rows that see no key, a partial tile, subnormal values: what divides by zero, rounds, flushes.
std::unique_ptr<Case> make_case() {
  auto c = std::make_unique<Case>(Settings{.heads_q = 2,
                                           .len_q = 70,
                                           .len_k = 65,
                                           .dim = 16,
                                           .dim_v = 8,
                                           .causal = Causal::bottom_right,
                                           .softcap = 3,
                                           .bias = f32,
                                           .sink = true});
  for (std::int64_t n = 0; n < c->v.count(); ++n) c->v.set(n, c->v.get(n) * 1e-39);
  return c;
}

std::vector<std::string> cpu_backends() {
  std::vector<std::string> names;
  for (const BackendInfo& backend : backends()) {
    if (backend.available && !backend.name.starts_with("cuda")) names.push_back(backend.name);
  }
  return names;
}

// One way in which a program may change its thread's state; `undo` is for the tests alone.
struct Change {
  const char* name;
  void (*set)();
  void (*undo)();
};

const Change kChanges[] = {
    {"upward", [] { std::fesetround(FE_UPWARD); }, [] { std::fesetround(FE_TONEAREST); }},
    {"downward", [] { std::fesetround(FE_DOWNWARD); }, [] { std::fesetround(FE_TONEAREST); }},
    {"toward zero", [] { std::fesetround(FE_TOWARDZERO); }, [] { std::fesetround(FE_TONEAREST); }},
#if defined(__SSE2__)
    {"flush to zero", [] { _mm_setcsr(_mm_getcsr() | 0x8040); },
     [] { _mm_setcsr(_mm_getcsr() & ~0x8040u); }},
#endif
#if defined(__GLIBC__)
    {"traps",
     [] {
       std::feclearexcept(FE_ALL_EXCEPT);  // what another test raised would trap at once
       feenableexcept(FE_DIVBYZERO | FE_INVALID | FE_OVERFLOW | FE_UNDERFLOW);
     },
     [] { fedisableexcept(FE_ALL_EXCEPT); }},
#endif
};

void each_task_under_a_state_of_its_own(void*, int tasks, void (*task)(void*, int), void* context) {
  std::vector<std::thread> threads;
  for (int index = 0; index < tasks; ++index) {
    threads.emplace_back([=] {
      kChanges[index % 3].set();
      task(context, index);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

TEST_SUITE_BEGIN("threads");

TEST_CASE("the caller's floating-point state changes no bit and traps nothing") {
  for (const std::string& backend : cpu_backends()) {
    CAPTURE(backend);
    const auto c = make_case();
    c->both({.threads = 1, .backend = backend});
    const std::string want = c->result_bytes();
    for (const Change& change : kChanges) {
      CAPTURE(change.name);
      for (int threads : {1, 3}) {
        for (const Array* result : c->results()) result->fill(-1);
        change.set();
        c->both({.threads = threads, .backend = backend});
        change.undo();
        CHECK(c->result_bytes() == want);
      }
    }
  }
}

TEST_CASE("the calling thread keeps its state and its flags") {
  const auto c = make_case();
  std::feclearexcept(FE_ALL_EXCEPT);
  std::fesetround(FE_UPWARD);
  c->both({.threads = 2});
  const int rounding = std::fegetround(), raised = std::fetestexcept(FE_ALL_EXCEPT);
  std::fesetround(FE_TONEAREST);
  CHECK(rounding == FE_UPWARD);
  CHECK(raised == 0);
}

TEST_CASE("an Executor's threads may have any state") {
  const auto c = make_case();
  c->both({.threads = 1});
  const std::string want = c->result_bytes();
  c->both({.threads = 3, .executor = {.run = each_task_under_a_state_of_its_own}});
  CHECK(c->result_bytes() == want);
}

TEST_SUITE_END();
