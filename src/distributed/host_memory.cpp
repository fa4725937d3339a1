// Rows in the host's memory, on the call's threads.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "distributed/memory.hpp"
#include "problem/host_workspace.hpp"
#include "problem/refuse.hpp"
#include "rows/element.hpp"
#include "threads/threads.hpp"

namespace regard::distributed {
namespace {

template <class T>
struct Stored;  // elements to and from double
template <>
struct Stored<double> {
  static double load(double x) { return x; }
  static double store(double x) { return x; }
};
template <>
struct Stored<float> {
  static double load(float x) { return x; }
  static float store(double x) { return float(x); }
};
struct Float16 {
  std::uint16_t bits;
};
template <>
struct Stored<Float16> {
  static double load(Float16 x) { return f16_to_f32(x.bits); }
  static Float16 store(double x) { return {f64_to_f16(x)}; }
};
struct Bfloat {
  std::uint16_t bits;
};
template <>
struct Stored<Bfloat> {
  static double load(Bfloat x) { return bf16_to_f32(x.bits); }
  static Bfloat store(double x) { return {f64_to_bf16(x)}; }
};

// A row's elements, and how far apart they are.
struct RowShape {
  std::int64_t count, from_stride, to_stride;
};

template <class From, class To>
void write_row(const void* from_row, void* to_row, const RowShape& row, bool add) {
  const auto* from = static_cast<const From*>(from_row);
  auto* to = static_cast<To*>(to_row);
  for (std::int64_t n = 0; n < row.count; ++n) {
    const double x = Stored<From>::load(from[n * row.from_stride]);
    To& target = to[n * row.to_stride];
    target = Stored<To>::store(add ? Stored<To>::load(target) + x : x);
  }
}

void copy_row(const void* from, void* to, const RowShape& row, std::size_t element) {
  if (row.from_stride == 1 && row.to_stride == 1) {
    std::memcpy(to, from, std::size_t(row.count) * element);
    return;
  }
  for (std::int64_t n = 0; n < row.count; ++n) {
    std::memcpy(static_cast<std::byte*>(to) + n * row.to_stride * std::int64_t(element),
                static_cast<const std::byte*>(from) + n * row.from_stride * std::int64_t(element),
                element);
  }
}

using WriteRow = void (*)(const void*, void*, const RowShape&, bool add);

template <class From>
WriteRow writer_to(Type to) {
  switch (to) {
    case Type::f64:
      return write_row<From, double>;
    case Type::f32:
      return write_row<From, float>;
    case Type::f16:
      return write_row<From, Float16>;
    case Type::bf16:
      return write_row<From, Bfloat>;
    default:
      refuse("type", to, "is no type of rows", Code::internal);
  }
}

class HostMemory final : public Memory {
 public:
  HostMemory(std::size_t bytes, const Run& run) : run_(run), workspace_(bytes, kAlignment, run) {}

  void* stream(Lane) override { return run_.stream; }
  void let_other_wait_for(Lane) override {}

  std::byte* workspace() override { return workspace_.begin(); }
  const void* table(const void* host, std::size_t, void*) override { return host; }
  void zero(void* to, std::size_t bytes) override { std::memset(to, 0, bytes); }
  void require_reachable(const char*, const Tensor&) override {}

  void write(const Tensor& from, const Tensor& to, bool add) override {
    const std::int64_t rows = to.sizes[0] * to.sizes[1] * to.sizes[2], count = to.sizes[3];
    if (rows == 0 || count == 0) return;
    const bool copies = from.type == to.type && !add;
    const WriteRow write_one = from.type == Type::f64   ? writer_to<double>(to.type)
                               : from.type == Type::f32 ? writer_to<float>(to.type)
                                                        : nullptr;
    const RowShape shape{count, from.strides[3], to.strides[3]};
    const std::size_t row_bytes = std::size_t(count) * size_of(to.type);
    const auto write_rows = [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t row = first; row < last; ++row) {
        const void* const source = row_of(from, row);
        void* const target = row_of(to, row);
        copies ? copy_row(source, target, shape, size_of(to.type))
               : write_one(source, target, shape, add);
      }
    };
    // A task is worth more than it costs to begin one.
    const std::int64_t step = std::max<std::int64_t>(1, kTaskBytes / std::int64_t(row_bytes));
    const std::int64_t tasks = divide_up(rows, step);
    if (tasks == 1) return write_rows(0, rows);
    const int workers = int(std::min<std::int64_t>(worker_count(run_), tasks));
    parallel_tasks(tasks, workers, run_, [&](std::int64_t task, int) {
      write_rows(task * step, std::min(rows, (task + 1) * step));
    });
  }

 private:
  static constexpr std::int64_t kTaskBytes = 256 << 10;

  // Row n, where heads change fastest, as in the gathered rows.
  static std::byte* row_of(const Tensor& x, std::int64_t n) {
    const std::int64_t h = n % x.sizes[1], b = n / x.sizes[1] % x.sizes[0],
                       i = n / x.sizes[1] / x.sizes[0];
    const std::int64_t at = b * x.strides[0] + h * x.strides[1] + i * x.strides[2];
    return static_cast<std::byte*>(x.data) + at * std::int64_t(size_of(x.type));
  }

  const Run& run_;
  HostWorkspace workspace_;
};

}  // namespace

std::unique_ptr<Memory> host_memory(std::size_t bytes, const Run& run) {
  return std::make_unique<HostMemory>(bytes, run);
}

}  // namespace regard::distributed
