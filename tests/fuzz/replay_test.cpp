// Calls made of drawn bytes, as the fuzzer makes them, so that every build tries some.
#include <doctest/doctest.h>

#include <vector>

#include "tests/cpu/case.hpp"
#include "tests/fuzz/bytes_call.hpp"

TEST_SUITE_BEGIN("fuzz");

TEST_CASE("drawn calls throw Error or finish") {
  int calls = 0;
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    std::vector<std::uint8_t> bytes(160);
    for (std::size_t n = 0; n < bytes.size(); ++n) {
      // Half of the calls are valid: bytes that spoil nothing.
      const auto drawn = std::uint8_t(256 * regard::tests::uniform(seed, 0, n));
      bytes[n] = seed % 2 && (drawn >= 239 || drawn % 16 == 15) ? 0 : drawn;
    }
    CAPTURE(seed);
    CHECK_NOTHROW(regard::tests::call_of({bytes.data(), bytes.size()}));
    ++calls;
  }
  CHECK(calls == 2000);
}

TEST_SUITE_END();
