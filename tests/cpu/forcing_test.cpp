// Forcing a backend, by Run::backend and by REGARD_BACKEND.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>

#include "tests/cpu/case.hpp"

using namespace regard;
using namespace regard::tests;

namespace {

// Sets REGARD_BACKEND for one scope.
class Forced {
 public:
  explicit Forced(const char* name) {
    const char* const old = std::getenv("REGARD_BACKEND");
    had_ = old != nullptr;
    if (old) old_ = old;
    setenv("REGARD_BACKEND", name, 1);
  }
  ~Forced() { had_ ? setenv("REGARD_BACKEND", old_.c_str(), 1) : unsetenv("REGARD_BACKEND"); }

 private:
  bool had_ = false;
  std::string old_;
};

std::string message_of(const Case& c, const Run& run = {}) {
  try {
    c.forward(run);
  } catch (const Error& error) {
    CHECK(int(error.code()) == int(Code::unavailable));
    return error.what();
  }
  return "";
}

}  // namespace

TEST_SUITE_BEGIN("forcing");

TEST_CASE("every CPU backend of the list: runs if it is available, is refused if not") {
  const Case c(Settings{.type = bf16});
  int available = 0;
  for (const BackendInfo& backend : backends()) {
    CAPTURE(backend.name);
    CHECK(!backend.note.empty());
    if (backend.name.starts_with("cuda")) continue;
    if (backend.available) {
      ++available;
      CHECK(explain(c.attention(), Pass::forward, {.backend = backend.name}).backend ==
            backend.name);
      CHECK(message_of(c, {.backend = backend.name}).empty());
      const Forced forced(backend.name.c_str());
      CHECK(explain(c.attention(), Pass::forward).backend == backend.name);
      CHECK(message_of(c).empty());
    } else {
      CHECK(message_of(c, {.backend = backend.name}).starts_with("backend = " + backend.name));
      const Forced forced(backend.name.c_str());
      CHECK(message_of(c).starts_with("REGARD_BACKEND = " + backend.name));
      CHECK(!explain(c.attention(), Pass::forward).supported);
    }
  }
  CHECK(available >= 2);  // cpu:scalar and the reference at least
}

TEST_CASE("an unknown name is an error that says where it came from") {
  const Case c(Settings{});
  const std::string reason = "no backend has this name; \"regard info\" lists them";
  CHECK(message_of(c, {.backend = "cpu:mmx"}) == "backend = cpu:mmx: " + reason);
  const Forced forced("abacus");
  CHECK(message_of(c) == "REGARD_BACKEND = abacus: " + reason);
}

TEST_CASE("Run::backend wins over REGARD_BACKEND, and an empty variable forces nothing") {
  const Case c(Settings{});
  {
    const Forced forced("abacus");
    CHECK(explain(c.attention(), Pass::forward, {.backend = "reference"}).backend == "reference");
  }
  const Forced forced("");
  const Explanation e = explain(c.attention(), Pass::forward);
  CHECK(e.supported);
  CHECK(e.backend.starts_with("cpu:"));
}

TEST_CASE("the machine and the list of backends say the same") {
  const Machine m = machine();
  CHECK(!m.cpu.empty());
  CHECK(m.threads >= 1);
  for (const BackendInfo& backend : backends()) {
    if (!backend.name.starts_with("cpu:")) continue;
    const bool listed =
        std::find(m.isa.begin(), m.isa.end(), backend.name.substr(4)) != m.isa.end();
    CHECK(listed == backend.available);
  }
  CHECK(std::string(version()).size() >= 5);
}

TEST_CASE("the measured peak is a rate, of every type") {
  for (Type type : {f64, f32, f16, bf16}) CHECK(measured_peak(type, {.threads = 1}) > 1e7);
  CHECK_THROWS_AS(measured_peak(f32, {.backend = "reference"}), Error);
  CHECK_THROWS_AS(measured_peak(i32), Error);
}

TEST_SUITE_END();
