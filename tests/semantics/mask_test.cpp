// Mask intervals against the plain predicate, on every small shape.
#include "semantics/mask.h"

#include <doctest/doctest.h>

#include <vector>

using namespace regard;

namespace {

constexpr int64 kMost = 9;

// The rule of docs/semantics.md for one pair.
bool sees(const MaskParams& mask, int64 i, int64 j, int64 len_q, int64 len_k) {
  const int64 diag = mask.top_left ? i : i + len_k - len_q;
  return (mask.left < 0 || diag - mask.left <= j) && (mask.right < 0 || j <= diag + mask.right);
}

// Calls check(mask, len_q, len_k) for every shape, window and alignment.
template <class Check>
void each_mask(int64 most, Check check) {
  for (int64 len_q = 0; len_q <= most; ++len_q) {
    for (int64 len_k = 0; len_k <= most; ++len_k) {
      for (int64 left = -1; left <= most + 1; ++left) {
        for (int64 right = -1; right <= most + 1; ++right) {
          for (bool top_left : {false, true}) check({left, right, top_left}, len_q, len_k);
        }
      }
    }
  }
}

}  // namespace

TEST_SUITE_BEGIN("semantics");

TEST_CASE("visible_keys is the predicate's interval") {
  int64 wrong = 0, visible = 0;
  each_mask(kMost, [&](const MaskParams& mask, int64 len_q, int64 len_k) {
    for (int64 i = 0; i < len_q; ++i) {
      const Interval keys = visible_keys(mask, i, len_q, len_k);
      wrong += keys.begin < 0 || keys.end > len_k;
      for (int64 j = 0; j < len_k; ++j) {
        const bool seen = sees(mask, i, j, len_q, len_k);
        wrong += keys.contains(j) != seen;
        visible += seen;
      }
    }
  });
  CHECK(wrong == 0);
  CHECK(visible > 100000);
}

TEST_CASE("visible_queries is the inverse of visible_keys") {
  int64 wrong = 0;
  each_mask(kMost, [&](const MaskParams& mask, int64 len_q, int64 len_k) {
    for (int64 j = 0; j < len_k; ++j) {
      const Interval rows = visible_queries(mask, j, len_q, len_k);
      wrong += rows.begin < 0 || rows.end > len_q;
      for (int64 i = 0; i < len_q; ++i) wrong += rows.contains(i) != sees(mask, i, j, len_q, len_k);
    }
  });
  CHECK(wrong == 0);
}

TEST_CASE("both ends of the interval never decrease from row to row") {
  int64 wrong = 0;
  each_mask(kMost, [&](const MaskParams& mask, int64 len_q, int64 len_k) {
    for (int64 i = 1; i < len_q; ++i) {
      const Interval before = visible_keys(mask, i - 1, len_q, len_k);
      const Interval after = visible_keys(mask, i, len_q, len_k);
      wrong += after.begin < before.begin || after.end < before.end;
    }
  });
  CHECK(wrong == 0);
}

TEST_CASE("visible_pairs counts the predicate") {
  int64 wrong = 0;
  each_mask(kMost, [&](const MaskParams& mask, int64 len_q, int64 len_k) {
    double count = 0;
    for (int64 i = 0; i < len_q; ++i) {
      for (int64 j = 0; j < len_k; ++j) count += sees(mask, i, j, len_q, len_k);
    }
    wrong += visible_pairs(mask, {.len_q = len_q, .len_k = len_k}) != count;
  });
  CHECK(wrong == 0);
}

TEST_CASE("causal alignments differ only where the lengths do") {
  const MaskParams top{-1, 0, true}, bottom{-1, 0, false};
  CHECK(visible_keys(top, 0, 3, 7).end == 1);
  CHECK(visible_keys(bottom, 0, 3, 7).end == 5);
  CHECK(visible_keys(bottom, 2, 3, 7).end == 7);
  CHECK(visible_keys(top, 4, 7, 3).end == 3);
  CHECK(visible_keys(bottom, 3, 7, 3).empty());
  CHECK(visible_keys(bottom, 4, 7, 3).end == 1);
  for (int64 i = 0; i < 5; ++i) {
    CHECK(visible_keys(top, i, 5, 5).end == visible_keys(bottom, i, 5, 5).end);
  }
}

TEST_SUITE_END();
