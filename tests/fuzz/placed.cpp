// Memory that ends where the tensors end.
#include "tests/fuzz/placed.hpp"

#include <cstring>
#include <utility>

namespace regard::tests {
namespace {

constexpr std::int64_t kMostBytes = 1 << 20;  // of one tensor

bool has_a_rank(const Tensor& t) { return t.rank >= 0 && t.rank <= Tensor::kMaxRank; }

// Calls visit(offset) for each element in row-major order.
template <class Visit>
void each_element(const Tensor& t, Visit visit) {
  if (!t.data || span_of(t).count == 0) return;
  std::int64_t index[Tensor::kMaxRank] = {};
  for (bool more = true; more;) {
    std::int64_t offset = 0;
    for (int axis = 0; axis < t.rank; ++axis) offset += index[axis] * t.strides[axis];
    visit(offset * std::int64_t(size_of(t.type)));
    more = false;
    for (int axis = t.rank - 1; axis >= 0 && !more; --axis) {
      more = ++index[axis] < t.sizes[axis];
      if (!more) index[axis] = 0;
    }
  }
}

}  // namespace

Span span_of(const Tensor& t) {
  const auto size = std::int64_t(size_of(t.type));
  if (!has_a_rank(t)) return {};
  __int128 low = 0, high = size > 0 ? 1 : 0;
  for (int axis = 0; axis < t.rank; ++axis) {
    if (t.sizes[axis] <= 0) return {};
    const __int128 reach = __int128(t.sizes[axis] - 1) * t.strides[axis];
    (reach < 0 ? low : high) += reach;
  }
  if ((high - low) * size > kMostBytes) return {.is_large = true};
  return {.low = std::int64_t(low), .count = std::int64_t(high - low)};
}

double count_of(const Tensor& t) {
  if (!t.data || !has_a_rank(t)) return 0;
  double count = 1;
  for (int axis = 0; axis < t.rank; ++axis) count *= double(t.sizes[axis]);
  return count;
}

std::string elements_of(const Tensor& t) {
  std::string bytes;
  each_element(t, [&](std::int64_t at) {
    bytes.append(static_cast<const char*>(t.data) + at, size_of(t.type));
  });
  return bytes;
}

char* Placed::add(std::int64_t bytes) {
  blocks_.push_back({std::make_unique<char[]>(std::size_t(bytes)), bytes});
  return blocks_.back().memory.get();
}

void Placed::place(Tensor& t, Bytes& in, bool filled) {
  const auto size = std::int64_t(size_of(t.type));
  const Span span = span_of(t);
  t.data = nullptr;
  if (span.is_large || size == 0) return;
  const std::int64_t bytes = span.count * size;
  char* const memory = add(bytes);
  for (std::int64_t n = 0; filled && n < bytes; ++n) {
    // Small numbers of every type, seldom a NaN or an infinity.
    const std::int64_t mixed = n / size * 0x9e3779b9 >> 8;
    const int byte = n % size == size - 1 ? 0x3c + mixed % 3 : mixed % 128;
    memory[n] = char(byte | (mixed % 5 == 0 && n % size == size - 1 ? 0x80 : 0));
  }
  if (filled && bytes > 8 && in.rarely()) std::memset(memory, 0xff, 8);
  t.data = memory - span.low * size;
}

bool Placed::share(Tensor& t, Bytes& in) {
  if (!t.data || blocks_.empty()) return false;
  const auto size = std::int64_t(size_of(t.type));
  const Span span = span_of(t);
  const Block& block = blocks_[std::size_t(in.below(int(blocks_.size() % 256)))];
  const std::int64_t room = block.size / size - span.count;
  if (span.count == 0 || room < 0) return false;
  t.data = block.memory.get() + (in.below(256) % (room + 1) - span.low) * size;
  return true;
}

Tensor Placed::apart(const Tensor& t) {
  Tensor own = t;
  const Span span = span_of(t);
  if (!t.data || span.count == 0) return own;
  const auto size = std::int64_t(size_of(t.type));
  own.data = add(span.count * size) - span.low * size;
  each_element(t, [&](std::int64_t at) {
    std::memcpy(static_cast<char*>(own.data) + at, static_cast<const char*>(t.data) + at,
                size_of(t.type));
  });
  return own;
}

}  // namespace regard::tests
