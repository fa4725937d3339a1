// Odd but valid calls: strides of 0 and below, huge strides, empty batches, queries and keys.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "problem/describe.hpp"
#include "tests/cpu/case.hpp"

using namespace regard;
using namespace regard::tests;

TEST_SUITE_BEGIN("problem");

TEST_CASE("inputs with stride 0 read the same row everywhere") {
  const Settings s{.batch = 2, .heads_q = 2, .heads_kv = 2};
  const Case repeated(s), plain(s);
  Attention a = repeated.attention();
  for (Tensor* tensor : {&a.k, &a.v}) tensor->strides[0] = tensor->strides[1] = 0;
  for (const Array* array : {&plain.k, &plain.v}) {
    const std::int64_t head = array->count() / 4;
    for (std::int64_t n = head; n < array->count(); ++n) array->set(n, array->get(n % head));
  }
  forward(a, repeated.outputs());
  plain.forward();
  CHECK(repeated.out.bytes() == plain.out.bytes());
}

TEST_CASE("negative strides walk backwards, in inputs and outputs") {
  const Settings s{.batch = 2, .heads_q = 2, .heads_kv = 2};
  const Case turned(s), plain(s);
  const auto turn = [](const Array& array) {
    Tensor tensor = array;
    tensor.data = static_cast<char*>(tensor.data) +
                  (tensor.sizes[0] - 1) * tensor.strides[0] * std::int64_t(size_of(tensor.type));
    tensor.strides[0] = -tensor.strides[0];
    return tensor;
  };
  Attention a = turned.attention();
  a.q = turn(turned.q);
  a.k = turn(turned.k);
  a.v = turn(turned.v);
  forward(a, {.out = turn(turned.out), .lse = turn(turned.lse)});
  plain.forward();
  CHECK(turned.out.bytes() == plain.out.bytes());
  CHECK(turned.lse.bytes() == plain.lse.bytes());
}

TEST_CASE("strides of dimensions of one element do not matter") {
  const Settings s{.batch = 1, .heads_q = 1, .len_q = 1, .len_k = 4, .dim = 1, .dim_v = 1};
  const Case odd(s), plain(s);
  Attention a = odd.attention();
  ForwardOutputs outputs = odd.outputs();
  const std::int64_t huge = std::numeric_limits<std::int64_t>::max();
  a.q.strides = {huge, -huge, huge, huge};
  outputs.out.strides = {0, 0, 0, 0};
  forward(a, outputs);
  plain.forward();
  CHECK(odd.out.bytes() == plain.out.bytes());
}

TEST_CASE("strides beyond 2^31 elements") {
  // Batch 1 lies 6 GiB behind batch 0; the pages between are never touched.
  const std::int64_t far = std::int64_t(3) << 30;
  const Guarded room((std::size_t(far) + 64) * 2);
  const Settings s{.type = bf16, .batch = 2, .len_q = 2, .len_k = 4};
  const Case apart(s), plain(s);
  const Tensor k(room.data(), bf16, {2, 1, 4, 8}, {far, 32, 8, 1});
  for (std::int64_t n = 0; n < 64; ++n) {
    const auto* const from = static_cast<const std::uint16_t*>(apart.k.tensor().data);
    reinterpret_cast<std::uint16_t*>(room.data())[n / 32 * far + n % 32] = from[n];
  }
  Attention a = apart.attention();
  a.k = k;
  forward(a, apart.outputs());
  plain.forward();
  CHECK(apart.out.bytes() == plain.out.bytes());
}

TEST_CASE("no batch, no queries: nothing is done; no keys: empty rows") {
  for (Type type : {f64, f32, f16, bf16}) {
    for (const char* backend : {"", "reference"}) {
      const Run run{.threads = 2, .backend = backend};
      for (int empty = 0; empty < 2; ++empty) {
        Settings s{.type = type, .batch = 2, .sink = true};
        (empty == 0 ? s.batch : s.len_q) = 0;
        const Case none(s);
        CHECK_NOTHROW(none.both(run));
        for (const Array* array : {&none.dk, &none.dv}) {
          for (std::int64_t n = 0; n < array->count(); ++n) CHECK(array->get(n) == 0);
        }
        CHECK(none.dsink.get(0) == 0);
      }
      const Case blind(Settings{.type = type, .batch = 2, .len_k = 0});
      blind.both(run);
      for (std::int64_t n = 0; n < blind.out.count(); ++n) CHECK(blind.out.get(n) == 0);
      for (std::int64_t n = 0; n < blind.dq.count(); ++n) CHECK(blind.dq.get(n) == 0);
      for (std::int64_t n = 0; n < blind.lse.count(); ++n) {
        CHECK(blind.lse.get(n) == -std::numeric_limits<double>::infinity());
      }
    }
  }
}

TEST_CASE("tensors without elements may have null data") {
  const Tensor none(nullptr, f32, {2, 1, 0, 8}), out(nullptr, f32, {2, 1, 0, 8});
  const Case c(Settings{.batch = 2});
  CHECK_NOTHROW(forward({.q = none, .k = c.k, .v = c.v}, {.out = out}));
  CHECK_NOTHROW(forward({.q = c.q, .k = none, .v = none}, {.out = c.out}));
  CHECK(c.out.get(0) == 0);
}

TEST_CASE("gaps in outputs: q, k and v as slices of one array, and so their gradients") {
  const Settings s{.batch = 2, .len_q = 6, .len_k = 6};
  const Case plain(s), sliced(s);
  const Array together(f32, {2, 6, 3, 8}), gradients(f32, {2, 6, 3, 8});
  const auto slice = [](const Array& array, int which) {
    return Tensor(static_cast<float*>(array.tensor().data) + which * 8, f32, {2, 1, 6, 8},
                  {6 * 24, 8, 24, 1});
  };
  const Array* const parts[] = {&sliced.q, &sliced.k, &sliced.v};
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t i = 0; i < 6; ++i) {
      for (int which = 0; which < 3; ++which) {
        for (std::int64_t d = 0; d < 8; ++d) {
          together.set(together.index({b, i, which, d}),
                       parts[which]->get(parts[which]->index({b, 0, i, d})));
        }
      }
    }
  }
  const Attention a{.q = slice(together, 0), .k = slice(together, 1), .v = slice(together, 2)};
  forward(a, sliced.outputs());
  backward(a, sliced.inputs(),
           {.dq = slice(gradients, 0), .dk = slice(gradients, 1), .dv = slice(gradients, 2)});
  plain.both();
  const Array* const wanted[] = {&plain.dq, &plain.dk, &plain.dv};
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t i = 0; i < 6; ++i) {
      for (int which = 0; which < 3; ++which) {
        for (std::int64_t d = 0; d < 8; ++d) {
          const double got = gradients.get(gradients.index({b, i, which, d}));
          CHECK(got == wanted[which]->get(wanted[which]->index({b, 0, i, d})));
        }
      }
    }
  }
}

TEST_CASE("a problem prints itself") {
  const Case c(Settings{.batch = 2,
                        .heads_q = 4,
                        .heads_kv = 2,
                        .len_q = 5,
                        .len_k = 7,
                        .dim = 8,
                        .dim_v = 6,
                        .causal = Causal::top_left,
                        .softcap = 2.5,
                        .bias = f16,
                        .mask = true,
                        .alibi = true,
                        .sink = true,
                        .dropout = 0.5});
  CHECK(to_string(describe(c.attention(), Pass::forward, NullData::refused)) ==
        "2 x 4/2 heads, 5 x 7, D 8 Dv 6, f32, causal top left, softcap 2.5, bias f16, mask, alibi, "
        "sink, dropout 0.5");
  const Case w(Settings{.batch = 3, .window = {2, 1}, .packed = true});
  CHECK(to_string(describe(w.attention(), Pass::forward, NullData::refused)) ==
        "3 x 1 heads, 5 x 7, D 8, f32, packed, window 2 1");
  const Case u(Settings{.type = f64, .seqused = true});
  TableCopies copies;
  CHECK(to_string(describe(u.attention(), Pass::forward, NullData::allowed, &copies)) ==
        "1 x 1 heads, 5 x 7, D 8, f64, seqused");
}

TEST_CASE("a window wider than everything is no window") {
  Case c(Settings{.window = {12, 12}});
  CHECK(!describe(c.attention(), Pass::forward, NullData::refused).features.interval);
  c.s.window = {std::numeric_limits<std::int64_t>::max(), -1};
  CHECK(!describe(c.attention(), Pass::forward, NullData::refused).features.interval);
  c.s.window = {11, -1};
  CHECK(describe(c.attention(), Pass::forward, NullData::refused).features.interval);
}

TEST_CASE("tensors print themselves, whatever they hold") {
  CHECK(to_string(Tensor()) == "(not given)");
  CHECK(to_string(Tensor(nullptr, bf16, {2, 8})) == "bf16 [2, 8]");
  CHECK(to_string(Tensor(nullptr, f32, {2, 8}, {16, 1})) == "f32 [2, 8] strides [16, 1]");
  CHECK(to_string(Tensor(nullptr, f32, {2, 8}, {1})) == "f32 with unequal sizes and strides");
  CHECK(to_string(Tensor(nullptr, f32, {1, 2, 3, 4, 5})) == "f32 of 5 dimensions");
  Tensor wild(nullptr, f32, {1, 1, 1, 1});
  wild.sizes.fill(std::int64_t(1) << 40);
  CHECK(to_string(wild).find("1099511627776") != std::string::npos);
}

TEST_SUITE_END();
