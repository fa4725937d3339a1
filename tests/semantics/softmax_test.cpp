// The online softmax in any number of steps and merges against the plain one.
#include "semantics/softmax.h"

#include <doctest/doctest.h>

#include <limits>
#include <vector>

#include "tests/semantics/plain_lanes.hpp"

using namespace regard;
using tests::Plain;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A row with one value per key: its lse and the weighted mean of the values.
struct Answer {
  double lse;
  double out;
};

struct Partial {
  SoftmaxRow<Plain> row = empty_softmax<Plain>();
  double out = 0;
};

double value_of(std::size_t j) { return double(j % 5) - 1.5; }

Answer plain(const std::vector<double>& logits) {
  double max = -kInfinity, sum = 0, out = 0;
  for (double s : logits) max = std::fmax(max, s);
  if (max == -kInfinity) return {-kInfinity, 0};
  for (std::size_t j = 0; j < logits.size(); ++j) {
    sum += std::exp(logits[j] - max);
    out += std::exp(logits[j] - max) * value_of(j);
  }
  return {max + std::log(sum), out / sum};
}

Partial walk(const std::vector<double>& logits, std::size_t begin, std::size_t end,
             std::size_t block) {
  Partial p;
  for (std::size_t j = begin; j < end; j += block) {
    const std::size_t stop = std::min(end, j + block);
    double max = -kInfinity;
    for (std::size_t k = j; k < stop; ++k) max = std::fmax(max, logits[k]);
    p.out *= raise_max<Plain>(p.row, max, kLog2E);
    for (std::size_t k = j; k < stop; ++k) {
      const double weight = weight_of<Plain>(logits[k], subtractable<Plain>(p.row.max), kLog2E);
      p.row.sum += weight;
      p.out += weight * value_of(k);
    }
  }
  return p;
}

// The same by references, each kept until a weight would pass 2^slack, as the GPU's kernels do.
Answer by_references(const std::vector<double>& logits, std::size_t block, double slack) {
  Partial p;
  for (std::size_t j = 0; j < logits.size(); j += block) {
    const std::size_t stop = std::min(logits.size(), j + block);
    double max = -kInfinity;
    for (std::size_t k = j; k < stop; ++k) max = std::fmax(max, logits[k]);
    if (max * kLog2E > p.row.max + slack) p.out *= raise_reference<Plain>(p.row, max, kLog2E);
    for (std::size_t k = j; k < stop; ++k) {
      const double weight = weight_at<Plain>(logits[k], kLog2E, subtractable<Plain>(p.row.max));
      p.row.sum += weight;
      p.out += weight * value_of(k);
    }
  }
  return {lse_of_reference<Plain>(p.row), p.out * normaliser<Plain>(p.row)};
}

Answer finish(const Partial& p) {
  return {lse_of<Plain>(p.row, 1), p.out * normaliser<Plain>(p.row)};
}

void check_same(const Answer& got, const Answer& want) {
  if (want.lse == -kInfinity) {
    CHECK(got.lse == -kInfinity);
    CHECK(got.out == 0);
    return;
  }
  CHECK(got.lse == doctest::Approx(want.lse).epsilon(1e-13));
  CHECK(got.out == doctest::Approx(want.out).epsilon(1e-12));
}

std::vector<std::vector<double>> rows() {
  std::vector<std::vector<double>> list{{},
                                        {0},
                                        {-kInfinity},
                                        {-kInfinity, -kInfinity, -kInfinity},
                                        {-kInfinity, 3, -kInfinity, 4},
                                        {1e4, -1e4, 1e4 - 1},
                                        {-700, -701, -702.5, -699},
                                        {5, 4, 3, 2, 1, 0},
                                        {0, 1, 2, 3, 4, 5, 6}};
  std::vector<double> waves;
  for (int j = 0; j < 37; ++j) waves.push_back(30 * std::sin(j * 1.7));
  list.push_back(waves);
  for (int j = 0; j < 37; j += 3) waves[j] = -kInfinity;
  list.push_back(waves);
  return list;
}

}  // namespace

TEST_SUITE_BEGIN("semantics");

TEST_CASE("steps of any size give the plain softmax") {
  for (const auto& logits : rows()) {
    for (std::size_t block = 1; block <= logits.size() + 1; ++block) {
      check_same(finish(walk(logits, 0, logits.size(), block)), plain(logits));
    }
  }
}

TEST_CASE("references, raised at once or late, give the plain softmax") {
  for (const auto& logits : rows()) {
    for (std::size_t block = 1; block <= logits.size() + 1; ++block) {
      for (const double slack : {0.0, 8.0}) {
        // At 1e4 a logit times log2(e) is rounded to 2e-12.
        const Answer got = by_references(logits, block, slack), want = plain(logits);
        if (want.lse == -kInfinity) {
          CHECK(got.lse == -kInfinity);
          CHECK(got.out == 0);
        } else {
          CHECK(got.lse == doctest::Approx(want.lse).epsilon(1e-12));
          CHECK(got.out == doctest::Approx(want.out).epsilon(1e-10));
        }
      }
    }
  }
}

TEST_CASE("merging two parts, cut anywhere, gives the plain softmax") {
  for (const auto& logits : rows()) {
    for (std::size_t cut = 0; cut <= logits.size(); ++cut) {
      Partial first = walk(logits, 0, cut, 4);
      const Partial second = walk(logits, cut, logits.size(), 3);
      const auto factors = merge<Plain>(first.row, second.row, kLog2E);
      first.out = first.out * factors.first + second.out * factors.second;
      check_same(finish(first), plain(logits));
    }
  }
}

TEST_CASE("a NaN reaches its own row's lse") {
  Partial p = walk({1, 2, std::nan(""), 3}, 0, 4, 2);
  CHECK(std::isnan(finish(p).lse));
}

TEST_CASE("an empty row is neutral in a merge") {
  const Partial some = walk({1, 2, 3}, 0, 3, 2);
  SoftmaxRow<Plain> row = empty_softmax<Plain>();
  const auto factors = merge<Plain>(row, some.row, kLog2E);
  CHECK(factors.first == 0);
  CHECK(factors.second == 1);
  CHECK(row.max == some.row.max);
  CHECK(row.sum == some.row.sum);
}

TEST_CASE("a call continues a result over other keys, cut anywhere") {
  for (const auto& logits : rows()) {
    for (std::size_t cut = 0; cut <= logits.size(); ++cut) {
      const Answer given = finish(walk(logits, 0, cut, 3));
      const Answer own = finish(walk(logits, cut, logits.size(), 2));
      if (leaves_as_given(given.lse, own.lse)) {
        check_same(given, plain(logits));
        continue;
      }
      const auto both = continuation<Plain>(given.lse, own.lse);
      check_same({both.lse, both.given * given.out + both.own * own.out}, plain(logits));
    }
  }
}

TEST_CASE("an lse of -inf contributes nothing to a continued row, NaN and +inf are its own") {
  const auto begins = continuation<Plain>(-kInfinity, 3);
  CHECK(begins.given == 0);
  CHECK(begins.own == 1);
  CHECK(begins.lse == 3);
  const auto nothing = continuation<Plain>(-kInfinity, -kInfinity);
  CHECK(nothing.given == 0);
  CHECK(nothing.own == 1);
  CHECK(nothing.lse == -kInfinity);
  CHECK(continuation<Plain>(-kInfinity, kInfinity).lse == kInfinity);
  CHECK(std::isnan(continuation<Plain>(kInfinity, std::nan("")).lse));
  CHECK(std::isnan(continuation<Plain>(std::nan(""), kInfinity).lse));
  for (const double bad : {std::nan(""), kInfinity}) {
    for (const auto& both : {continuation<Plain>(bad, 3), continuation<Plain>(3, bad)}) {
      CHECK(std::isnan(both.given));
      CHECK(std::isnan(both.own));
      CHECK(std::isnan(bad) == std::isnan(both.lse));
      CHECK((both.lse == bad) == (bad == kInfinity));
    }
  }
}

TEST_SUITE_END();
