// The text of an Error in a buffer: where it does not fit, the value is shortened rather than the
// reason. Allocates nothing.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <string>

#include "regard/error.hpp"

namespace regard {

// Writes a text, or its beginning and "...", in at most so many bytes and a zero; a character of
// UTF-8 is not cut in two. Returns how many bytes.
inline std::size_t write_shortened(char* to, std::size_t most, const std::string& text) noexcept {
  constexpr char kMore[] = "...";
  constexpr std::size_t kMoreSize = sizeof kMore - 1;
  std::size_t size = text.size();
  if (size > most) {
    size = most > kMoreSize ? most - kMoreSize : 0;
    while (size > 0 && (static_cast<unsigned char>(text[size]) & 0xc0) == 0x80) --size;
  }
  std::memcpy(to, text.data(), size);
  const std::size_t more = size < text.size() ? std::min(most - size, kMoreSize) : 0;
  std::memcpy(to + size, kMore, more);
  to[size + more] = '\0';
  return size + more;
}

// "argument = value: reason" in `size` bytes. The end of the reason is cut off where it is too long
// for them next to the first letters of the value.
inline void write_text(char* to, std::size_t size, const char* argument,
                       const Error& error) noexcept {
  constexpr std::size_t kLeastOfValue = 64;
  const std::string& value = error.value();
  // A zero in a value, which an exception of the caller's may have, ends the text before its
  // reason.
  const std::size_t before = error.argument().size() + 3 + value.size() + 2;
  const char* const what = error.what();
  const char* const reason = std::strlen(what) >= before ? what + before : "";
  const auto begin = std::min(size - 1, std::size_t(std::snprintf(to, size, "%s = ", argument)));
  const std::size_t room = size - 1 - begin, after = 2 + std::strlen(reason);
  const std::size_t left = std::max(room - std::min(room, after), std::min(room, kLeastOfValue));
  const std::size_t end = begin + write_shortened(to + begin, left, value);
  std::snprintf(to + end, size - end, ": %s", reason);
}

}  // namespace regard
