// Options, score tensors, devices and runs that are refused, message by message.
#include <cmath>
#include <limits>

#include "semantics/dropout.h"
#include "tests/problem/refusal.hpp"

using namespace regard;
using namespace regard::tests;

namespace {
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
}  // namespace

TEST_SUITE_BEGIN("problem");

TEST_CASE("options") {
  const std::string softcap = "must be finite and not negative (0 = off)";
  const std::string window = "must be -1 (unbounded) or more";
  check_all_refused({
      {[](Call& c) { c.a.scale = kNan; }, "scale", "nan", "must be finite"},
      {[](Call& c) { c.a.scale = kInfinity; }, "scale", "inf", "must be finite"},
      {[](Call& c) { c.a.scale = -kInfinity; }, "scale", "-inf", "must be finite"},
      {[](Call& c) { c.a.softcap = kNan; }, "softcap", "nan", softcap},
      {[](Call& c) { c.a.softcap = kInfinity; }, "softcap", "inf", softcap},
      {[](Call& c) { c.a.softcap = -0.5; }, "softcap", "-0.5", softcap},
      {[](Call& c) { c.a.causal = Causal(3); }, "causal", "3", "is no such alignment"},
      {[](Call& c) { c.a.precision = Precision(9); }, "precision", "9", "is no such precision"},
      {[](Call& c) { c.a.window.left = -2; }, "window.left", "-2", window},
      {[](Call& c) { c.a.window.right = std::numeric_limits<std::int64_t>::min(); }, "window.right",
       "-9223372036854775808", window},
      {[](Call& c) { c.a.dropout.p = 1; }, "dropout.p", "1", "must be in [0, 1)"},
      {[](Call& c) { c.a.dropout.p = -0.25; }, "dropout.p", "-0.25", "must be in [0, 1)"},
      {[](Call& c) { c.a.dropout.p = kNan; }, "dropout.p", "nan", "must be in [0, 1)"},
      {[](Call& c) { c.a.dropout.seed_words = reinterpret_cast<const std::uint32_t*>(4098); },
       "dropout.seed_words", "4098", "must be an address that is a multiple of 4"},
  });
}

TEST_CASE("positions") {
  static std::int32_t rows[2] = {};
  const auto given = [](Call& c, Tensor positions) {
    c.a.causal = Causal::top_left;
    c.a.alibi_slopes = {};
    c.a.q_positions = positions;
  };
  check_all_refused({
      {[&](Call& c) {
         given(c, Tensor(rows, i32, {3, 1}));
       },
       "q_positions", "i32 [3, 1]", "must have q's batch size"},
      {[&](Call& c) {
         given(c, Tensor(rows, i32, {2, 1}, {std::int64_t(1) << 60, 1}));
       },
       "q_positions", "i32 [2, 1] strides [1152921504606846976, 1]",
       "spans more memory than there is"},
  });
}

TEST_CASE("bias, mask, ALiBi slopes and sink") {
  const std::string broadcast = "must broadcast to ";
  check_all_refused({
      {[](Call& c) { c.a.bias.type = i32; }, "bias", "i32 [1, 4, 1, 7]",
       "must be f64, f32, f16 or bf16"},
      {[](Call& c) { c.a.bias.sizes[3] = 6; }, "bias", "f32 [1, 4, 1, 6] strides [28, 7, 7, 1]",
       broadcast + "f32 [2, 4, 5, 7]"},
      {[](Call& c) { c.a.bias.rank = 5; }, "bias", "f32 of 5 dimensions",
       "must have at most 4 dimensions"},
      {[](Call& c) { c.a.bias.rank = -1; }, "bias", "f32 with unequal sizes and strides",
       "needs as many strides as sizes"},
      {[](Call& c) { c.a.mask.type = f32; }, "mask", "f32 [2, 4, 5, 7]", "must be bool"},
      {[](Call& c) { c.a.mask.sizes[0] = 3; }, "mask", "bool [3, 4, 5, 7]",
       broadcast + "bool [2, 4, 5, 7]"},
      {[](Call& c) { c.a.mask.sizes[2] = -1; }, "mask",
       "bool [2, 4, -1, 7] strides [140, 35, 7, 1]", "sizes must not be negative"},
      {[](Call& c) { c.a.alibi_slopes.type = f64; }, "alibi_slopes", "f64 [2, 4]", "must be f32"},
      {[](Call& c) { c.a.alibi_slopes.sizes[1] = 3; }, "alibi_slopes", "f32 [2, 3] strides [4, 1]",
       "must have 4 heads in 2 batches"},
      {[](Call& c) { c.a.alibi_slopes.rank = 3; }, "alibi_slopes", "f32 [2, 4, 0]", "must be (Hq)"},
      {[](Call& c) { c.a.sink.type = f16; }, "sink", "f16 [4]", "must be f32"},
      {[](Call& c) { c.a.sink.sizes[0] = 2; }, "sink", "f32 [2]", "must have 4 heads"},
      {[](Call& c) { c.a.sink.rank = 0; }, "sink", "f32 []", "must be (Hq)"},
  });
}

TEST_CASE("runs") {
  const Code unavailable = Code::unavailable;
  static int nothing = 0;
  check_all_refused({
      {[](Call& c) { c.run.threads = -1; }, "threads", "-1",
       "must be between 0 (every usable core) and 4096"},
      {[](Call& c) { c.run.threads = 4097; }, "threads", "4097",
       "must be between 0 (every usable core) and 4096"},
      {[](Call& c) { c.run.stream = &nothing; }, "stream", "a stream", "the CPU takes none"},
      {[](Call& c) { c.run.device = chip("sm_80"); }, "device", "sm_80",
       "is a chip to plan for; kernels run on cuda(0)", unavailable},
      {[](Call& c) { c.run.device = chip(""); }, "device", "chip(\"\")",
       "must have the name of a chip, as \"sm_80\""},
      {[](Call& c) { c.run.device = cuda(-1); }, "device", "cuda:-1",
       "must be a GPU from cuda(0) on"},
      {[](Call& c) { c.run.device.kind = Device::Kind(9); }, "device", "9",
       "is no such kind of device"},
      {[](Call& c) { c.run.backend = "cpu:sse9"; }, "backend", "cpu:sse9",
       "no backend has this name; \"regard info\" lists them", unavailable},
      {[](Call& c) { c.run.backend = "warp"; }, "backend", "warp",
       "no backend has this name; \"regard info\" lists them", unavailable},
      {[](Call& c) { c.run.backend = std::string("cpu:avx2\0x", 10); }, "backend", "cpu:avx2\\0x",
       "no backend has this name; \"regard info\" lists them", unavailable},
      {[](Call& c) { c.run.backend = "cuda"; }, "backend", "cuda",
       "is for GPUs, and the device is the CPU", unavailable},
  });
}

TEST_CASE("a pass that there is not") {
  Call call;
  try {
    (void)explain(call.a, Pass(2));
    FAIL_CHECK("was accepted");
  } catch (const Error& error) {
    CHECK(std::string(error.what()) == "pass = 2: is no such pass");
  }
}

TEST_CASE("dropout_probability") {
  CHECK(dropout_probability(0.5) == 0.5);
  CHECK(dropout_probability(0.1) == 6554.0 / 65536);
  for (double p : {-0.1, 1.0, kNan}) {
    CHECK_THROWS_WITH_AS(dropout_probability(p), doctest::Contains("must be in [0, 1)"), Error);
  }
}

TEST_CASE("dropout_mask: the mask, and what it refuses") {
  Call call;
  call.a.dropout = {.p = 0.5, .seed = 9, .offset = 1};
  const Array keep(boolean, {2, 4, 5, 7}, true);
  dropout_mask(call.a, keep);
  const DropoutParams params = dropout_params(0.5, 9, 1);
  for (std::int64_t n = 0; n < keep.count(); ++n) {
    const bool want = regard::keep(params, n / 140, n / 35 % 4, n / 7 % 5, n % 7);
    if ((keep.get(n) != 0) != want) FAIL_CHECK("element " << n);
  }
  CHECK(keep.gaps_intact());
  const std::string before = keep.bytes();
  const auto refused = [&](const Tensor& tensor, const char* message) {
    CHECK_THROWS_WITH_AS(dropout_mask(call.a, tensor), message, Error);
  };
  refused({}, "keep = (not given): must be bool");
  refused(Tensor(keep.tensor().data, f32, {2, 4, 5, 7}), "keep = f32 [2, 4, 5, 7]: must be bool");
  refused(Tensor(keep.tensor().data, boolean, {2, 4, 5}),
          "keep = bool [2, 4, 5]: must be (B, Hq, Sq, Sk)");
  refused(Tensor(keep.tensor().data, boolean, {2, 4, 5, 6}),
          "keep = bool [2, 4, 5, 6]: must be (B, Hq, Sq, Sk)");
  refused(Tensor(nullptr, boolean, {2, 4, 5, 7}), "keep = null: must point to data");
  refused(Tensor(keep.tensor().data, boolean, {2, 4, 5, 7}, {140, 35, 0, 1}),
          "keep = bool [2, 4, 5, 7] strides [140, 35, 0, 1]: is written to, so its elements must "
          "not overlap, and its strides must nest");
  call.a.q_positions = Tensor(nullptr, i32, {1});
  refused(keep, "q_positions = null: must point to data");
  CHECK(keep.bytes() == before);
}

TEST_SUITE_END();
