// Device memory for programs without CUDA's headers.
#include <chrono>
#include <iterator>
#include <string>
#include <thread>

#include "tests/cuda/fake.hpp"

using namespace regard;
using namespace regard::tests;

namespace {

TEST_SUITE_BEGIN("cuda");

TEST_CASE("memory helpers") {
  const FakeCuda fake;
  const DeviceBytes memory(1, 100);
  char text[] = "on the device", back[sizeof text] = "";
  cuda_memory::to_device(1, memory.data(), text, sizeof text);
  cuda_memory::to_host(1, back, memory.data(), sizeof text);
  CHECK(std::string(back) == text);
  cuda_memory::fill(1, memory.data(), 'x', 2);
  cuda_memory::synchronize(1);
  cuda_memory::to_host(1, back, memory.data(), 3);
  CHECK(std::string(back).starts_with("xx the"));
  const double seconds =
      cuda_seconds(0, [] { std::this_thread::sleep_for(std::chrono::milliseconds(2)); });
  CHECK(seconds > 2e-3);
  CHECK(seconds < 2);
  fake.machine->failures["cuMemAlloc"] = 2;
  CHECK(error_of([] { cuda_memory::allocate(0, 100); }).code() == Code::out_of_memory);
}

TEST_CASE("copies of rows") {
  constexpr std::size_t kFar = std::size_t(1) << 31;  // more than the driver's copies step over
  const FakeCuda fake;
  const DeviceBytes from(1, kFar + 8), to(1, 32);
  auto* const there = static_cast<char*>(to.data());
  cuda_memory::to_device(1, from.data(), "abcdefgh", 8);
  cuda_memory::to_device(1, static_cast<char*>(from.data()) + kFar, "ij", 2);
  cuda_memory::fill(1, there, '.', 32);
  const cuda_memory::RowCopy copies[] = {
      {.to = there, .from = from.data(), .to_pitch = 2, .from_pitch = 2, .width = 2, .rows = 2},
      {.to = there + 8, .from = from.data(), .to_pitch = 5, .from_pitch = 3, .width = 2, .rows = 3},
      {.to = there + 24,
       .from = from.data(),
       .to_pitch = 3,
       .from_pitch = kFar,
       .width = 2,
       .rows = 2},
      {.to = there, .from = from.data(), .to_pitch = 1, .from_pitch = 1, .width = 0, .rows = 7}};
  fake.machine->calls.clear();
  cuda_memory::copy_rows(1, copies, std::size(copies), nullptr);
  CHECK(fake.machine->calls["cuMemcpyAsync"] == 3);
  CHECK(fake.machine->calls["cuMemcpy2DAsync"] == 1);
  char found[33] = "";
  cuda_memory::to_host(1, found, there, 32);
  CHECK(std::string(found) == "abcd....ab...de...gh....ab.ij...");
}

TEST_CASE("copies of rows that are refused") {
  const FakeCuda fake;
  const DeviceBytes memory(1, 64);
  const auto argument = [&](cuda_memory::RowCopy copy) {
    copy.from = copy.to = memory.data();
    return error_of([&] { cuda_memory::copy_rows(1, &copy, 1, nullptr); }).argument();
  };
  CHECK(argument({.to_pitch = 3, .from_pitch = 4, .width = 4, .rows = 2}) == "to_pitch");
  CHECK(argument({.to_pitch = 4, .from_pitch = 0, .width = 4, .rows = 2}) == "from_pitch");
  constexpr std::size_t kMany = std::size_t(1) << 63;
  CHECK(argument({.to_pitch = 4, .from_pitch = 4, .width = 4, .rows = kMany}) == "rows");
}

TEST_CASE("words in the order of a stream") {
  const FakeCuda fake;
  const DeviceBytes memory(1, 4);
  cuda_memory::write_word(1, memory.data(), 0xfffffffe, nullptr);
  cuda_memory::wait_for_word(1, memory.data(), 0xfffffffd, nullptr);
  const Error error = error_of([&] { cuda_memory::wait_for_word(1, memory.data(), 1, nullptr); });
  CHECK(error.code() == Code::device_failure);
  CHECK(std::string(error.what()).find("cuStreamWaitValue32") != std::string::npos);
  cuda_memory::write_word(1, memory.data(), 2, nullptr);
  cuda_memory::wait_for_word(1, memory.data(), 0xfffffffe, nullptr);
  cuda_memory::wait_for_word(1, memory.data(), 1, nullptr);
}

TEST_SUITE_END();

}  // namespace
