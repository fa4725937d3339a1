// Memory that the caller gives for a call's workspace, or for the maps of a Mask.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>
#include <string>

#include "problem/refuse.hpp"
#include "regard/regard.hpp"

namespace regard {

// What an Error calls the members of the memory.
struct MemoryNames {
  const char* data = "workspace.data";
  const char* size = "workspace.size";
};

inline bool is_given(const Workspace& memory) { return memory.data || memory.size > 0; }

// Error unless so many bytes were given.
inline void check_given(const Workspace& memory, std::int64_t bytes,
                        const MemoryNames& names = {}) {
  if (memory.size < std::size_t(bytes)) {
    refuse(names.size, memory.size, "must be at least " + std::to_string(bytes) + " bytes");
  }
  require(memory.data != nullptr, names.data, "null", "must not be null next to a size");
}

// What the caller's allocator returns. Error if that is nothing, or it throws.
inline void* allocated_by(const Allocator& allocator, std::size_t bytes) {
  void* data = nullptr;
  try {
    data = allocator.allocate(allocator.self, bytes);
  } catch (const std::bad_alloc&) {
  } catch (const std::exception& error) {
    refuse("allocator", error.what(), "it threw this exception", Code::out_of_memory);
  } catch (...) {
    refuse("allocator", "an exception of unknown type", "it threw this", Code::out_of_memory);
  }
  if (data) return data;
  refuse("allocator", bytes, "returned no memory for so many bytes", Code::out_of_memory);
}

}  // namespace regard
