// Copies and words in the order of a stream, of the tests' libcuda.so.1: done at once.
#include <cstdint>
#include <cstring>
#include <mutex>

#include "tests/cuda/driver.hpp"

using namespace regard::fake;

extern "C" Machine* regard_fake_machine();

namespace {

struct Copy2d {
  struct Side {
    std::size_t x, y;
    unsigned type;
    void* host;
    char* device;
    void* array;
    std::size_t pitch;
  };
  Side from, to;
  std::size_t width, rows;
};

// What the call has to return, if it fails.
int begin(const char* name) {
  Machine& m = *regard_fake_machine();
  const std::lock_guard lock(m.mutex);
  if (!m.is_recording) return kOk;
  ++m.calls[name];
  const auto found = m.failures.find(name);
  return found == m.failures.end() ? kOk : found->second;
}

}  // namespace

#define FAKE extern "C" __attribute__((visibility("default")))
#define BEGIN(name) \
  if (const int failure = begin(name)) return failure

FAKE int cuMemcpyAsync(std::uint64_t to, std::uint64_t from, std::size_t bytes, Stream*) {
  BEGIN("cuMemcpyAsync");
  return std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes), kOk;
}
FAKE int cuMemcpy2DAsync_v2(const Copy2d* copy, Stream*) {
  BEGIN("cuMemcpy2DAsync");
  const auto& [from, to, width, rows] = *copy;
  for (const Copy2d::Side& side : {from, to}) {
    if (side.type != 4 || side.x != 0 || side.y != 0 || side.pitch < width) return kInvalid;
  }
  for (std::size_t row = 0; row < rows; ++row) {
    std::memcpy(to.device + row * to.pitch, from.device + row * from.pitch, width);
  }
  return kOk;
}
FAKE int cuStreamWriteValue32_v2(Stream*, std::uint32_t* word, std::uint32_t value,
                                 unsigned flags) {
  BEGIN("cuStreamWriteValue32");
  if (flags != 0) return kInvalid;
  return *word = value, kOk;
}
// There is one thread: a word that is not there yet never comes.
FAKE int cuStreamWaitValue32_v2(Stream*, std::uint32_t* word, std::uint32_t value, unsigned flags) {
  BEGIN("cuStreamWaitValue32");
  return flags == 0 && std::int32_t(*word - value) >= 0 ? kOk : kInvalid;
}
