// What q, k, v and the lengths must satisfy, message by message.
#include <limits>

#include "problem/refuse.hpp"
#include "tests/problem/refusal.hpp"

using namespace regard;
using namespace regard::tests;

namespace {

Settings packed_settings() {
  Settings s{.batch = 3, .heads_q = 2, .heads_kv = 1, .len_q = 5, .len_k = 7, .packed = true};
  s.seed = 4;
  return s;
}

std::string number(double x) { return std::to_string(std::int64_t(x)); }

}  // namespace

TEST_SUITE_BEGIN("problem");

TEST_CASE("the spoiled calls are valid before they are spoiled") {
  Call plain, packed(packed_settings());
  CHECK_NOTHROW(plain.data.both(plain.run));
  CHECK_NOTHROW(packed.data.both(packed.run));
}

TEST_CASE("q, k and v: given, typed, shaped") {
  check_all_refused({
      {[](Call& c) { c.a.q = {}; }, "q", "(not given)", "must be given"},
      {[](Call& c) { c.a.k = {}; }, "k", "(not given)", "must be given"},
      {[](Call& c) { c.a.v = {}; }, "v", "(not given)", "must be given"},
      {[](Call& c) { c.a.q.type = i32; }, "q", "i32 [2, 4, 5, 8]", "must be f64, f32, f16 or bf16"},
      {[](Call& c) { c.a.k.type = boolean; }, "k", "bool [2, 2, 7, 8]",
       "must be f64, f32, f16 or bf16"},
      {[](Call& c) { c.a.q.type = Type(77); }, "q", "unknown [2, 4, 5, 8]",
       "must be f64, f32, f16 or bf16"},
      {[](Call& c) { c.a.k.type = f16; }, "k", "f16 [2, 2, 7, 8]", "must have q's type"},
      {[](Call& c) { c.a.v.type = f64; }, "v", "f64 [2, 2, 7, 6]", "must have q's type"},
      {[](Call& c) { c.a.q.rank = 3; }, "q", "f32 [2, 4, 5] strides [160, 40, 8]",
       "must be (batch, heads, length, size)"},
      {[](Call& c) { c.a.k.rank = 5; }, "k", "f32 of 5 dimensions",
       "must be (batch, heads, length, size)"},
      {[](Call& c) { c.a.v.rank = -1; }, "v", "f32 with unequal sizes and strides",
       "needs as many strides as sizes"},
      {[](Call& c) { c.a.q.sizes[2] = -5; }, "q", "f32 [2, 4, -5, 8] strides [160, 40, 8, 1]",
       "sizes must not be negative"},
      {[](Call& c) { c.a.q.sizes[2] = std::int64_t(1) << 31; }, "q",
       "f32 [2, 4, 2147483648, 8] strides [160, 40, 8, 1]", "sizes must be below 2^31"},
      {[](Call& c) { c.a.q.strides[0] = std::int64_t(1) << 61; }, "q",
       "f32 [2, 4, 5, 8] strides [2305843009213693952, 40, 8, 1]",
       "spans more memory than there is"},
      {[](Call& c) { c.a.q.strides[0] = std::numeric_limits<std::int64_t>::min(); }, "q",
       "f32 [2, 4, 5, 8] strides [-9223372036854775808, 40, 8, 1]",
       "spans more memory than there is"},
      {[](Call& c) { c.a.v.strides[3] = 2; }, "v", "f32 [2, 2, 7, 6] strides [84, 42, 6, 2]",
       "the last stride must be 1"},
  });
}

TEST_CASE("q, k and v agree with each other") {
  check_all_refused({
      {[](Call& c) { c.a.k.sizes[3] = 7; }, "k", "f32 [2, 2, 7, 7] strides [112, 56, 8, 1]",
       "must have q's head size"},
      {[](Call& c) { c.a.v.sizes[1] = 1; }, "v", "f32 [2, 1, 7, 6] strides [84, 42, 6, 1]",
       "must have as many heads as k"},
      {[](Call& c) { c.a.v.sizes[2] = 6; }, "v", "f32 [2, 2, 6, 6] strides [84, 42, 6, 1]",
       "must be as long as k"},
      {[](Call& c) { c.a.q.sizes[1] = 3; }, "k", "f32 [2, 2, 7, 8]",
       "q's heads must be a multiple of k's"},
      {[](Call& c) { c.a.q.sizes[1] = 0; }, "q", "f32 [2, 0, 5, 8]", "must have at least one head"},
      {[](Call& c) { c.a.k.sizes[1] = c.a.v.sizes[1] = 0; }, "k", "f32 [2, 0, 7, 8]",
       "q's heads must be a multiple of k's"},
      {[](Call& c) { c.a.q.sizes[3] = c.a.k.sizes[3] = 0; }, "q", "f32 [2, 4, 5, 0]",
       "the head size must be at least 1"},
      {[](Call& c) { c.a.v.sizes[3] = 0; }, "v", "f32 [2, 2, 7, 0]",
       "the head size must be at least 1"},
      {[](Call& c) { c.a.k.sizes[0] = c.a.v.sizes[0] = 1; }, "k", "f32 [1, 2, 7, 8]",
       "must have q's batch size"},
      {[](Call& c) { c.a.v.sizes[0] = 1; }, "v", "f32 [1, 2, 7, 6]", "must have q's batch size"},
      {[](Call& c) { c.a.max_seqlen_q = 5; }, "max_seqlen_q", "5", "only packed sequences take it"},
      {[](Call& c) { c.a.max_seqlen_k = -1; }, "max_seqlen_k", "-1",
       "only packed sequences take it"},
  });
}

TEST_CASE("null and misaligned data") {
  check_all_refused({
      {[](Call& c) { c.a.q.data = nullptr; }, "q", "null", "must point to data"},
      {[](Call& c) { c.a.k.data = nullptr; }, "k", "null", "must point to data"},
      {[](Call& c) { c.a.v.data = nullptr; }, "v", "null", "must point to data"},
      {[](Call& c) { c.a.bias.data = nullptr; }, "bias", "null", "must point to data"},
      {[](Call& c) { c.a.mask.data = nullptr; }, "mask", "null", "must point to data"},
      {[](Call& c) { c.a.alibi_slopes.data = nullptr; }, "alibi_slopes", "null",
       "must point to data"},
      {[](Call& c) { c.a.sink.data = nullptr; }, "sink", "null", "must point to data"},
  });
  Call probe;
  char* const odd = static_cast<char*>(probe.a.k.data) + 2;
  check_refused({[odd](Call& c) { c.a.k.data = odd; }, "k", printed(static_cast<const void*>(odd)),
                 "must be aligned to its elements; a copy is"});
}

TEST_CASE("seqused") {
  Settings s = refusal_settings();
  s.seqused = true;
  check_all_refused(
      {
          {[](Call& c) { c.data.used_q.set(1, 6); }, "seqused_q[1]", "6",
           "must be between 0 and the sequence's length, 5"},
          {[](Call& c) { c.data.used_q.set(0, -1); }, "seqused_q[0]", "-1",
           "must be between 0 and the sequence's length, 5"},
          {[](Call& c) { c.data.used_k.set(1, 8); }, "seqused_k[1]", "8",
           "must be between 0 and the sequence's length, 7"},
          {[](Call& c) { c.a.seqused_k.type = f32; }, "seqused_k", "f32 [2]", "must be i32"},
          {[](Call& c) { c.a.seqused_q.sizes[0] = 3; }, "seqused_q", "i32 [3]",
           "must have 2 elements"},
          {[](Call& c) { c.a.seqused_q.rank = 2; }, "seqused_q", "i32 [2, 0]",
           "must have one dimension"},
          {[](Call& c) { c.a.seqused_q.strides[0] = 2; }, "seqused_q", "i32 [2] strides [2]",
           "the last stride must be 1"},
          {[](Call& c) { c.a.seqused_k.data = nullptr; }, "seqused_k", "null",
           "must point to data"},
      },
      Through::both, s);
}

TEST_CASE("packed sequences") {
  const Settings s = packed_settings();
  const Call probe(s);
  const double total_q = probe.data.begins_q.get(3), total_k = probe.data.begins_k.get(3);
  const double first_q = probe.data.begins_q.get(1), first_k = probe.data.begins_k.get(1);
  check_all_refused(
      {
          {[](Call& c) { c.a.cu_seqlens_k = {}; }, "cu_seqlens_k", "(not given)",
           "must be given with cu_seqlens_q"},
          {[](Call& c) { c.a.cu_seqlens_q = {}; }, "cu_seqlens_q", "(not given)",
           "must be given with cu_seqlens_k"},
          {[](Call& c) { c.a.cu_seqlens_q.rank = 2; }, "cu_seqlens_q", "i32 [4, 0]",
           "must be (batch + 1)"},
          {[](Call& c) { c.a.cu_seqlens_q.type = f32; }, "cu_seqlens_q", "f32 [4]", "must be i32"},
          {[](Call& c) { c.a.cu_seqlens_k.sizes[0] = 3; }, "cu_seqlens_k", "i32 [3]",
           "must have 4 elements"},
          {[](Call& c) { c.a.cu_seqlens_q.sizes[0] = 0; }, "cu_seqlens_q", "i32 [0]",
           "must have at least one element, the 0 of an empty batch"},
          {[](Call& c) { c.a.cu_seqlens_k.data = nullptr; }, "cu_seqlens_k", "null",
           "must point to data"},
          {[](Call& c) { c.data.begins_q.set(0, -1); }, "cu_seqlens_q[0]", "-1",
           "must not be negative"},
          {[](Call& c) { c.data.begins_q.set(2, 1); }, "cu_seqlens_q[2]", "1",
           "must not be below the entry before it, " + number(first_q)},
          {[](Call& c) { c.data.begins_k.set(2, 0); }, "cu_seqlens_k[2]", "0",
           "must not be below the entry before it, " + number(first_k)},
          {[](Call& c) { c.data.begins_q.set(1, 6); }, "cu_seqlens_q[1]", "6",
           "makes a sequence longer than max_seqlen, 5"},
          {[=](Call& c) { c.data.begins_q.set(3, total_q + 1), c.a.max_seqlen_q = total_q; },
           "cu_seqlens_q[3]", number(total_q + 1),
           "runs past the end of the packed rows, " + number(total_q)},
          {[=](Call& c) { c.data.begins_k.set(3, total_k + 2), c.a.max_seqlen_k = total_k; },
           "cu_seqlens_k[3]", number(total_k + 2),
           "runs past the end of the packed rows, " + number(total_k)},
          {[](Call& c) { c.a.max_seqlen_q = -1; }, "max_seqlen_q", "-1",
           "must be between 0 and the rows of q"},
          {[=](Call& c) { c.a.max_seqlen_k = total_k + 1; }, "max_seqlen_k", number(total_k + 1),
           "must be between 0 and the rows of k"},
          {[](Call& c) { c.a.q.rank = 4; }, "q", to_string([&] {
             Tensor q = probe.a.q;
             q.rank = 4;
             return q;
           }()),
           "packed sequences need (total, heads, size)"},
      },
      Through::both, s);
}

TEST_CASE("dense strides of hostile sizes end at the largest number") {
  const std::int64_t most = std::numeric_limits<std::int64_t>::max();
  const Tensor t(nullptr, f32, {2, 1 << 22, 1 << 22, most / 2});
  CHECK(t.strides == std::array<std::int64_t, 4>{most, most, most / 2, 1});
  const Tensor negative(nullptr, f32, {4, -3, 5});
  CHECK(negative.strides == std::array<std::int64_t, 4>{5, 5, 1, 0});
}

TEST_SUITE_END();
