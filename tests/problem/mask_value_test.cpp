// A Mask in calls on the CPU: the results are those of its tensors, and what it is not for is
// refused.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "regard/cuda.hpp"
#include "tests/problem/refusal.hpp"

using namespace regard;
using namespace regard::tests;

namespace {

Settings mask_settings() {
  Settings s = refusal_settings();
  s.len_q = 40;
  s.len_k = 50;
  return s;
}

// Spans for the queries of a call that has a bool mask: each sees two thirds of the keys.
struct SpanTensors {
  std::vector<std::int32_t> rows, keys;
  Tensor row_spans, key_spans;

  explicit SpanTensors(const Settings& s) {
    for (int i = 0; i < s.len_q; ++i) {
      rows.push_back(i % 7);
      rows.push_back(i % 7 + int(s.len_k) * 2 / 3);
    }
    for (int j = 0; j < s.len_k; ++j) {
      keys.push_back(j % 5);
      keys.push_back(int(s.len_q) - j % 3);
    }
    row_spans = Tensor(rows.data(), i32, {s.len_q, 2});
    key_spans = Tensor(keys.data(), i32, {s.len_k, 2});
  }
};

// The call with a Mask of its mask and spans in place of them.
Attention with_value(const Attention& a) {
  Attention made = a;
  made.visible = make_mask(a);
  made.mask = made.row_spans = made.key_spans = {};
  return made;
}

std::string results_of(const Call& c) {
  regard::forward(c.a, c.outputs, c.run);
  regard::backward(c.a, c.inputs, c.gradients, c.run);
  return c.data.result_bytes();
}

Error error_of_call(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  FAIL_CHECK("nothing was thrown");
  return Error(Code::internal, "", "", "");
}

}  // namespace

TEST_SUITE_BEGIN("problem");

TEST_CASE("a call with a Mask has the results of its tensors, bit by bit") {
  const Settings s = mask_settings();
  const SpanTensors spans(s);
  for (int kinds = 1; kinds < 8; ++kinds) {
    CAPTURE(kinds);
    Call c(s);
    const Attention given = c.a;
    if (!(kinds & 1)) c.a.mask = {};
    if (kinds & 2) c.a.row_spans = spans.row_spans;
    if (kinds & 4) c.a.key_spans = spans.key_spans;
    const std::string wanted = results_of(c);
    const Attention layer = with_value(c.a);
    c.a = given;
    c.a.mask = {};
    CHECK(results_of(c) != wanted);
    c.a = layer;
    CHECK(results_of(c) == wanted);
  }
}

TEST_CASE("a Mask of packed sequences") {
  Settings s = mask_settings();
  s.mask = true;
  s.packed = true;
  s.bias = Type::none;
  Call c(s);
  const std::string wanted = results_of(c);
  c.a = with_value(c.a);
  CHECK(results_of(c) == wanted);
  Call fewer(s);
  fewer.a = c.a;
  fewer.a.max_seqlen_k -= 1;
  const Error error = error_of_call([&] { results_of(fewer); });
  CHECK(error.argument() == "visible");
  CHECK(error.value().find("packed in ") != std::string::npos);
}

TEST_CASE("a Mask outlives the tensors that it was made of, and its copies share it") {
  Call c(mask_settings());
  const std::string wanted = results_of(c);
  Attention layer = c.a;
  layer.mask = {};
  CHECK(!layer.visible.given());
  {
    const Mask made = make_mask(c.a);
    CHECK(made.given());
    layer.visible = made;
  }
  c.a = layer;
  CHECK(results_of(c) == wanted);
  c.a.visible = {};
  CHECK(results_of(c) != wanted);
}

TEST_CASE("every function that takes an Attention takes a Mask in it") {
  Call c(mask_settings());
  const Explanation wanted = explain(c.a, Pass::backward);
  const std::size_t bytes = workspace(c.a, c.outputs, c.run);
  c.a = with_value(c.a);
  CHECK(explain(c.a, Pass::backward).text == wanted.text);
  CHECK(wanted.text.find("mask") != std::string::npos);
  CHECK(workspace(c.a, c.outputs, c.run) == bytes);
  prepare(c.a, Pass::forward, {});
  c.a.dropout.p = 0.5;
  const Settings& s = c.data.s;
  std::vector<std::uint8_t> keep(std::size_t(s.batch * s.heads_q * s.len_q * s.len_k), 7);
  dropout_mask(c.a, Tensor(keep.data(), boolean, {s.batch, s.heads_q, s.len_q, s.len_k}));
  CHECK(std::count(keep.begin(), keep.end(), 7) == 0);
}

TEST_CASE("what must not be given next to a Mask") {
  const SpanTensors spans(mask_settings());
  const std::string reason = "must not be given next to visible";
  check_all_refused(
      {
          {[](Call& c) { c.a.visible = make_mask(c.a); }, "mask", "bool [2, 4, 40, 50]", reason},
          {[&](Call& c) {
             c.a = with_value(c.a);
             c.a.row_spans = spans.row_spans;
           },
           "row_spans", "i32 [40, 2]", reason},
          {[&](Call& c) {
             c.a = with_value(c.a);
             c.a.key_spans = spans.key_spans;
           },
           "key_spans", "i32 [50, 2]", reason},
      },
      Through::both, mask_settings());
}

TEST_CASE("a Mask for calls of another size") {
  const auto made_for = [](auto change) {
    return [change](Call& c) {
      Attention other = c.a;
      std::vector<std::uint8_t> mask(1, 1);
      other.mask = Tensor(mask.data(), boolean, {1});
      change(other);
      c.a.mask = {};
      c.a.visible = make_mask(other);
    };
  };
  const std::string call = "the call has 2 x 4 heads, 40 x 50";
  check_all_refused(
      {
          {made_for([](Attention& a) {
             for (Tensor* t : {&a.q, &a.k, &a.v}) t->sizes[0] = 1;
             a.bias = a.alibi_slopes = {};
           }),
           "visible", "a Mask for 1 x 4 heads, 40 x 50", call},
          {made_for([](Attention& a) {
             a.q.sizes[1] = 2;
             a.bias = a.alibi_slopes = a.sink = {};
           }),
           "visible", "a Mask for 2 x 2 heads, 40 x 50", call},
          {made_for([](Attention& a) { a.q.sizes[2] = 39, a.bias = {}; }), "visible",
           "a Mask for 2 x 4 heads, 39 x 50", call},
          {made_for([](Attention& a) { a.k.sizes[2] = a.v.sizes[2] = 49, a.bias = {}; }), "visible",
           "a Mask for 2 x 4 heads, 40 x 49", call},
      },
      Through::both, mask_settings());
}

TEST_CASE("a Mask of another device, and outputs in its memory") {
  const auto on_a_chip = [](Call& c) {
    c.a.visible = make_mask(c.a, {}, {.device = chip("sm_90")});
    c.a.mask = {};
  };
  check_all_refused({{on_a_chip, "visible", "a Mask on sm_90", "the call is on cpu"},
                     {[](Call& c) {
                        c.a = with_value(c.a);
                        c.run.device = chip("sm_80");
                      },
                      "visible", "a Mask on cpu", "the call is on sm_80"}},
                    Through::both, mask_settings());
  check_all_refused({{[](Call& c) {
                        c.outputs.out.data = c.a.mask.data;
                        c.a = with_value(c.a);
                      },
                      "out", "f32 [2, 4, 40, 6]", "must not share its memory with mask"}},
                    Through::forward, mask_settings());
  Call c(mask_settings());
  on_a_chip(c);
  CHECK(error_of_call([&] { explain(c.a, Pass::forward); }).argument() == "visible");
  CHECK(error_of_call([&] { workspace(c.a, Pass::forward); }).argument() == "visible");
  CHECK(error_of_call([&] { prepare(c.a, Pass::forward, {.device = chip("sm_80")}); }).argument() ==
        "visible");
}

TEST_CASE("what a Mask can be made of") {
  Call c(mask_settings());
  const SpanTensors spans(c.data.s);
  CHECK(mask_memory(c.a) == 0);
  const auto refused = [&](const Attention& a) {
    return error_of_call([&] { (void)make_mask(a); });
  };
  Attention a = c.a;
  a.mask = {};
  CHECK(std::string(refused(a).what()) ==
        "mask = (not given): a Mask is made of mask, row_spans or key_spans: one of them must be "
        "given");
  CHECK(error_of_call([&] { (void)mask_memory(a); }).argument() == "mask");
  a.visible = make_mask(c.a);
  CHECK(refused(a).argument() == "visible");
  a = c.a;
  a.mask.type = f16;
  CHECK(refused(a).argument() == "mask");
  // Sizes alone, except of what it keeps.
  a = c.a;
  for (Tensor* t : {&a.q, &a.k, &a.v, &a.bias, &a.sink, &a.alibi_slopes}) t->data = nullptr;
  a.row_spans = spans.row_spans;
  CHECK(make_mask(a).given());
  a.row_spans.data = nullptr;
  CHECK(refused(a).argument() == "row_spans");
  CHECK(mask_memory(a) == 0);
}
