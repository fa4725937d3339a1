// Memory that ends at a page nobody may touch, and arrays in it with known values between elements.
#include "tests/cpu/guarded.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>

#include "tests/cpu/half.hpp"

namespace regard::tests {
namespace {

constexpr unsigned char kBetween = 0xff;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::uint16_t to_bf16(double x) {
  // Try both neighbours: the nearer wins, and a tie goes to the even one.
  if (std::isnan(x)) return 0x7fc0;
  const auto value = [](std::uint16_t bits) {
    return double(std::bit_cast<float>(std::uint32_t(bits) << 16));
  };
  const float near = float(x);
  const auto low = std::uint16_t(std::bit_cast<std::uint32_t>(near) >> 16);
  std::uint16_t best = low;
  for (int step = -1; step <= 1; ++step) {
    const auto candidate = std::uint16_t(low + step);
    if (!std::isfinite(value(candidate))) continue;
    const double old_error = std::fabs(value(best) - x), error = std::fabs(value(candidate) - x);
    if (error < old_error || (error == old_error && candidate % 2 == 0)) best = candidate;
  }
  return best;
}

}  // namespace

Guarded::Guarded(std::size_t size) : size_(size) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t usable = (size + 64 + page - 1) / page * page;
  mapped_ = usable + page;
  void* const mapping = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED || mprotect(static_cast<char*>(mapping) + usable, page, PROT_NONE)) {
    std::perror("guarded memory");
    std::abort();
  }
  mapping_ = static_cast<char*>(mapping);
  data_ = mapping_ + usable - size;
  std::memset(data_ - 64, kBetween, 64);
}

Guarded::~Guarded() { release(); }

Guarded::Guarded(Guarded&& other) noexcept { *this = std::move(other); }

Guarded& Guarded::operator=(Guarded&& other) noexcept {
  std::swap(mapping_, other.mapping_);
  std::swap(mapped_, other.mapped_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

void Guarded::release() {
  if (mapping_) munmap(mapping_, mapped_);
  mapping_ = nullptr;
}

bool Guarded::lead_intact() const {
  for (int i = 1; i <= 64; ++i) {
    if (static_cast<unsigned char>(data_[-i]) != kBetween) return false;
  }
  return true;
}

double rounded(Type type, double x) {
  switch (type) {
    case Type::f32:
      return float(x);
    case Type::f16:
      return double(static_cast<Half>(x));
    case Type::bf16:
      return std::bit_cast<float>(std::uint32_t(to_bf16(x)) << 16);
    default:
      return x;
  }
}

Array::Array(Type type, std::vector<std::int64_t> sizes, bool gaps) {
  tensor_.type = type;
  tensor_.rank = static_cast<int>(sizes.size());
  std::copy(sizes.begin(), sizes.end(), tensor_.sizes.begin());
  std::vector<int> order;  // innermost first
  for (int axis = tensor_.rank - 1; axis >= 0; --axis) order.push_back(axis);
  if (gaps && tensor_.rank == 4) std::swap(order[1], order[2]);
  std::int64_t stride = 1, span = 1;
  for (int axis : order) {
    tensor_.strides[axis] = stride;
    span += (sizes[axis] > 0 ? sizes[axis] - 1 : 0) * stride;
    stride = stride * (sizes[axis] > 0 ? sizes[axis] : 1) + (gaps && tensor_.rank > 1 ? 3 : 0);
  }
  if (count() == 0) span = 0;
  memory_ = Guarded(static_cast<std::size_t>(span) * size_of(type));
  std::memset(memory_.data(), kBetween, memory_.size());
  tensor_.data = memory_.data();
}

std::int64_t Array::count() const {
  std::int64_t count = tensor_.given() ? 1 : 0;
  for (int axis = 0; axis < tensor_.rank; ++axis) count *= tensor_.sizes[axis];
  return count;
}

std::int64_t Array::row_size() const { return tensor_.sizes[tensor_.rank - 1]; }

std::int64_t Array::offset(std::int64_t n) const {
  std::int64_t offset = 0;
  for (int axis = tensor_.rank - 1; axis >= 0; --axis) {
    offset += n % tensor_.sizes[axis] * tensor_.strides[axis];
    n /= tensor_.sizes[axis];
  }
  return offset;
}

std::int64_t Array::index(std::array<std::int64_t, 4> at) const {
  std::int64_t n = 0;
  for (int axis = 0; axis < tensor_.rank; ++axis) n = n * tensor_.sizes[axis] + at[axis];
  return n;
}

double Array::get(std::int64_t n) const {
  const char* const p = memory_.data() + offset(n) * std::int64_t(size_of(tensor_.type));
  const auto as = [p](auto value) {
    std::memcpy(&value, p, sizeof value);
    return value;
  };
  switch (tensor_.type) {
    case Type::f64:
      return as(double{});
    case Type::f32:
      return as(float{});
    case Type::f16:
      return double(as(Half{}));
    case Type::bf16:
      return std::bit_cast<float>(std::uint32_t(as(std::uint16_t{})) << 16);
    case Type::i32:
      return as(std::int32_t{});
    default:
      return as(std::uint8_t{});
  }
}

void Array::set(std::int64_t n, double x) const {
  char* const p = memory_.data() + offset(n) * std::int64_t(size_of(tensor_.type));
  const auto put = [p](auto value) { std::memcpy(p, &value, sizeof value); };
  switch (tensor_.type) {
    case Type::f64:
      return put(x);
    case Type::f32:
      return put(float(x));
    case Type::f16:
      return put(static_cast<Half>(x));
    case Type::bf16:
      return put(to_bf16(x));
    case Type::i32:
      return put(std::int32_t(x));
    default:
      return put(std::uint8_t(x));
  }
}

void Array::fill(double x) const {
  for (std::int64_t n = 0; n < count(); ++n) set(n, x);
}

std::string Array::bytes() const { return {memory_.data(), memory_.size()}; }

bool Array::gaps_intact() const {
  std::string expected(memory_.size(), char(kBetween));
  const auto size = std::int64_t(size_of(tensor_.type));
  for (std::int64_t n = 0; n < count(); ++n) {
    std::memcpy(expected.data() + offset(n) * size, memory_.data() + offset(n) * size, size);
  }
  return memory_.lead_intact() && expected == bytes();
}

double row_error(const Array& got, const Array& want, double natural) {
  const std::int64_t size = want.count() ? want.row_size() : 1, rows = want.count() / size;
  std::vector<double> norms(rows), errors(rows);
  double all = 0;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t d = 0; d < size; ++d) {
      const double x = got.get(r * size + d), y = want.get(r * size + d);
      if ((std::isnan(x) && std::isnan(y)) || x == y) {
        if (std::isfinite(y)) norms[r] += y * y;
        continue;
      }
      if (!std::isfinite(x) || !std::isfinite(y)) return kInfinity;
      norms[r] += y * y;
      errors[r] += (x - y) * (x - y);
    }
    all += norms[r];
  }
  double worst = 0;
  const double least = std::fmax(all / double(rows), natural * natural * double(size));
  for (std::int64_t r = 0; r < rows; ++r) {
    if (errors[r] > 0) worst = std::fmax(worst, std::sqrt(errors[r] / std::fmax(norms[r], least)));
  }
  return worst;
}

}  // namespace regard::tests
