// A call of the public API, made of bytes: sizes, strides, types and options, valid or not.
#pragma once

#include <cstddef>
#include <cstdint>

namespace regard::tests {

// Hands out the bytes one by one; zeros after their end.
class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

  std::uint8_t next() { return at_ < size_ ? data_[at_++] : 0; }
  bool rarely() { return next() % 16 == 15; }
  std::int64_t below(int bound) { return next() % bound; }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
  std::size_t at_ = 0;
};

// Makes the call. A tensor's data ends at memory that nobody may touch.
void call_of(Bytes bytes);

}  // namespace regard::tests
