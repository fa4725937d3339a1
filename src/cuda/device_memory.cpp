// Device memory and GPU time for programs without CUDA's headers.
#include <algorithm>
#include <limits>
#include <span>

#include "cuda/driver.hpp"
#include "cuda/workspace.hpp"
#include "cuda/write_rows.hpp"
#include "plan/count.h"
#include "problem/refuse.hpp"
#include "regard/cuda.hpp"

namespace regard {
namespace {

using namespace cuda_backend;

DevicePointer address(const void* pointer) { return reinterpret_cast<DevicePointer>(pointer); }

class OwnedEvent {
 public:
  explicit OwnedEvent(int device) : device_(device) {
    check(driver().create_event(&event_, 0), "cuEventCreate", device);
  }
  ~OwnedEvent() { driver().destroy_event(event_); }
  OwnedEvent(const OwnedEvent&) = delete;
  OwnedEvent& operator=(const OwnedEvent&) = delete;

  void record() { check(driver().record_event(event_, nullptr), "cuEventRecord", device_); }
  double seconds_since(const OwnedEvent& begin) const {
    float milliseconds = 0;
    check(driver().synchronize_event(event_), "cuEventSynchronize", device_);
    check(driver().elapsed(&milliseconds, begin.event_, event_), "cuEventElapsedTime", device_);
    return milliseconds * 1e-3;
  }

 private:
  int device_;
  Event event_ = nullptr;
};

constexpr std::size_t kMostPitch = std::numeric_limits<std::int32_t>::max();  // of a driver's copy

void copy_bytes(void* to, const void* from, std::size_t bytes, Stream stream, int device) {
  check(driver().copy_async(address(to), address(from), bytes, stream), "cuMemcpyAsync", device);
}

// Whether there is something to copy.
bool checked(const cuda_memory::RowCopy& copy) {
  const auto& [to, from, to_pitch, from_pitch, width, rows] = copy;
  if (width == 0 || rows == 0) return false;
  if (rows > 1) {
    require(to_pitch >= width, "to_pitch", to_pitch, "must be at least the width of a row");
    require(from_pitch >= width, "from_pitch", from_pitch, "must be at least the width of a row");
  }
  require(rows <= std::numeric_limits<std::size_t>::max() / width, "rows", rows,
          "have more bytes than there are addresses");
  return true;
}

void enqueue(const cuda_memory::RowCopy& copy, Stream stream, int device) {
  const auto& [to, from, to_pitch, from_pitch, width, rows] = copy;
  if (rows == 1 || (to_pitch == width && from_pitch == width)) {
    copy_bytes(to, from, width * rows, stream, device);
  } else if (std::max(to_pitch, from_pitch) > kMostPitch) {
    for (std::size_t row = 0; row < rows; ++row) {
      copy_bytes(static_cast<char*>(to) + row * to_pitch,
                 static_cast<const char*>(from) + row * from_pitch, width, stream, device);
    }
  } else {
    const Copy2d made{.from = {.address = address(from), .pitch = from_pitch},
                      .to = {.address = address(to), .pitch = to_pitch},
                      .width = width,
                      .rows = rows};
    check(driver().copy_2d_async(&made, stream), "cuMemcpy2DAsync", device);
  }
}

constexpr std::size_t kVector = 16;  // bytes that a thread copies at once
constexpr std::size_t kMostOfWarp = 512;

bool has_whole_vectors(const cuda_memory::RowCopy& copy) {
  const auto& [to, from, to_pitch, from_pitch, width, rows] = copy;
  const std::size_t bits =
      address(to) | address(from) | width | (rows > 1 ? to_pitch | from_pitch : std::size_t{0});
  return bits % kVector == 0;
}

// As f32, whose bits a copy keeps: each row is a head, cut into parts that a warp copies at once.
void enqueue_kernel(const cuda_memory::RowCopy& copy, const CurrentContext& context, Stream stream,
                    int device) {
  std::size_t part = kMostOfWarp;
  while (copy.width % part != 0) part /= 2;
  const auto rows_at = [&](const void* first, std::size_t pitch) {
    const auto floats = [](std::size_t bytes) { return std::int64_t(bytes / sizeof(float)); };
    return Tensor{const_cast<void*>(first),
                  f32,
                  {1, std::int64_t(copy.rows), std::int64_t(copy.width / part), floats(part)},
                  {0, copy.rows > 1 ? floats(pitch) : 0, floats(part), 1}};
  };
  write_rows({.first = rows_at(copy.from, copy.from_pitch), .to = rows_at(copy.to, copy.to_pitch)},
             device_at(device).chip, context.id(), stream, device);
}

}  // namespace

namespace cuda_memory {

void* allocate(int device, std::size_t bytes) {
  const CurrentContext context(device, nullptr);
  DevicePointer memory = 0;
  const Result result = driver().allocate(&memory, bytes > 0 ? bytes : 1);
  if (result == kOutOfMemory) {
    refuse("bytes", bytes, "so many could not be allocated on cuda:" + std::to_string(device),
           Code::out_of_memory);
  }
  check(result, "cuMemAlloc", device);
  return reinterpret_cast<void*>(memory);
}

void free(int device, void* memory) {
  if (!memory) return;
  const CurrentContext context(device, nullptr);
  check(driver().free(address(memory)), "cuMemFree", device);
}

void fill(int device, void* memory, unsigned char byte, std::size_t bytes) {
  if (bytes == 0) return;
  const CurrentContext context(device, nullptr);
  check(driver().fill_async(address(memory), byte, bytes, nullptr), "cuMemsetD8Async", device);
}

void to_device(int device, void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  const CurrentContext context(device, nullptr);
  check(driver().copy_in(address(to), from, bytes), "cuMemcpyHtoD", device);
}

void to_host(int device, void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  const CurrentContext context(device, nullptr);
  check(driver().copy_out(to, address(from), bytes), "cuMemcpyDtoH", device);
}

void copy_rows(int device, const RowCopy* copies, std::size_t count, void* stream) {
  const auto on = static_cast<Stream>(stream);
  const CurrentContext context(device, on);
  for (const RowCopy& copy : std::span(copies, count)) {
    if (checked(copy)) enqueue(copy, on, device);
  }
}

void copy_rows_by_kernels(int device, const RowCopy* copies, std::size_t count, void* stream) {
  const auto on = static_cast<Stream>(stream);
  const CurrentContext context(device, on);
  for (const RowCopy& copy : std::span(copies, count)) {
    if (!checked(copy)) continue;
    if (has_whole_vectors(copy)) {
      enqueue_kernel(copy, context, on, device);
    } else {
      enqueue(copy, on, device);
    }
  }
}

void add_rows(int device, const Tensor& first, const Tensor& second, const Tensor& to,
              void* stream) {
  for (const auto& [name, x] :
       {std::pair<const char*, const Tensor&>{"first", first}, {"second", second}, {"to", to}}) {
    const bool is_term = &x != &to;
    require(x.rank == 4 && x.sizes == first.sizes, name, x, "must have rank 4, and first's sizes");
    Count elements = 1;
    for (const std::int64_t size : x.sizes) {
      require(size >= 0, name, x, "has a negative size");
      elements = elements * size;
    }
    require(elements.fits(), name, x, "has more elements than can be counted");
    require(x.data || elements.value() == 0, name, x, "has no memory");
    require(x.type == (first.type == f64 ? f64
                       : is_term         ? f32
                                         : x.type) &&
                x.type != boolean && x.type != i32,
            name, x, "must be f32, or f64 if all are; to may be of any float type");
  }
  const auto on = static_cast<Stream>(stream);
  const CurrentContext context(device, on);
  write_rows({.first = first, .second = second, .to = to}, device_at(device).chip, context.id(), on,
             device);
}

void write_word(int device, void* word, std::uint32_t value, void* stream) {
  const auto on = static_cast<Stream>(stream);
  const CurrentContext context(device, on);
  check(driver().write_word(on, address(word), value, 0), "cuStreamWriteValue32", device);
}

void wait_for_word(int device, const void* word, std::uint32_t value, void* stream) {
  const auto on = static_cast<Stream>(stream);
  const CurrentContext context(device, on);
  check(driver().wait_for_word(on, address(word), value, kWaitForLater), "cuStreamWaitValue32",
        device);
}

void synchronize(int device) {
  const CurrentContext context(device, nullptr);
  check(driver().synchronize(), "cuCtxSynchronize", device);
}

void trim(int device) {
  const CurrentContext context(device, nullptr);
  trim_workspace_pool(device, context.id());
}

}  // namespace cuda_memory

double cuda_seconds(int device, const std::function<void()>& enqueue) {
  const CurrentContext context(device, nullptr);
  OwnedEvent begin(device), end(device);
  begin.record();
  enqueue();
  end.record();
  return end.seconds_since(begin);
}

}  // namespace regard
