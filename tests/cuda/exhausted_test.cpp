// What calls do where an allocation fails.
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "regard/distributed.hpp"
#include "tests/cuda/allocations.hpp"
#include "tests/cuda/fake.hpp"

using namespace regard;
using namespace regard::tests;

TEST_SUITE_BEGIN("steady");

TEST_CASE("an allocation that fails is an Error, whichever it is") {
  if (!kCountsAllocations) return;
  const FakeCuda fake;
  const EmptyCache cache;
  DeviceCase on_gpu;
  std::vector<float> memory(1 << 16);
  const auto rows = [&](std::size_t at) { return Tensor(&memory[at << 12], f32, {1, 2, 1, 64}); };
  const Attention a{.q = rows(0), .k = rows(1), .v = rows(2)};
  const BackwardInputs from{
      .out = rows(4), .lse = {&memory[3 << 12], f32, {1, 2, 1}}, .dout = rows(5), .dlse = {}};
  const Run one{.threads = 1};
  const Gradients to{.dq = rows(6), .dk = rows(7), .dv = rows(8), .dbias = {}, .dsink = {}};
  const std::pair<std::string, std::function<void()>> calls[] = {
      {"forward", [&] { forward(a, {.out = from.out, .lse = from.lse}, one); }},
      {"backward", [&] { backward(a, from, to, one); }},
      {"explain", [&] { (void)explain(a, Pass::backward, one); }},
      {"workspace", [&] { (void)workspace(a, Pass::forward, one); }},
      {"dropout_mask",
       [&] {
         dropout_mask(a, Tensor(&memory[9 << 12], boolean, {1, 2, 1, 1}));
       }},
      {"forward on a GPU", [&] { on_gpu.forward(); }},
      {"backward on a GPU", [&] { on_gpu.backward(); }},
      {"explain on a GPU", [&] { (void)explain(on_gpu.a, Pass::forward, on_gpu.run); }},
      {"a plan", [] { (void)distributed::plan({.length = 1000, .heads_q = 8}, 4); }},
  };
  fake.machine->is_recording = false;
  int errors = 0;
  for (const auto& [name, call] : calls) {
    CAPTURE(name);
    int which = 0;
    for (bool failed = true; failed; ++which) {
      failing_allocation = which;
      try {
        call();
        failed = failing_allocation < 0;  // that one failed, and was not needed
      } catch (const Error& error) {
        failing_allocation = -1;
        CHECK(error.code() == Code::out_of_memory);
        ++errors;
      }
      failing_allocation = -1;
    }
  }
  CHECK(errors > 100);
  fake.machine->is_recording = true;
}

TEST_SUITE_END();
