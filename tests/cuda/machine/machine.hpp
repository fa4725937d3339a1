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

// A tensor map as this machine encodes it: bytes of column, row, head, batch.
struct BoxMap {
  const void* data;
  int64 sizes[4];
  int64 strides[4];
  int box_columns, box_rows;
};

// A product of a warpgroup: of b's tile, and a's tile or a lane's registers.
struct WarpgroupProduct {
  Format format;
  float* d;  // 4 of each block of eight columns
  int blocks;
  const uint32* a;        // registers; or null
  uint32 a_tile, b_tile;  // the low words of descriptors
  bool adds;
  bool by_rows = false;     // a in registers: b's rows are d's columns
  bool strip = false;       // b has rows of 16 bytes, of which each is taken twice
  bool transposed = false;  // the columns of both tiles run along d
};

class Machine {
 public:
  int thread = 0;   // of the cluster: the one that runs
  int64 block = 0;  // the first of the cluster
  int threads = 1;  // of a block

  int block_of(int any_thread) const { return any_thread / threads; }  // of the cluster
  int rank() const { return block_of(thread); }

  // Every thread of the block, or of the warp, must make the same of these calls.
  virtual void sync_block(Where) = 0;
  virtual void sync_cluster(Where) = 0;
  virtual bool any_in_block(bool value, Where) = 0;
  virtual void sync_warp(Where) = 0;
  virtual bool any_in_warp(bool value, Where) = 0;
  virtual uint64 shuffle(uint64 bits, int from, Where) = 0;
  virtual void ldmatrix(uint32 (&m)[4], uint32 row, bool transposed, Where) = 0;
  virtual void multiply(Format, float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1,
                        Where) = 0;

  // The whole of the shared memory, of which the kernel uses so many bytes.
  virtual void* shared_memory(int64 bytes, Where) = 0;
  virtual uint32 shared_address(const void* pointer, Where) = 0;
  // The same place in the memory of a block of the cluster.
  virtual uint32 address_in_cluster(uint32 own, int block, Where) = 0;
  // A pointer to so many bytes, aligned to them.
  virtual void* shared_at(uint32 address, int bytes, Access, Where) = 0;

  virtual void copy(uint32 to, const void* from, int bytes, int valid, bool asynchronous,
                    Where) = 0;
  virtual void cp_async_commit() = 0;
  virtual void cp_async_wait(int pending, Where) = 0;

  // Hopper's: ptx_hopper.cuh.
  virtual int64 block_count() = 0;
  virtual void mbarrier_init(uint32 address, int arrivals, Where) = 0;
  virtual void mbarrier_inval(uint32 address, Where) = 0;
  virtual void arrive(uint32 address, int bytes, Where) = 0;
  virtual void mbarrier_wait(uint32 address, int parity, Where) = 0;
  virtual void bar_sync(int number, int threads, Where) = 0;
  virtual void bar_arrive(int number, int threads, Where) = 0;
  virtual void tma_load(uint32 to, const BoxMap&, const int (&at)[4], uint32 barrier, Where) = 0;
  virtual void bulk_load(uint32 to, const void* from, int bytes, uint32 barrier, Where) = 0;
  virtual void send_bytes(uint32 to, uint32 from, int bytes, uint32 barrier, Where) = 0;
  virtual void tma_store(const BoxMap&, const int (&at)[4], uint32 from, Where) = 0;
  virtual void tma_store_commit() = 0;
  virtual void wait_stores(Where) = 0;
  virtual void stmatrix(uint32 row, const uint32 (&m)[4], Where) = 0;
  virtual void multiply(const WarpgroupProduct&, Where) = 0;
  virtual void wgmma_commit() = 0;
  virtual void wgmma_wait(int pending, Where) = 0;

  virtual void wait_semaphore(const int32* turn, int32 mine, Where) = 0;
  virtual void check_aligned(const void* pointer, int bytes, Where) = 0;

  // Ends the launch.
  [[noreturn]] virtual void fail(const char* reason, Where) = 0;

 protected:
  ~Machine() = default;
};

}  // namespace regard::emulated
