// SipHash-2-4 with 128 bits of result: what names and checks kernels on disk.
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

inline Hash hash_of(std::string_view bytes) {
  // The key: the project's name and a number, as bytes; who wants collisions owns the cache anyway.
  constexpr std::uint64_t k0 = 0x6472616765722d31u, k1 = 0x2d6b65726e656c73u;
  std::uint64_t v0 = k0 ^ 0x736f6d6570736575u, v1 = k1 ^ 0x646f72616e646f6du ^ 0xee;
  std::uint64_t v2 = k0 ^ 0x6c7967656e657261u, v3 = k1 ^ 0x7465646279746573u;
  const auto rounds = [&](int count) {
    for (int i = 0; i < count; ++i) {
      v0 += v1, v1 = std::rotl(v1, 13) ^ v0, v0 = std::rotl(v0, 32);
      v2 += v3, v3 = std::rotl(v3, 16) ^ v2;
      v0 += v3, v3 = std::rotl(v3, 21) ^ v0;
      v2 += v1, v1 = std::rotl(v1, 17) ^ v2, v2 = std::rotl(v2, 32);
    }
  };
  const auto absorb = [&](std::uint64_t word) {
    v3 ^= word;
    rounds(2);
    v0 ^= word;
  };
  const char* from = bytes.data();
  std::size_t left = bytes.size();
  for (; left >= 8; from += 8, left -= 8) {
    std::uint64_t word;
    std::memcpy(&word, from, 8);
    absorb(word);
  }
  std::uint64_t last = std::uint64_t(bytes.size()) << 56;
  for (std::size_t i = 0; i < left; ++i) last |= std::uint64_t(std::uint8_t(from[i])) << (8 * i);
  absorb(last);
  v2 ^= 0xee;
  rounds(4);
  Hash hash{.low = v0 ^ v1 ^ v2 ^ v3};
  v1 ^= 0xdd;
  rounds(4);
  hash.high = v0 ^ v1 ^ v2 ^ v3;
  return hash;
}

}  // namespace regard::cuda_backend
