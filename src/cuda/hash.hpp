// SipHash-2-4 with a 128-bit result, which names and checks kernels on disk.
//
// Jean-Philippe Aumasson, Daniel J. Bernstein: SipHash: a fast short-input PRF (2012).
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace regard::cuda_backend {

struct Hash {
  std::uint64_t low = 0;
  std::uint64_t high = 0;

  bool operator==(const Hash&) const = default;

  std::string text() const {
    constexpr char digits[] = "0123456789abcdef";
    std::string hex;
    for (std::uint64_t half : {low, high}) {
      for (int shift = 60; shift >= 0; shift -= 4) hex += digits[half >> shift & 15];
    }
    return hex;
  }
};

// Takes a text in pieces of any sizes.
class Hasher {
 public:
  void add(std::string_view bytes) {
    count_ += bytes.size();
    const char* from = bytes.data();
    std::size_t left = bytes.size();
    for (; pending_ > 0 && left > 0; ++from, --left) add_byte(*from);
    for (; left >= 8; from += 8, left -= 8) {
      std::uint64_t word;
      std::memcpy(&word, from, 8);
      absorb(word);
    }
    for (; left > 0; ++from, --left) add_byte(*from);
  }

  Hash end() {
    absorb(word_ | count_ << 56);
    v2_ ^= 0xee;
    rounds(4);
    Hash hash{.low = v0_ ^ v1_ ^ v2_ ^ v3_};
    v1_ ^= 0xdd;
    rounds(4);
    hash.high = v0_ ^ v1_ ^ v2_ ^ v3_;
    return hash;
  }

 private:
  void add_byte(char byte) {
    word_ |= std::uint64_t(std::uint8_t(byte)) << (8 * pending_);
    if (++pending_ < 8) return;
    absorb(word_);
    word_ = 0;
    pending_ = 0;
  }
  void absorb(std::uint64_t word) {
    v3_ ^= word;
    rounds(2);
    v0_ ^= word;
  }
  void rounds(int count) {
    for (int i = 0; i < count; ++i) {
      v0_ += v1_, v1_ = std::rotl(v1_, 13) ^ v0_, v0_ = std::rotl(v0_, 32);
      v2_ += v3_, v3_ = std::rotl(v3_, 16) ^ v2_;
      v0_ += v3_, v3_ = std::rotl(v3_, 21) ^ v0_;
      v2_ += v1_, v1_ = std::rotl(v1_, 17) ^ v2_, v2_ = std::rotl(v2_, 32);
    }
  }

  // The key: the project's name and a number, as bytes; who wants collisions owns the cache anyway.
  static constexpr std::uint64_t k0 = 0x6472616765722d31u, k1 = 0x2d6b65726e656c73u;
  std::uint64_t v0_ = k0 ^ 0x736f6d6570736575u, v1_ = k1 ^ 0x646f72616e646f6du ^ 0xee;
  std::uint64_t v2_ = k0 ^ 0x6c7967656e657261u, v3_ = k1 ^ 0x7465646279746573u;
  std::uint64_t word_ = 0;  // bytes that do not fill a word yet
  int pending_ = 0;         // how many
  std::uint64_t count_ = 0;
};

inline Hash hash_of(std::string_view bytes) {
  Hasher hasher;
  hasher.add(bytes);
  return hasher.end();
}

}  // namespace regard::cuda_backend
