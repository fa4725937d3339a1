// Results do not change by a bit with threads, with repetition, or with what else is in the batch.
#include <doctest/doctest.h>

#include <cstring>
#include <limits>

#include "tests/cpu/case.hpp"
#include "tests/cpu/forced.hpp"

using namespace regard;
using namespace regard::tests;

namespace {

std::vector<Settings> problems() {
  std::vector<Settings> list;
  for (Type type : tested_types()) {
    Settings s{.type = type,
               .batch = 2,
               .heads_q = 4,
               .heads_kv = 2,
               .len_q = 100,
               .len_k = 530,
               .dim = 20,
               .dim_v = 12};
    list.push_back(s);
    s.causal = Causal::bottom_right;
    s.dropout = 0.2;
    s.sink = true;
    list.push_back(s);
    s.accumulate = true;
    s.packed = true;
    list.push_back(s);
  }
  for (int axes = 0; axes < 16; ++axes) {  // dbias summed over every set of dimensions
    Settings s{.batch = 2,
               .heads_q = 4,
               .heads_kv = 2,
               .len_q = 20,
               .len_k = 520,
               .dim = 4,
               .dim_v = 4,
               .bias = axes % 2 ? f16 : f32};
    for (int axis = 0; axis < 4; ++axis) s.bias_broadcast[axis] = (axes >> axis & 1) != 0;
    list.push_back(s);
  }
  Settings decode{
      .batch = 2, .heads_q = 6, .heads_kv = 2, .len_q = 1, .len_k = 9000, .dim = 8, .dim_v = 8};
  for (Type type : tested_types()) {
    decode.type = type;
    list.push_back(decode);
  }
  return list;
}

// The bytes of batch entry 0 of a dense array.
std::string first_entry(const Array& array) {
  if (!array.given()) return "";
  const std::string bytes = array.bytes();
  return bytes.substr(0, bytes.size() / std::size_t(array.tensor().sizes[0]));
}

}  // namespace

TEST_SUITE_BEGIN("invariance");

TEST_CASE("any number of threads gives the same bits") {
  forced_backend();
  for (const Settings& s : problems()) {
    CAPTURE(to_string(s));
    std::string want;
    for (int threads : {1, 2, 3, 5, 8}) {
      const Case c(s);
      c.both({.threads = threads});
      if (threads == 1) want = c.result_bytes();
      if (c.result_bytes() != want) FAIL_CHECK(threads << " threads differ from one");
    }
  }
}

TEST_CASE("tasks of fewer rows give the same bits") {
  forced_backend();
  for (Type type : tested_types()) {
    // Many rows, which make long tasks where few threads share them.
    Settings s{.type = type,
               .batch = 1,
               .heads_q = 8,
               .heads_kv = 2,
               .len_q = 1050,
               .len_k = 150,
               .dim = 12,
               .dim_v = 8};
    for (bool causal : {false, true}) {
      if (causal) s.causal = Causal::top_left;
      CAPTURE(to_string(s));
      std::string want;
      for (int threads : {1, 2, 5}) {
        const Case c(s);
        // Rows near it may be computed again, and which they are must not depend on tasks.
        c.q.set(c.q.index({0, 3, 700, 5}), std::numeric_limits<double>::infinity());
        c.forward({.threads = threads});
        const std::string got = c.out.bytes() + c.lse.bytes();
        if (threads == 1) want = got;
        if (got != want) FAIL_CHECK(threads << " threads differ from one");
      }
    }
  }
}

TEST_CASE("the same call again gives the same bits") {
  forced_backend();
  for (const Settings& s : problems()) {
    if (s.accumulate) continue;
    CAPTURE(to_string(s));
    const Case c(s);
    c.both({.threads = 4});
    const std::string want = c.result_bytes();
    for (int again = 0; again < 2; ++again) {
      c.both({.threads = 4});
      CHECK(c.result_bytes() == want);
    }
  }
}

TEST_CASE("what else is in the batch changes no bit of an entry") {
  forced_backend();
  for (Type type : tested_types()) {
    for (unsigned features : {0x0u, 0x1u, 0x82u, 0x60u, 0x10u}) {
      Settings s{.type = type,
                 .batch = 3,
                 .heads_q = 4,
                 .heads_kv = 2,
                 .len_q = 33,
                 .len_k = 300,
                 .dim = 24,
                 .dim_v = 16};
      s = with_features(s, features);
      CAPTURE(to_string(s));
      const Case three(s);
      s.batch = 1;
      const Case one(s);
      three.both({.threads = 3});
      one.both({.threads = 1});
      const auto same = [&](const Array& many, const Array& alone) {
        return first_entry(many) == alone.bytes();
      };
      CHECK(same(three.q, one.q));  // the entry holds the same problem
      CHECK(same(three.out, one.out));
      CHECK(same(three.lse, one.lse));
      CHECK(same(three.dq, one.dq));
      CHECK(same(three.dk, one.dk));
      CHECK(same(three.dv, one.dv));
    }
  }
}

TEST_CASE("a packed sequence has the bits that it has alone") {
  forced_backend();
  for (Type type : tested_types()) {
    Settings s{.type = type,
               .batch = 3,
               .heads_q = 2,
               .heads_kv = 1,
               .len_q = 40,
               .len_k = 300,
               .dim = 16,
               .dim_v = 8,
               .causal = Causal::bottom_right,
               .packed = true};
    const Case packed(s);  // the first sequence is as long as allowed
    s.batch = 1;
    const Case alone(s);
    packed.both({.threads = 3});
    alone.both({.threads = 2});
    for (const auto& [many, one] : {std::pair{&packed.out, &alone.out},
                                    {&packed.dq, &alone.dq},
                                    {&packed.dk, &alone.dk},
                                    {&packed.dv, &alone.dv}}) {
      CHECK(many->bytes().substr(0, one->bytes().size()) == one->bytes());
    }
  }
}

TEST_SUITE_END();
