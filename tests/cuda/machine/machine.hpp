// What a kernel may ask of the emulated machine: the boundary between a compiled kernel and its
// host.
#pragma once

#include "semantics/portable.h"

namespace regard::emulated {

// The line of a kernel that asks.
struct Where {
  const char* file = "";
  int line = 0;
};
constexpr Where here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return {file, line};
}

enum class Format { f16, bf16, tf32 };
enum class Access { read, write };

class Machine {
 public:
  int thread = 0;  // of the block: the one that runs
  int64 block = 0;

  // Every thread of the block, or of the warp, must make the same of these calls.
  virtual void sync_block(Where) = 0;
  virtual bool any_in_block(bool value, Where) = 0;
  virtual void sync_warp(Where) = 0;
  virtual bool any_in_warp(bool value, Where) = 0;
  virtual uint64 shuffle(uint64 bits, int from, Where) = 0;
  virtual void load_matrices(uint32 (&m)[4], uint32 row, bool transposed, Where) = 0;
  virtual void multiply(Format, float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1,
                        Where) = 0;

  // The whole of the shared memory, of which the kernel uses so many bytes.
  virtual void* shared_memory(int64 bytes, Where) = 0;
  virtual uint32 shared_address(const void* pointer, Where) = 0;
  // A pointer to so many bytes, aligned to them.
  virtual void* shared_at(uint32 address, int bytes, Access, Where) = 0;

  virtual void copy(uint32 to, const void* from, int bytes, int valid, bool asynchronous,
                    Where) = 0;
  virtual void commit_copies() = 0;
  virtual void wait_copies(int pending, Where) = 0;

  virtual void wait_for_turn(const int32* turn, int32 mine, Where) = 0;
  virtual void check_aligned(const void* pointer, int bytes, Where) = 0;

  // Ends the launch.
  [[noreturn]] virtual void fail(const char* reason, Where) = 0;

 protected:
  ~Machine() = default;
};

}  // namespace regard::emulated
