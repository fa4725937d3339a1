// The emulated machine's Hopper part: the functions of src/cuda/kernels/ptx_hopper.cuh in plain
// C++, found before that file on the include path.
#pragma once

#include "cuda/kernels/ptx.cuh"
#include "cuda/kernels/tensor_maps.h"

// A kernel that has it takes tensor maps.
extern "C" {
bool regard_emulated_maps = true;
}

namespace regard {

REGARD_DEVICE int uniform(int x, Where where = here()) { return shuffle(x, 0, where); }
REGARD_DEVICE int warpgroup_index() { return thread_index() / 128; }
REGARD_DEVICE int64 block_count() { return machine->block_count(); }

template <int kRegisters>
REGARD_DEVICE void setmaxnreg_dec() {}
template <int kRegisters>
REGARD_DEVICE void setmaxnreg_inc() {}

REGARD_DEVICE void bar_sync(int number, int threads, Where where = here()) {
  machine->bar_sync(number, threads, where);
}
REGARD_DEVICE void bar_arrive(int number, int threads, Where where = here()) {
  machine->bar_arrive(number, threads, where);
}
REGARD_DEVICE void mbarrier_init(SharedAddress barrier, int arrivals, Where where = here()) {
  machine->mbarrier_init(barrier, arrivals, where);
}
REGARD_DEVICE void mbarrier_inval(SharedAddress barrier, Where where = here()) {
  machine->mbarrier_inval(barrier, where);
}
REGARD_DEVICE void fence_mbarrier_init() {}
REGARD_DEVICE void mbarrier_arrive(SharedAddress barrier, Where where = here()) {
  machine->arrive(barrier, 0, where);
}
REGARD_DEVICE void mbarrier_arrive_expect_tx(SharedAddress barrier, int bytes,
                                             Where where = here()) {
  machine->arrive(barrier, bytes, where);
}
REGARD_DEVICE void mbarrier_wait(SharedAddress barrier, int parity, Where where = here()) {
  machine->mbarrier_wait(barrier, parity, where);
}

struct TmaCoords {
  int column, row, head, batch;
};
REGARD_DEVICE void tma_load(SharedAddress to, const TensorMap& map, const TmaCoords& at,
                            SharedAddress barrier, Where where = here()) {
  machine->tma_load(to, reinterpret_cast<const emulated::BoxMap&>(map),
                    {at.column, at.row, at.head, at.batch}, barrier, where);
}
REGARD_DEVICE void tma_store(const TensorMap& map, const TmaCoords& at, SharedAddress from,
                             Where where = here()) {
  machine->tma_store(reinterpret_cast<const emulated::BoxMap&>(map),
                     {at.column, at.row, at.head, at.batch}, from, where);
}
REGARD_DEVICE void tma_store_commit() { machine->tma_store_commit(); }
REGARD_DEVICE void tma_store_wait_read(Where where = here()) { machine->wait_stores(where); }
REGARD_DEVICE void tma_store_wait(Where where = here()) { machine->wait_stores(where); }
REGARD_DEVICE void fence_proxy_async() {}

REGARD_DEVICE SharedAddress address_in_block(SharedAddress x) { return x & 0x3ffff; }
REGARD_DEVICE void mbarrier_arrive_cluster(SharedAddress barrier, Where where = here()) {
  mbarrier_arrive(barrier, where);
}
REGARD_DEVICE void stmatrix(SharedAddress row, const uint32 (&m)[4], Where where = here()) {
  machine->stmatrix(row, m, where);
}

REGARD_DEVICE uint32 descriptor_word(SharedAddress begin, int panel) {
  return address_in_block(begin) >> 4 | uint32(panel >> 4) << 16;
}
REGARD_DEVICE uint64 matrix_descriptor(uint32 word) { return word; }

REGARD_DEVICE void wgmma_fence() {}
REGARD_DEVICE void wgmma_commit() { machine->wgmma_commit(); }
template <int kPending>
REGARD_DEVICE void wgmma_wait(Where where = here()) {
  machine->wgmma_wait(kPending, where);
}
template <class T, int kBlocks>
REGARD_DEVICE void wgmma_ss_nt(float (&d)[kBlocks][4], uint64 a, uint64 b, bool adds,
                               Where where = here()) {
  machine->multiply({.format = kIsF16<T> ? emulated::Format::f16 : emulated::Format::bf16,
                     .d = &d[0][0],
                     .blocks = kBlocks,
                     .a = nullptr,
                     .a_tile = uint32(a),
                     .b_tile = uint32(b),
                     .adds = adds},
                    where);
}
template <class T, int kBlocks>
REGARD_DEVICE void wgmma_rs_nn(float (&d)[kBlocks][4], const uint32 (&a)[4], uint64 b, bool adds,
                               Where where = here()) {
  machine->multiply({.format = kIsF16<T> ? emulated::Format::f16 : emulated::Format::bf16,
                     .d = &d[0][0],
                     .blocks = kBlocks,
                     .a = a,
                     .a_tile = 0,
                     .b_tile = uint32(b),
                     .adds = adds},
                    where);
}
template <int kBlocks>
REGARD_DEVICE void fence_operand(float (&)[kBlocks][4]) {}

REGARD_DEVICE uint32 max_u16x2(uint32 a, uint32 b) {
  const uint32 low = (a & 0xffff) > (b & 0xffff) ? a : b, high = a >> 16 > b >> 16 ? a : b;
  return (low & 0xffff) | (high & 0xffff0000);
}
REGARD_DEVICE uint32 less_u16x2(uint32 x, uint32 limits) {
  return uint32((x & 0xffff) < (limits & 0xffff)) | uint32(x >> 16 < limits >> 16) << 16;
}
template <int kBit>
REGARD_DEVICE uint32 spread_bit_u16x2(uint32 x) {
  return (x >> kBit & 1 ? 0xffff : 0) | (x >> (kBit + 16) & 1 ? 0xffff0000 : 0);
}
REGARD_DEVICE void make_opaque(uint32&) {}
REGARD_DEVICE bool elect_lane() { return lane_index() == 0; }

REGARD_DEVICE void bulk_load(SharedAddress to, const void* from, int bytes, SharedAddress barrier,
                             Where where = here()) {
  machine->bulk_load(to, from, bytes, barrier, where);
}

namespace emulated {
inline constexpr uint64 kStrip = uint64(1) << 63;
}  // namespace emulated

REGARD_DEVICE uint64 unswizzled_descriptor(SharedAddress begin) {
  return emulated::kStrip | address_in_block(begin) >> 4;
}

REGARD_DEVICE SharedAddress of_peer(SharedAddress own) {
  return address_in_cluster(own, cluster_rank() ^ 1);
}
REGARD_DEVICE void bulk_copy_to_peer(SharedAddress to, SharedAddress from, int bytes,
                                     SharedAddress barrier, Where where = here()) {
  machine->send_bytes(of_peer(to), from, bytes, of_peer(barrier), where);
}
template <class T, int kBlocks>
REGARD_DEVICE void wgmma_rs_nt(float (&d)[kBlocks][4], const uint32 (&a)[4], uint64 b, bool adds,
                               Where where = here()) {
  machine->multiply({.format = kIsF16<T> ? emulated::Format::f16 : emulated::Format::bf16,
                     .d = &d[0][0],
                     .blocks = kBlocks,
                     .a = a,
                     .a_tile = 0,
                     .b_tile = uint32(b),
                     .adds = adds,
                     .by_rows = true,
                     .strip = (b & emulated::kStrip) != 0},
                    where);
}
template <class T, int kBlocks>
REGARD_DEVICE void wgmma_ss_tn(float (&d)[kBlocks][4], uint64 a, uint64 b, bool adds,
                               Where where = here()) {
  machine->multiply({.format = kIsF16<T> ? emulated::Format::f16 : emulated::Format::bf16,
                     .d = &d[0][0],
                     .blocks = kBlocks,
                     .a = nullptr,
                     .a_tile = uint32(a),
                     .b_tile = uint32(b),
                     .adds = adds,
                     .transposed = true},
                    where);
}

}  // namespace regard
