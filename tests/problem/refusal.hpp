// A valid call that a test spoils in one place, and the Error that it then expects.
#pragma once

#include <doctest/doctest.h>

#include <functional>
#include <string>
#include <vector>

#include "regard/regard.hpp"
#include "tests/cpu/case.hpp"

namespace regard::tests {

inline Settings refusal_settings() {
  return {.batch = 2,
          .heads_q = 4,
          .heads_kv = 2,
          .len_q = 5,
          .len_k = 7,
          .dim = 8,
          .dim_v = 6,
          .bias = f32,
          .bias_broadcast = {true, false, true, false},
          .mask = true,
          .alibi = true,
          .sink = true,
          .dlse = true};
}

struct Call {
  explicit Call(const Settings& settings = refusal_settings())
      : data(settings),
        a(data.attention()),
        outputs(data.outputs()),
        inputs(data.inputs()),
        gradients(data.gradients()) {
    data.forward({.threads = 1});
  }

  Case data;
  Attention a;
  ForwardOutputs outputs;
  BackwardInputs inputs;
  Gradients gradients;
  Run run{.threads = 1};
};

struct Refusal {
  std::function<void(Call&)> spoil;
  std::string argument;
  std::string value;
  std::string reason;
  Code code = Code::invalid_argument;
};

enum class Through { forward, backward, both };

// Both passes must refuse the call, say exactly this, and write nothing.
inline void check_refused(const Refusal& refusal, Through through = Through::both,
                          const Settings& settings = refusal_settings()) {
  for (bool backward : {false, true}) {
    if (through == (backward ? Through::forward : Through::backward)) continue;
    Call call(settings);
    refusal.spoil(call);
    const std::string before = call.data.result_bytes();
    CAPTURE(refusal.argument);
    CAPTURE(backward);
    try {
      if (backward) {
        regard::backward(call.a, call.inputs, call.gradients, call.run);
      } else {
        regard::forward(call.a, call.outputs, call.run);
      }
      FAIL_CHECK("was accepted: " << refusal.reason);
    } catch (const Error& error) {
      CHECK(error.argument() == refusal.argument);
      CHECK(error.value() == refusal.value);
      CHECK(int(error.code()) == int(refusal.code));
      CHECK(std::string(error.what()) ==
            refusal.argument + " = " + refusal.value + ": " + refusal.reason);
    }
    CHECK(call.data.result_bytes() == before);
  }
}

inline void check_all_refused(const std::vector<Refusal>& refusals, Through through = Through::both,
                              const Settings& settings = refusal_settings()) {
  for (const Refusal& refusal : refusals) check_refused(refusal, through, settings);
}

}  // namespace regard::tests
