// Every CUDA built-in and every PTX instruction that kernels use, as functions. docs/kernels.md
// maps each to its instruction.
//
// Kernels contain no other CUDA, so that the tests can run the same texts on an emulator
// (tests/cuda/). REGARD_LEVEL is the config's level: 50 (any chip), 75, 80 or 90.
#pragma once

#include "semantics/portable.h"

#define REGARD_DEVICE __device__ __forceinline__
// Code that hardly ever runs: it is called, and has registers of its own.
#define REGARD_COLD __device__ __noinline__

namespace regard {

// ------------------------------------------------------------------------------------- where am I

REGARD_DEVICE int thread_index() { return threadIdx.x; }
REGARD_DEVICE int lane_index() { return threadIdx.x % 32; }
REGARD_DEVICE int warp_index() { return threadIdx.x / 32; }
REGARD_DEVICE int64 block_index() { return blockIdx.x; }
// Multiprocessors of the device, or a few more.
REGARD_DEVICE int multiprocessor_count() {
  uint32 count;
  asm("mov.u32 %0, %%nsmid;" : "=r"(count));
  return int(count);
}

// -------------------------------------------------------------------------------- other kernels

// Programmatic dependent launch, from compute capability 9.0 on: waits until the kernel before is
// done and its writes are visible.
REGARD_DEVICE void griddepcontrol_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ------------------------------------------------------------------------------------ cooperation

REGARD_DEVICE void sync_block() { __syncthreads(); }
REGARD_DEVICE void sync_warp() { __syncwarp(); }
template <class T>
REGARD_DEVICE T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}
template <class T>
REGARD_DEVICE T shuffle(T value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}
REGARD_DEVICE bool any_in_warp(bool value) { return __any_sync(0xffffffffu, value); }
// Bit n: lane n has true.
REGARD_DEVICE uint32 lanes_with(bool value) { return __ballot_sync(0xffffffffu, value); }
REGARD_DEVICE bool any_in_block(bool value) { return __syncthreads_or(value); }

// --------------------------------------------------------------------------------- shared memory

// The block's dynamic shared memory; swizzled tiles need its alignment.
template <class T>
REGARD_DEVICE T& shared_memory() {
  extern __shared__ __align__(1024) unsigned char regard_shared_memory[];
  return *reinterpret_cast<T*>(regard_shared_memory);
}

using SharedAddress = uint32;
REGARD_DEVICE SharedAddress shared_address(const void* pointer) {
  return uint32(__cvta_generic_to_shared(pointer));
}

struct Bits128 {
  uint32 word[4];
};

REGARD_DEVICE Bits128 load_shared_128(SharedAddress from) {
  Bits128 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.word[0]), "=r"(x.word[1]), "=r"(x.word[2]), "=r"(x.word[3])
               : "r"(from));
  return x;
}
REGARD_DEVICE uint32 load_shared_32(SharedAddress from) {
  uint32 x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(from));
  return x;
}
REGARD_DEVICE uint32 load_shared_16(SharedAddress from) {
  uint16 x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(from));
  return x;
}
REGARD_DEVICE uint32 load_shared_8(SharedAddress from) {
  uint32 x;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(from));
  return x;
}
REGARD_DEVICE void store_shared_128(SharedAddress to, const Bits128& x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.word[0]), "r"(x.word[1]),
               "r"(x.word[2]), "r"(x.word[3])
               : "memory");
}
REGARD_DEVICE void store_shared_64(SharedAddress to, uint32 x, uint32 y) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(x), "r"(y) : "memory");
}
REGARD_DEVICE void store_shared_32(SharedAddress to, uint32 x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

// Four 8 x 8 matrices of 16-bit elements (or 8 x 4 of 32-bit ones). Lane l gives the address of row
// l % 8 of matrix l / 8, and receives word 2 (l % 4) of row l / 4 of each matrix.
REGARD_DEVICE void ldmatrix(uint32 (&m)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}
// The same for the transposed matrices.
REGARD_DEVICE void ldmatrix_trans(uint32 (&m)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}

// ---------------------------------------------------------------------- global to shared memory

// Copies `valid` of kBytes bytes (4, 8 or 16, aligned to kBytes) and clears the rest; reads nothing
// if valid is 0. Asynchronous (cp_async_wait) from level 80 on, else done at once.
template <int kBytes>
REGARD_DEVICE void cp_async(SharedAddress to, const void* from, int valid) {
#if REGARD_LEVEL >= 80
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(valid)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(kBytes),
                 "r"(valid)
                 : "memory");
  }
#else
  const unsigned char* const bytes = static_cast<const unsigned char*>(from);
  if constexpr (kBytes == 16) {
    Bits128 x = {};
    if (valid == 16) {
      const uint4 y = __ldg(reinterpret_cast<const uint4*>(from));
      x = {{y.x, y.y, y.z, y.w}};
    } else {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        if (i < valid) x.word[i / 4] |= uint32(bytes[i]) << (i % 4 * 8);
      }
    }
    store_shared_128(to, x);
  } else {
#pragma unroll
    for (int word = 0; word < kBytes / 4; ++word) {
      uint32 x = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (4 * word + i < valid) x |= uint32(bytes[4 * word + i]) << (i * 8);
      }
      store_shared_32(to + 4 * word, x);
    }
  }
#endif
}

// The same for kBytes bytes that all exist.
template <int kBytes>
REGARD_DEVICE void cp_async(SharedAddress to, const void* from) {
#if REGARD_LEVEL >= 80
  static_assert(kBytes == 16);
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from)
               : "memory");
#else
  cp_async<kBytes>(to, from, kBytes);
#endif
}

// Closes a group of the copies since the last one.
REGARD_DEVICE void cp_async_commit() {
#if REGARD_LEVEL >= 80
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most kPending groups of this thread are in flight.
template <int kPending>
REGARD_DEVICE void cp_async_wait() {
#if REGARD_LEVEL >= 80
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// ---------------------------------------------------------------------------------- global memory

// Brings the cache line to the L1 cache, without waiting for it.
REGARD_DEVICE void prefetch_l1(const void* from) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(from));
}
// Not as constant memory: the kernel before may still write it when this one begins.
REGARD_DEVICE Bits128 load_global_128(const void* from) {
  const uint4 y = *static_cast<const uint4*>(from);
  return {{y.x, y.y, y.z, y.w}};
}
REGARD_DEVICE void store_global_128(void* to, const Bits128& x) {
  *static_cast<uint4*>(to) = make_uint4(x.word[0], x.word[1], x.word[2], x.word[3]);
}
REGARD_DEVICE void store_global_64(void* to, uint32 x, uint32 y) {
  *static_cast<uint2*>(to) = make_uint2(x, y);
}

// *to += x, in any order.
REGARD_DEVICE void red_add(float* to, float x) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
}
REGARD_DEVICE void red_add_2(float* to, float x, float y) {  // 8-byte aligned
#if REGARD_LEVEL >= 90
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
#else
  red_add(to, x);
  red_add(to + 1, y);
#endif
}
REGARD_DEVICE void red_add_4(float* to, const float (&x)[4]) {  // 16-byte aligned
#if REGARD_LEVEL >= 90
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) red_add(to + i, x[i]);
#endif
}

// A semaphore: blocks add in the order of its values. One thread of a block calls these.
REGARD_DEVICE void wait_semaphore(const int32* turn, int32 mine) {
  int32 x;
  do {
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(turn) : "memory");
  } while (x != mine);
}
REGARD_DEVICE void release_semaphore(int32* turn, int32 next) {
  // Not st.release: in some kernels ptxas spills around its predicate.
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  *static_cast<volatile int32*>(turn) = next;
}
REGARD_DEVICE void fence_device() { __threadfence(); }

// Counters in global memory that blocks share, without ordering.
REGARD_DEVICE uint64 load_relaxed(const uint64* number) {
  uint64 x;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(x) : "l"(number) : "memory");
  return x;
}
REGARD_DEVICE uint64 atomic_increment(uint64* number) { return atomicAdd(number, uint64(1)); }
REGARD_DEVICE void atomic_cas(uint64* number, uint64 was, uint64 x) { atomicCAS(number, was, x); }

// Flags between blocks: what a block wrote before it sets one is visible to the block that has
// waited for it. Any thread may call these: set_flag after a barrier of its block, wait_flag before
// one.
REGARD_DEVICE void set_flag(uint64* signal, uint64 value) {
  asm volatile("st.release.gpu.global.b64 [%0], %1;" ::"l"(signal), "l"(value) : "memory");
}
REGARD_DEVICE void wait_flag(const uint64* signal, uint64 value) {
  uint64 x;
  do {
    asm volatile("ld.acquire.gpu.global.b64 %0, [%1];" : "=l"(x) : "l"(signal) : "memory");
  } while (x != value);
}

// --------------------------------------------------------------------------------- matrix products

// d += a b for 16 x 8 of d. Lane l holds rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next.
// a: 16 x 16, four words of two elements; b: 16 x 8, two words.
struct F16;
struct Bf16;
template <class T>
REGARD_DEVICE void mma_m16n8k16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1);
template <>
REGARD_DEVICE void mma_m16n8k16<F16>(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
#if REGARD_LEVEL >= 80
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#elif REGARD_LEVEL >= 75
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b0));
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}
template <>
REGARD_DEVICE void mma_m16n8k16<Bf16>(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
#if REGARD_LEVEL >= 80
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}
// The same for TF32. a: 16 x 8 (four words), b: 8 x 8 (two words).
REGARD_DEVICE void mma_m16n8k8_tf32(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
#if REGARD_LEVEL >= 80
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// ------------------------------------------------------------------------------------------ maths

// The word must have a set bit.
REGARD_DEVICE int lowest_bit(uint32 x) { return __ffs(int(x)) - 1; }
REGARD_DEVICE int leading_zeros(uint32 x) { return __clz(int(x)); }
REGARD_DEVICE int count_bits(uint32 x) { return __popc(x); }

REGARD_DEVICE uint32 bits_of(float x) { return __float_as_uint(x); }
REGARD_DEVICE float float_of(uint32 x) { return __uint_as_float(x); }

// One instruction each: 2 units in the last place; results below 2^-126 become 0.
REGARD_DEVICE float ex2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
REGARD_DEVICE float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The compiler's own, to within 2 units in the last place.
REGARD_DEVICE float exp2_of(float x) { return exp2f(x); }
REGARD_DEVICE double exp2_of(double x) { return exp2(x); }
REGARD_DEVICE float log2_of(float x) { return log2f(x); }
REGARD_DEVICE double log2_of(double x) { return log2(x); }
REGARD_DEVICE float tanh_of(float x) { return tanhf(x); }
REGARD_DEVICE double tanh_of(double x) { return tanh(x); }
REGARD_DEVICE float fma_of(float a, float b, float c) { return __fmaf_rn(a, b, c); }
REGARD_DEVICE double fma_of(double a, double b, double c) { return __fma_rn(a, b, c); }
REGARD_DEVICE float max_of(float a, float b) { return fmaxf(a, b); }
REGARD_DEVICE double max_of(double a, double b) { return fmax(a, b); }
REGARD_DEVICE float magnitude_of(float x) { return fabsf(x); }
REGARD_DEVICE double magnitude_of(double x) { return fabs(x); }
// x if it is above 0, else 0; NaN stays.
REGARD_DEVICE float relu(float x) {
#if REGARD_LEVEL >= 80
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
#else
  return x < 0 ? 0.0f : x;
#endif
}

// Conversions of 16-bit elements, rounded to nearest even; the first argument is the lower half.
template <class T>
REGARD_DEVICE uint32 pack(float low, float high);
template <class T>
REGARD_DEVICE uint16 narrow(float x);
template <class T>
REGARD_DEVICE float widen(uint16 bits);

template <>
REGARD_DEVICE uint32 pack<F16>(float low, float high) {
  uint32 x;
#if REGARD_LEVEL >= 80
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
#else
  uint16 a, b;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(a) : "f"(low));
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(b) : "f"(high));
  x = uint32(a) | uint32(b) << 16;
#endif
  return x;
}
template <>
REGARD_DEVICE uint16 narrow<F16>(float x) {
  uint16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
template <>
REGARD_DEVICE float widen<F16>(uint16 bits) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
  return y;
}
template <>
REGARD_DEVICE uint16 narrow<Bf16>(float x) {
#if REGARD_LEVEL >= 80
  uint16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
#else
  const uint32 bits = bits_of(x);
  if (x != x) return uint16(bits >> 16 | 0x40);
  return uint16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#endif
}
template <>
REGARD_DEVICE uint32 pack<Bf16>(float low, float high) {
#if REGARD_LEVEL >= 80
  uint32 x;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
#else
  return uint32(narrow<Bf16>(low)) | uint32(narrow<Bf16>(high)) << 16;
#endif
}
template <>
REGARD_DEVICE float widen<Bf16>(uint16 bits) {
  return float_of(uint32(bits) << 16);
}

// ---------------------------------------------------------------------------- clusters (level 90)

REGARD_DEVICE int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Waits for all threads of the cluster; their earlier writes to shared memory become visible.
REGARD_DEVICE void sync_cluster() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
}
// The same address in the shared memory of another block of the cluster.
REGARD_DEVICE SharedAddress address_in_cluster(SharedAddress own, int rank) {
  SharedAddress x;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(x) : "r"(own), "r"(rank));
  return x;
}
REGARD_DEVICE Bits128 load_cluster_128(SharedAddress from) {
  Bits128 x;
  asm volatile("ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.word[0]), "=r"(x.word[1]), "=r"(x.word[2]), "=r"(x.word[3])
               : "r"(from)
               : "memory");
  return x;
}
REGARD_DEVICE void load_cluster_64(SharedAddress from, uint32& x, uint32& y) {
  asm volatile("ld.shared::cluster.v2.b32 {%0, %1}, [%2];"
               : "=r"(x), "=r"(y)
               : "r"(from)
               : "memory");
}

}  // namespace regard
