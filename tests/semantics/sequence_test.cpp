// Where sequences begin and how long they are, dense and packed.
#include "semantics/sequence.h"

#include <doctest/doctest.h>

#include "semantics/portable.h"

using namespace regard;

TEST_SUITE_BEGIN("semantics");

TEST_CASE("a dense batch has one length") {
  const SequenceTable table{.len_q = 5, .len_k = 7};
  for (int64 b = 0; b < 3; ++b) {
    const Sequence s = sequence(table, b);
    CHECK(s.len_q == 5);
    CHECK(s.len_k == 7);
    CHECK(s.first_q == 0);
    CHECK(s.first_k == 0);
  }
}

TEST_CASE("packed sequences lie between their bounds") {
  const int32 begins_q[] = {2, 2, 6, 11}, begins_k[] = {0, 3, 3, 10};
  const SequenceTable table{.begins_q = begins_q, .begins_k = begins_k, .len_q = 99, .len_k = 99};
  const int64 first_q[] = {2, 2, 6}, len_q[] = {0, 4, 5};
  const int64 first_k[] = {0, 3, 3}, len_k[] = {3, 0, 7};
  for (int64 b = 0; b < 3; ++b) {
    const Sequence s = sequence(table, b);
    CHECK(s.first_q == first_q[b]);
    CHECK(s.len_q == len_q[b]);
    CHECK(s.first_k == first_k[b]);
    CHECK(s.len_k == len_k[b]);
  }
}

TEST_CASE("seqused shortens dense and packed sequences and moves nothing") {
  const int32 begins[] = {0, 4, 9}, used_q[] = {1, 5}, used_k[] = {0, 2};
  SequenceTable table{.used_q = used_q, .used_k = used_k, .len_q = 6, .len_k = 6};
  CHECK(sequence(table, 0).len_q == 1);
  CHECK(sequence(table, 1).len_k == 2);
  CHECK(sequence(table, 1).first_q == 0);
  table.begins_q = table.begins_k = begins;
  CHECK(sequence(table, 1).len_q == 5);
  CHECK(sequence(table, 1).first_q == 4);
  CHECK(sequence(table, 0).len_k == 0);
}

TEST_CASE("offsets beyond 2^31 elements and negative strides") {
  const Strides strides{.batch = int64(1) << 40, .head = -(int64(1) << 33), .row = 1 << 20};
  CHECK(offset_of(strides, 1, 0, 0, 0) == int64(1) << 40);
  CHECK(offset_of(strides, 3, 2, 5, 7) ==
        3 * (int64(1) << 40) - 2 * (int64(1) << 33) + 12 * (int64(1) << 20));
}

TEST_CASE("rounding up") {
  for (int64 a = 0; a < 50; ++a) {
    for (int64 b = 1; b < 20; ++b) {
      const int64 up = round_up(a, b);
      if (up % b != 0 || up < a || up - a >= b) FAIL_CHECK(a << " up to " << b);
      if (divide_up(a, b) * b != up) FAIL_CHECK(a << " by " << b);
    }
  }
  CHECK(clamp_to<int64>(5, 0, 3) == 3);
  CHECK(clamp_to<int64>(-5, 0, 3) == 0);
  CHECK(clamp_to<int64>(2, 0, 3) == 2);
}

TEST_SUITE_END();
