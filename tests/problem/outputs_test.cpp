// Outputs and gradients that are refused, message by message.
#include "tests/problem/refusal.hpp"

using namespace regard;
using namespace regard::tests;

namespace {
const std::string kOverlap =
    "is written to, so its elements must not overlap, and its strides must nest";
}

TEST_SUITE_BEGIN("problem");

TEST_CASE("forward's outputs") {
  check_all_refused(
      {
          {[](Call& c) { c.outputs.out = {}; }, "out", "(not given)", "must be given"},
          {[](Call& c) { c.outputs.out.type = f16; }, "out", "f16 [2, 4, 5, 6]", "must be f32"},
          {[](Call& c) { c.outputs.out.rank = 3; }, "out", "f32 [2, 4, 5] strides [120, 30, 6]",
           "must have as many dimensions as q"},
          {[](Call& c) { c.outputs.out.sizes[3] = 5; }, "out",
           "f32 [2, 4, 5, 5] strides [120, 30, 6, 1]", "must be f32 [2, 4, 5, 6]"},
          {[](Call& c) { c.outputs.out.strides[3] = 0; }, "out",
           "f32 [2, 4, 5, 6] strides [120, 30, 6, 0]", "the last stride must be 1"},
          {[](Call& c) { c.outputs.out.strides[0] = 0; }, "out",
           "f32 [2, 4, 5, 6] strides [0, 30, 6, 1]", kOverlap},
          {[](Call& c) { c.outputs.out.strides[2] = 5; }, "out",
           "f32 [2, 4, 5, 6] strides [120, 30, 5, 1]", kOverlap},
          {[](Call& c) { c.outputs.out.strides[1] = -6; }, "out",
           "f32 [2, 4, 5, 6] strides [120, -6, 6, 1]", kOverlap},
          {[](Call& c) { c.outputs.out.data = nullptr; }, "out", "null", "must point to data"},
          {[](Call& c) { c.outputs.lse.type = f64; }, "lse", "f64 [2, 4, 5]", "must be f32"},
          {[](Call& c) { c.outputs.lse.rank = 2; }, "lse", "f32 [2, 4] strides [20, 5]",
           "must be (B, Hq, Sq)"},
          {[](Call& c) { c.outputs.lse.sizes[2] = 4; }, "lse", "f32 [2, 4, 4] strides [20, 5, 1]",
           "must be f32 [2, 4, 5]"},
          {[](Call& c) { c.outputs.lse.strides[2] = 0; }, "lse", "f32 [2, 4, 5] strides [20, 5, 0]",
           kOverlap},
          {[](Call& c) { c.outputs.lse.data = nullptr; }, "lse", "null", "must point to data"},
          {[](Call& c) { c.outputs.lse.data = c.outputs.out.data; }, "out", "f32 [2, 4, 5, 6]",
           "must not share its memory with lse"},
          {[](Call& c) { c.outputs.out.data = c.a.v.data; }, "out", "f32 [2, 4, 5, 6]",
           "must not share its memory with v"},
          {[](Call& c) { c.outputs.lse.data = c.a.sink.data; }, "lse", "f32 [2, 4, 5]",
           "must not share its memory with sink"},
          {[](Call& c) {
             c.a.dropout = {.p = 0.5,
                            .seed_words = static_cast<std::uint32_t*>(c.outputs.lse.data)};
           },
           "lse", "f32 [2, 4, 5]", "must not share its memory with dropout.seed_words"},
          {[](Call& c) { c.a.continue_from = true, c.outputs.lse = {}; }, "lse", "(not given)",
           "must be given with continue_from"},
      },
      Through::forward);
}

TEST_CASE("backward's inputs") {
  check_all_refused(
      {
          {[](Call& c) { c.inputs.out = {}; }, "out", "(not given)", "must be given"},
          {[](Call& c) { c.inputs.lse = {}; }, "lse", "(not given)", "must be given"},
          {[](Call& c) { c.inputs.dout = {}; }, "dout", "(not given)", "must be given"},
          {[](Call& c) { c.inputs.dout.type = bf16; }, "dout", "bf16 [2, 4, 5, 6]", "must be f32"},
          {[](Call& c) { c.inputs.dout.sizes[2] = 6; }, "dout",
           "f32 [2, 4, 6, 6] strides [120, 30, 6, 1]", "must be f32 [2, 4, 5, 6]"},
          {[](Call& c) { c.inputs.dlse.type = f16; }, "dlse", "f16 [2, 4, 5]", "must be f32"},
          {[](Call& c) { c.inputs.dlse.sizes[0] = 1; }, "dlse", "f32 [1, 4, 5]",
           "must be f32 [2, 4, 5]"},
          {[](Call& c) { c.inputs.dout.data = nullptr; }, "dout", "null", "must point to data"},
          {[](Call& c) { c.inputs.out.data = nullptr; }, "out", "null", "must point to data"},
          {[](Call& c) { c.inputs.lse.data = nullptr; }, "lse", "null", "must point to data"},
          {[](Call& c) { c.inputs.dlse.data = nullptr; }, "dlse", "null", "must point to data"},
          {[](Call& c) { c.inputs.delta = c.inputs.lse; }, "out", "f32 [2, 4, 5, 6]",
           "must not be given with delta"},
          {[](Call& c) { c.inputs.delta = c.inputs.lse, c.inputs.out = {}; }, "dlse",
           "f32 [2, 4, 5]", "must not be given with delta"},
          {[](Call& c) { c.inputs.delta = c.inputs.dout, c.inputs.out = c.inputs.dlse = {}; },
           "delta", "f32 [2, 4, 5, 6]", "must be (B, Hq, Sq)"},
          {[](Call& c) {
             c.inputs.delta = c.inputs.lse, c.inputs.out = c.inputs.dlse = {};
             c.inputs.delta.data = nullptr;
           },
           "delta", "null", "must point to data"},
          {[](Call& c) {
             c.inputs.delta = c.inputs.lse, c.inputs.out = c.inputs.dlse = {};
             c.gradients.dq.data = c.inputs.delta.data;
             c.inputs.lse.data = c.inputs.dout.data;
           },
           "dq", "f32 [2, 4, 5, 8]", "must not share its memory with delta"},
      },
      Through::backward);
}

TEST_CASE("gradients") {
  check_all_refused(
      {
          {[](Call& c) { c.gradients.dq.type = f16; }, "dq", "f16 [2, 4, 5, 8]", "must be f32"},
          {[](Call& c) { c.gradients.dq.type = Type(99); }, "dq", "unknown [2, 4, 5, 8]",
           "must be f32"},
          {[](Call& c) { c.gradients.dk.sizes[2] = 8; }, "dk",
           "f32 [2, 2, 8, 8] strides [112, 56, 8, 1]", "must be f32 [2, 2, 7, 8]"},
          {[](Call& c) { c.gradients.dv.strides[1] = 0; }, "dv",
           "f32 [2, 2, 7, 6] strides [84, 0, 6, 1]", kOverlap},
          {[](Call& c) { c.gradients.dv.data = nullptr; }, "dv", "null", "must point to data"},
          {[](Call& c) { c.a.bias = {}; }, "dbias", "f32 [1, 4, 1, 7]", "needs a bias"},
          {[](Call& c) { c.gradients.dbias.type = f16; }, "dbias", "f16 [1, 4, 1, 7]",
           "must have the bias's type or f32"},
          {[](Call& c) { c.gradients.dbias.sizes[2] = 5; }, "dbias",
           "f32 [1, 4, 5, 7] strides [28, 7, 7, 1]", "must be f32 [1, 4, 1, 7]"},
          {[](Call& c) { c.gradients.dbias.rank = 3; }, "dbias", "f32 [1, 4, 1] strides [28, 7, 7]",
           "must have as many dimensions as the bias"},
          {[](Call& c) { c.gradients.dbias.strides[1] = 0; }, "dbias",
           "f32 [1, 4, 1, 7] strides [28, 0, 7, 1]", kOverlap},
          {[](Call& c) { c.a.sink = {}; }, "dsink", "f32 [4]", "needs a sink"},
          {[](Call& c) { c.gradients.dsink.type = f64; }, "dsink", "f64 [4]", "must be f32"},
          {[](Call& c) { c.gradients.dsink.sizes[0] = 2; }, "dsink", "f32 [2]",
           "must have 4 heads"},
          {[](Call& c) { c.gradients.dsink.strides[0] = 0; }, "dsink", "f32 [4] strides [0]",
           kOverlap},
          {[](Call& c) { c.gradients.dk.data = c.gradients.dq.data; }, "dq", "f32 [2, 4, 5, 8]",
           "must not share its memory with dk"},
          {[](Call& c) { c.gradients.dv.data = c.a.v.data; }, "dv", "f32 [2, 2, 7, 6]",
           "must not share its memory with v"},
          {[](Call& c) { c.gradients.dq.data = c.inputs.dout.data; }, "dq", "f32 [2, 4, 5, 8]",
           "must not share its memory with dout"},
          {[](Call& c) { c.gradients.dbias.data = c.a.bias.data; }, "dbias", "f32 [1, 4, 1, 7]",
           "must not share its memory with bias"},
      },
      Through::backward);
}

TEST_CASE("the types of f64 and f16 problems") {
  Settings s{.type = f64};
  check_all_refused(
      {{[](Call& c) { c.outputs.lse.type = f32; }, "lse", "f32 [1, 1, 5]", "must be f64"},
       {[](Call& c) { c.outputs.out.type = f16; }, "out", "f16 [1, 1, 5, 8]",
        "must be f64 or f32"}},
      Through::forward, s);
  s.type = f16;
  check_all_refused({{[](Call& c) { c.outputs.out.type = bf16; }, "out", "bf16 [1, 1, 5, 8]",
                      "must be f16 or f32"},
                     {[](Call& c) { c.a.continue_from = true; }, "out", "f16 [1, 1, 5, 8]",
                      "must be f32 with continue_from"}},
                    Through::forward, s);
}

TEST_SUITE_END();
