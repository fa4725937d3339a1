// Which tensors share memory: against every byte of every element, and through calls.
#include "problem/overlap.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <set>

#include "tests/problem/refusal.hpp"

using namespace regard;
using namespace regard::tests;

namespace {

constexpr std::int64_t kBase = 1 << 20;  // of addresses that nobody follows

std::set<std::int64_t> bytes_of(const Tensor& t) {
  std::set<std::int64_t> bytes;
  std::int64_t count = 1;
  for (int axis = 0; axis < t.rank; ++axis) count *= t.sizes[axis];
  for (std::int64_t n = 0; n < count; ++n) {
    std::int64_t offset = 0, rest = n;
    for (int axis = t.rank - 1; axis >= 0; --axis) {
      offset += rest % t.sizes[axis] * t.strides[axis];
      rest /= t.sizes[axis];
    }
    const auto size = std::int64_t(size_of(t.type));
    for (std::int64_t byte = 0; byte < size; ++byte) {
      bytes.insert(std::int64_t(reinterpret_cast<std::uintptr_t>(t.data)) + offset * size + byte);
    }
  }
  return bytes;
}

bool share_bytes(const Tensor& a, const Tensor& b) {
  const std::set<std::int64_t> bytes = bytes_of(b);
  for (const std::int64_t byte : bytes_of(a)) {
    if (bytes.count(byte)) return true;
  }
  return false;
}

Tensor random_tensor(std::uint64_t seed, std::uint64_t stream) {
  const auto draw = [&](std::uint64_t n, int bound) {
    return std::int64_t(uniform(seed, stream, n) * bound);
  };
  Tensor t;
  t.type = Type(1 + draw(0, 6));
  t.rank = int(draw(1, 5));
  const auto size = std::int64_t(size_of(t.type));
  t.data = reinterpret_cast<void*>(kBase + draw(2, 60) * size);
  for (int axis = 0; axis < t.rank; ++axis) {
    t.sizes[axis] = draw(10 + axis, 40) == 0 ? 0 : 1 + draw(3 + axis, 4);
    t.strides[axis] = draw(20 + axis, 60) - (draw(30 + axis, 4) ? 0 : 60);
  }
  return t;
}

// A slice of a dense tensor: what programs give, if they give two parts of one buffer.
Tensor slice(std::uint64_t seed, std::uint64_t stream) {
  const auto draw = [&](std::uint64_t n, std::int64_t bound) {
    return std::int64_t(uniform(seed, stream, n) * double(bound));
  };
  const std::int64_t whole[4] = {2 + std::int64_t(2 * uniform(seed, 9, 0)), 4,
                                 3 + std::int64_t(3 * uniform(seed, 9, 1)), 6};
  Tensor t;
  t.type = f32;
  t.rank = 4;
  std::int64_t dense = 1, offset = 0;
  for (int axis = 3; axis >= 0; --axis) {
    const std::int64_t step = axis == 3 ? 1 : 1 + draw(axis, 2),
                       first = draw(4 + axis, whole[axis]);
    t.sizes[axis] = 1 + draw(8 + axis, (whole[axis] - first + step - 1) / step);
    t.strides[axis] = step * dense;
    offset += first * dense;
    dense *= whole[axis];
  }
  t.data = reinterpret_cast<void*>(kBase + 4 * offset);
  return t;
}

// The gradients of packed projections: one buffer (B, S, 3, H, D).
struct OneBuffer {
  Array memory;
  Tensor dq, dk, dv;
};
OneBuffer one_buffer(std::int64_t batch, std::int64_t len, std::int64_t heads, std::int64_t dim) {
  OneBuffer x{.memory = Array(f32, {batch, len, 3 * heads, dim}), .dq = {}, .dk = {}, .dv = {}};
  auto* first = static_cast<float*>(x.memory.tensor().data);
  for (Tensor* t : {&x.dq, &x.dk, &x.dv}) {
    *t = Tensor(first, f32, {batch, heads, len, dim},
                {len * 3 * heads * dim, dim, 3 * heads * dim, 1});
    first += heads * dim;
  }
  return x;
}

bool same_elements(const Tensor& view, const Array& dense) {
  for (std::int64_t n = 0; n < dense.count(); ++n) {
    std::int64_t offset = 0, rest = n;
    for (int axis = view.rank - 1; axis >= 0; --axis) {
      offset += rest % view.sizes[axis] * view.strides[axis];
      rest /= view.sizes[axis];
    }
    if (double(static_cast<const float*>(view.data)[offset]) != dense.get(n)) return false;
  }
  return true;
}

const std::string kShared = "must not share its memory with ";

}  // namespace

TEST_SUITE_BEGIN("problem");

TEST_CASE("tensors overlap where they have a byte in common") {
  int shared = 0, unproven = 0;
  for (std::uint64_t seed = 0; seed < 6000; ++seed) {
    const Tensor a = random_tensor(seed, 1), b = random_tensor(seed, 2);
    const bool wanted = share_bytes(a, b);
    const Overlap found = overlap_of(a, b);
    CAPTURE(seed);
    shared += wanted;
    unproven += found == Overlap::unproven;
    if (found != Overlap::unproven) CHECK((found == Overlap::some) == wanted);
    CHECK(int(overlap_of(b, a)) == int(found));
  }
  CHECK(shared > 1000);
  CHECK(shared < 5000);
  CHECK(unproven == 0);
}

TEST_CASE("slices of one buffer are told apart exactly") {
  int shared = 0;
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    const Tensor a = slice(seed, 1), b = slice(seed, 2);
    const bool wanted = share_bytes(a, b);
    CAPTURE(seed);
    shared += wanted;
    CHECK(int(overlap_of(a, b)) == int(wanted ? Overlap::some : Overlap::none));
  }
  CHECK(shared > 200);
  CHECK(shared < 2800);
}

TEST_CASE("a search without end is given up") {
  // Strides of large primes: nothing is nested.
  Tensor a(reinterpret_cast<void*>(kBase), f32, {97, 89, 83, 79}, {100003, 99991, 99989, 99971});
  Tensor b = a;
  b.strides = {99961, 99929, 99923, 99907};
  b.data = reinterpret_cast<void*>(kBase + 4);
  CHECK(int(overlap_of(a, b)) == int(Overlap::unproven));
}

TEST_CASE("partial overlaps of outputs are refused by name") {
  const auto moved = [](void* data, std::int64_t bytes) {
    return static_cast<void*>(static_cast<char*>(data) + bytes);
  };
  check_all_refused({{[&](Call& c) { c.outputs.out.data = moved(c.a.q.data, 4); }, "out",
                      "f32 [2, 4, 5, 6]", kShared + "q"},
                     {[&](Call& c) { c.outputs.lse.data = moved(c.outputs.out.data, 120 * 4); },
                      "out", "f32 [2, 4, 5, 6]", kShared + "lse"},
                     {[&](Call& c) { c.outputs.lse.data = moved(c.a.mask.data, 4); }, "lse",
                      "f32 [2, 4, 5]", kShared + "mask"}},
                    Through::forward);
  check_all_refused({{[&](Call& c) { c.gradients.dk.data = moved(c.gradients.dv.data, -4); }, "dk",
                      "f32 [2, 2, 7, 8]", kShared + "dv"},
                     {[&](Call& c) { c.gradients.dsink.data = moved(c.inputs.lse.data, 4); },
                      "dsink", "f32 [4]", kShared + "lse"}},
                    Through::backward);
  const Settings packed{.batch = 3, .packed = true};
  check_refused({[&](Call& c) { c.outputs.lse.data = c.a.cu_seqlens_q.data; }, "lse", "f32 [1, 10]",
                 kShared + "cu_seqlens_q"},
                Through::forward, packed);
  Settings ragged = refusal_settings();
  ragged.seqused = true;
  check_refused({[&](Call& c) { c.outputs.lse.data = moved(c.a.seqused_k.data, -4); }, "lse",
                 "f32 [2, 4, 5]", kShared + "seqused_k"},
                Through::forward, ragged);
}

TEST_CASE("gradients of packed projections may lie in one buffer") {
  const Settings s{.batch = 2, .heads_q = 3, .heads_kv = 3, .len_q = 20, .len_k = 20};
  const Case c(s);
  c.both({.threads = 1});
  const OneBuffer x = one_buffer(2, 20, 3, 8);
  backward(c.attention(), c.inputs(), {.dq = x.dq, .dk = x.dk, .dv = x.dv}, {.threads = 1});
  CHECK(same_elements(x.dq, c.dq));
  CHECK(same_elements(x.dk, c.dk));
  CHECK(same_elements(x.dv, c.dv));
}

TEST_CASE("out may take every other row of a buffer whose other rows are q") {
  const Settings s{.batch = 2, .heads_q = 3, .heads_kv = 3, .len_q = 20, .len_k = 20};
  const Case c(s);
  c.forward({.threads = 1});
  const Array rows(f32, {2, 3, 40, 8});
  const Tensor q(rows.tensor().data, f32, {2, 3, 20, 8}, {960, 320, 16, 1});
  Tensor out = q;
  out.data = static_cast<float*>(q.data) + 8;
  for (std::int64_t n = 0; n < c.q.count(); ++n) rows.set(n / 8 * 16 + n % 8, c.q.get(n));
  Attention a = c.attention();
  a.q = q;
  forward(a, {.out = out}, {.threads = 1});
  CHECK(same_elements(out, c.out));
}

TEST_CASE("what the check of a backward call costs") {
  const OneBuffer x = one_buffer(2, 512, 16, 64);
  const Case c(Settings{.batch = 2, .heads_q = 16, .heads_kv = 16, .len_q = 8, .len_k = 8});
  const Attention a = c.attention();
  const auto seconds = [&](const Tensor& dq, const Tensor& dk, const Tensor& dv) {
    double best = 1;
    for (int n = 0; n < 1000; ++n) {
      const auto begin = std::chrono::steady_clock::now();
      check_distinct({{"dq", &dq}, {"dk", &dk}, {"dv", &dv}}, a,
                     {{"out", &c.out.tensor()}, {"dout", &c.dout.tensor()}});
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      best = std::min(best, took.count());
    }
    return best;
  };
  const double apart = seconds(c.dq, c.dk, c.dv), nested = seconds(x.dq, x.dk, x.dv);
  MESSAGE("seconds: ", apart, ", of gradients in one buffer ", nested);
  CHECK(apart < 50e-6);  // about a microsecond; sanitizers and busy machines included
  CHECK(nested < 50e-6);
}

TEST_SUITE_END();
