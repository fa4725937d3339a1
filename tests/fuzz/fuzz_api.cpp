// libFuzzer's entry: whatever the bytes say, the API throws Error or stays in bounds.
#include "tests/fuzz/bytes_call.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  regard::tests::call_of({data, size});
  return 0;
}
