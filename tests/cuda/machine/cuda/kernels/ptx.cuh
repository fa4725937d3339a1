// The emulated machine that the tests run kernels on: the functions of src/cuda/kernels/ptx.cuh
// in plain C++, found before that file on the include path. The compiler's own functions stand for
// <cmath>, which takes a third of a kernel's compilation to read.
//
// What costs a thread its turn, and what is checked, goes to Machine (machine.hpp).
#pragma once

#include <cstring>

#include "machine.hpp"
#include "semantics/portable.h"

#define REGARD_DEVICE inline
#define REGARD_COLD inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#ifndef REGARD_CLUSTER
#define REGARD_CLUSTER 1
#endif

// The host sets it before the first launch. A kernel is one translation unit.
extern "C" {
regard::emulated::Machine* regard_emulated_machine = nullptr;
int regard_emulated_cluster = REGARD_CLUSTER;
}

namespace regard {

using emulated::here;
using emulated::Where;
static emulated::Machine*& machine = regard_emulated_machine;

// ------------------------------------------------------------------------------------- where am I

REGARD_DEVICE int thread_index() { return machine->thread % machine->threads; }
REGARD_DEVICE int lane_index() { return machine->thread % 32; }
REGARD_DEVICE int warp_index() { return thread_index() / 32; }
REGARD_DEVICE int64 block_index() { return machine->block + machine->rank(); }
REGARD_DEVICE int multiprocessor_count() { return 64; }

// -------------------------------------------------------------------------------- other kernels

// A launch is over before the next one begins.
REGARD_DEVICE void griddepcontrol_wait() {}

// ------------------------------------------------------------------------------------ cooperation

REGARD_DEVICE void sync_block(Where where = here()) { machine->sync_block(where); }
REGARD_DEVICE void sync_warp(Where where = here()) { machine->sync_warp(where); }
template <class T>
REGARD_DEVICE T shuffle(T value, int lane, Where where = here()) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  uint64 bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = machine->shuffle(bits, lane & 31, where);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
template <class T>
REGARD_DEVICE T shuffle_xor(T value, int mask, Where where = here()) {
  return shuffle(value, lane_index() ^ mask, where);
}
REGARD_DEVICE bool any_in_warp(bool value, Where where = here()) {
  return machine->any_in_warp(value, where);
}
REGARD_DEVICE int lowest_bit(uint32 x) { return __builtin_ctz(x); }
REGARD_DEVICE uint32 lanes_with(bool value, Where where = here()) {
  uint32 lanes = 0;
  for (int lane = 0; lane < 32; ++lane) lanes |= shuffle(uint32(value), lane, where) << lane;
  return lanes;
}
REGARD_DEVICE bool any_in_block(bool value, Where where = here()) {
  return machine->any_in_block(value, where);
}

// --------------------------------------------------------------------------------- shared memory

template <class T>
REGARD_DEVICE T& shared_memory(Where where = here()) {
  return *static_cast<T*>(machine->shared_memory(sizeof(T), where));
}

using SharedAddress = uint32;
REGARD_DEVICE SharedAddress shared_address(const void* pointer, Where where = here()) {
  return machine->shared_address(pointer, where);
}

struct Bits128 {
  uint32 word[4];
};

REGARD_DEVICE Bits128 load_shared_128(SharedAddress from, Where where = here()) {
  Bits128 x;
  std::memcpy(&x, machine->shared_at(from, 16, emulated::Access::read, where), 16);
  return x;
}
REGARD_DEVICE uint32 load_shared_32(SharedAddress from, Where where = here()) {
  uint32 x;
  std::memcpy(&x, machine->shared_at(from, 4, emulated::Access::read, where), 4);
  return x;
}
REGARD_DEVICE uint32 load_shared_16(SharedAddress from, Where where = here()) {
  uint16 x;
  std::memcpy(&x, machine->shared_at(from, 2, emulated::Access::read, where), 2);
  return x;
}
REGARD_DEVICE uint32 load_shared_8(SharedAddress from, Where where = here()) {
  uint8 x;
  std::memcpy(&x, machine->shared_at(from, 1, emulated::Access::read, where), 1);
  return x;
}
REGARD_DEVICE void store_shared_128(SharedAddress to, const Bits128& x, Where where = here()) {
  std::memcpy(machine->shared_at(to, 16, emulated::Access::write, where), &x, 16);
}
REGARD_DEVICE void store_shared_64(SharedAddress to, uint32 x, uint32 y, Where where = here()) {
  const uint32 words[2] = {x, y};
  std::memcpy(machine->shared_at(to, 8, emulated::Access::write, where), words, 8);
}
REGARD_DEVICE void store_shared_32(SharedAddress to, uint32 x, Where where = here()) {
  std::memcpy(machine->shared_at(to, 4, emulated::Access::write, where), &x, 4);
}

REGARD_DEVICE void ldmatrix(uint32 (&m)[4], SharedAddress row, Where where = here()) {
  machine->ldmatrix(m, row, false, where);
}
REGARD_DEVICE void ldmatrix_trans(uint32 (&m)[4], SharedAddress row, Where where = here()) {
  machine->ldmatrix(m, row, true, where);
}

// ---------------------------------------------------------------------- global to shared memory

template <int kBytes>
REGARD_DEVICE void cp_async(SharedAddress to, const void* from, int valid, Where where = here()) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  machine->copy(to, from, kBytes, valid, REGARD_LEVEL >= 80, where);
}
template <int kBytes>
REGARD_DEVICE void cp_async(SharedAddress to, const void* from, Where where = here()) {
  machine->copy(to, from, kBytes, kBytes, REGARD_LEVEL >= 80, where);
}
REGARD_DEVICE void cp_async_commit() { machine->cp_async_commit(); }
template <int kPending>
REGARD_DEVICE void cp_async_wait(Where where = here()) {
  machine->cp_async_wait(kPending, where);
}

// ---------------------------------------------------------------------------------- global memory

REGARD_DEVICE void prefetch_l1(const void*) {}
REGARD_DEVICE Bits128 load_global_128(const void* from, Where where = here()) {
  machine->check_aligned(from, 16, where);
  Bits128 x;
  std::memcpy(&x, from, 16);
  return x;
}
REGARD_DEVICE void store_global_128(void* to, const Bits128& x, Where where = here()) {
  machine->check_aligned(to, 16, where);
  std::memcpy(to, &x, 16);
}
REGARD_DEVICE void store_global_64(void* to, uint32 x, uint32 y, Where where = here()) {
  machine->check_aligned(to, 8, where);
  const uint32 words[2] = {x, y};
  std::memcpy(to, words, 8);
}

REGARD_DEVICE void red_add(float* to, float x, Where where = here()) {
  machine->check_aligned(to, 4, where);
  *to += x;
}
REGARD_DEVICE void red_add_2(float* to, float x, float y, Where where = here()) {
  machine->check_aligned(to, 8, where);
  to[0] += x;
  to[1] += y;
}
REGARD_DEVICE void red_add_4(float* to, const float (&x)[4], Where where = here()) {
  machine->check_aligned(to, 16, where);
  for (int i = 0; i < 4; ++i) to[i] += x[i];
}

REGARD_DEVICE void wait_semaphore(const int32* turn, int32 mine, Where where = here()) {
  machine->wait_semaphore(turn, mine, where);
}
REGARD_DEVICE void release_semaphore(int32* turn, int32 next) { *turn = next; }
REGARD_DEVICE void fence_device() {}
REGARD_DEVICE uint64 load_relaxed(const uint64* number) { return *number; }
REGARD_DEVICE uint64 atomic_increment(uint64* number) { return (*number)++; }
REGARD_DEVICE void atomic_cas(uint64* number, uint64 was, uint64 x) {
  if (*number == was) *number = x;
}
REGARD_DEVICE void set_flag(uint64* signal, uint64 value) { *signal = value; }
REGARD_DEVICE void wait_flag(const uint64* signal, uint64 value, Where where = here()) {
  if (*signal != value) machine->fail("waits for a signal that never comes: a deadlock", where);
}

// --------------------------------------------------------------------------------- matrix products

struct F16;
struct Bf16;
template <class T>
inline constexpr bool kIsF16 = false;
template <>
inline constexpr bool kIsF16<F16> = true;

template <class T>
REGARD_DEVICE void mma_m16n8k16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1,
                                Where where = here()) {
  if (REGARD_LEVEL < (kIsF16<T> ? 75 : 80)) machine->fail("no such product at this level", where);
  machine->multiply(kIsF16<T> ? emulated::Format::f16 : emulated::Format::bf16, d, a, b0, b1,
                    where);
}
REGARD_DEVICE void mma_m16n8k8_tf32(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1,
                                    Where where = here()) {
  if (REGARD_LEVEL < 80) machine->fail("no such product at this level", where);
  machine->multiply(emulated::Format::tf32, d, a, b0, b1, where);
}

// ------------------------------------------------------------------------------------------ maths

REGARD_DEVICE int leading_zeros(uint32 x) { return __builtin_clz(x); }
REGARD_DEVICE int count_bits(uint32 x) {  // images link no library that counts
  int count = 0;
  for (; x != 0; x &= x - 1) ++count;
  return count;
}
REGARD_DEVICE uint32 bits_of(float x) { return __builtin_bit_cast(uint32, x); }
REGARD_DEVICE float float_of(uint32 x) { return __builtin_bit_cast(float, x); }

namespace emulated {
// Numbers below 2^-126 count as 0, as ".ftz" says.
REGARD_DEVICE float without_subnormals(float x) {
  return (bits_of(x) & 0x7f800000) == 0 ? float_of(bits_of(x) & 0x80000000) : x;
}
}  // namespace emulated

REGARD_DEVICE float ex2_approx(float x) {
  return emulated::without_subnormals(__builtin_exp2f(emulated::without_subnormals(x)));
}
REGARD_DEVICE float rcp_approx(float x) {
  return emulated::without_subnormals(1 / emulated::without_subnormals(x));
}

REGARD_DEVICE float exp2_of(float x) { return __builtin_exp2f(x); }
REGARD_DEVICE double exp2_of(double x) { return __builtin_exp2(x); }
REGARD_DEVICE float log2_of(float x) { return __builtin_log2f(x); }
REGARD_DEVICE double log2_of(double x) { return __builtin_log2(x); }
REGARD_DEVICE float tanh_of(float x) { return __builtin_tanhf(x); }
REGARD_DEVICE double tanh_of(double x) { return __builtin_tanh(x); }
REGARD_DEVICE float fma_of(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
REGARD_DEVICE double fma_of(double a, double b, double c) { return __builtin_fma(a, b, c); }
REGARD_DEVICE float max_of(float a, float b) { return __builtin_fmaxf(a, b); }
REGARD_DEVICE double max_of(double a, double b) { return __builtin_fmax(a, b); }
REGARD_DEVICE float magnitude_of(float x) { return __builtin_fabsf(x); }
REGARD_DEVICE double magnitude_of(double x) { return __builtin_fabs(x); }
REGARD_DEVICE float relu(float x) { return x > 0 || x != x ? x : 0.0f; }

namespace emulated {

REGARD_DEVICE uint16 f16_of(float x) {
  const uint32 sign = bits_of(x) >> 16 & 0x8000, size = bits_of(x) & 0x7fffffff;
  if (size > 0x7f800000) return 0x7fff;
  if (size >= 0x47800000) return uint16(sign | 0x7c00);
  if (size < 0x38800000) {  // below 2^-14: 1/2 has the same last place
    return uint16(sign | (bits_of(float_of(size) + 0.5f) - bits_of(0.5f)));
  }
  return uint16(sign | (size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13);
}
REGARD_DEVICE float of_f16(uint16 bits) {
  const uint32 sign = uint32(bits & 0x8000) << 16, size = uint32(bits & 0x7fff) << 13;
  if (size >= 0x0f800000) return float_of(sign | 0x70000000 | size);
  return float_of(sign | bits_of(float_of(size) * 0x1p112f));
}
REGARD_DEVICE uint16 bf16_of(float x) {
  const uint32 bits = bits_of(x);
  if (x != x) return 0x7fff;
  return uint16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace emulated

template <class T>
REGARD_DEVICE uint16 narrow(float x) {
  return kIsF16<T> ? emulated::f16_of(x) : emulated::bf16_of(x);
}
template <class T>
REGARD_DEVICE uint32 pack(float low, float high) {
  return uint32(narrow<T>(low)) | uint32(narrow<T>(high)) << 16;
}
template <class T>
REGARD_DEVICE float widen(uint16 bits) {
  return kIsF16<T> ? emulated::of_f16(bits) : float_of(uint32(bits) << 16);
}

REGARD_DEVICE int cluster_rank() { return machine->rank(); }
REGARD_DEVICE void sync_cluster(Where where = here()) { machine->sync_cluster(where); }
REGARD_DEVICE SharedAddress address_in_cluster(SharedAddress own, int rank, Where where = here()) {
  return machine->address_in_cluster(own, rank, where);
}
REGARD_DEVICE Bits128 load_cluster_128(SharedAddress from, Where where = here()) {
  return load_shared_128(from, where);
}
REGARD_DEVICE void load_cluster_64(SharedAddress from, uint32& x, uint32& y, Where where = here()) {
  uint32 words[2];
  std::memcpy(words, machine->shared_at(from, 8, emulated::Access::read, where), 8);
  x = words[0];
  y = words[1];
}

}  // namespace regard
