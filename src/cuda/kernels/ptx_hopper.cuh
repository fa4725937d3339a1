// What ptx.cuh is, for Hopper (compute capability 9.0): mbarriers, TMA, wgmma, setmaxnreg.
#pragma once

#include "cuda/kernels/ptx.cuh"
#include "cuda/kernels/tensor_maps.h"
#include "cuda/kernels/wgmma_gradient_shapes.cuh"
#include "cuda/kernels/wgmma_shapes.cuh"

namespace regard {

// ---------------------------------------------------------------------------------- where am I

// Makes a value that is equal in the whole warp known as such to the compiler: descriptors of wgmma
// must be in uniform registers.
REGARD_DEVICE int uniform(int x) { return shuffle(x, 0); }
// True for one lane of a warp, all of whose lanes call this.
REGARD_DEVICE bool elect_lane() {
  uint32 elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(elected));
  return elected != 0;
}
REGARD_DEVICE int warpgroup_index() { return uniform(int(threadIdx.x / 128)); }
REGARD_DEVICE int64 block_count() { return gridDim.x; }

// ------------------------------------------------------------------------- registers of a role

// Called by a whole warpgroup: sets how many registers each of its threads has.
template <int kRegisters>
REGARD_DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
REGARD_DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ------------------------------------------------------------------------------------ barriers

// Named barriers 1 to 15, for a number of threads in whole warps.
REGARD_DEVICE void bar_sync(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Arrives at one, and does not wait.
REGARD_DEVICE void bar_arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
// mbarriers in shared memory, 8 bytes each. A phase completes when all arrivals and all announced
// bytes have come.
REGARD_DEVICE void mbarrier_init(SharedAddress barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// After mbarrier_init, by the same thread; a barrier of the block follows.
REGARD_DEVICE void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Its memory may become another barrier.
REGARD_DEVICE void mbarrier_inval(SharedAddress barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
REGARD_DEVICE void mbarrier_arrive(SharedAddress barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// The same, and announces bytes that this phase waits for.
REGARD_DEVICE void mbarrier_arrive_expect_tx(SharedAddress barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Waits for the end of the phase of this parity. The first phase has parity 0; before it, parity 1
// counts as over.
REGARD_DEVICE void mbarrier_wait(SharedAddress barrier, int parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over: }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---------------------------------------------------------------------------------------- TMA

// The coordinates of a tile's first element in its tensor.
struct TmaCoords {
  int column, row, head, batch;
};

// Elements outside the tensor become 0. `barrier` counts the bytes of the whole tile.
REGARD_DEVICE void tma_load(SharedAddress to, const TensorMap& map, const TmaCoords& at,
                            SharedAddress barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(&map), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch), "r"(barrier)
      : "memory");
}
// Elements outside the tensor are not written, except in the 16 bytes in which a row ends.
REGARD_DEVICE void tma_store(const TensorMap& map, const TmaCoords& at, SharedAddress from) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group "
      "[%0, {%1, %2, %3, %4}], [%5];" ::"l"(&map),
      "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch), "r"(from)
      : "memory");
}
// Closes a group of this thread's stores; waits until closed groups have been read.
REGARD_DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
REGARD_DEVICE void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// Until what was stored is in memory.
REGARD_DEVICE void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Makes this thread's writes to shared memory visible to TMA and wgmma.
REGARD_DEVICE void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ------------------------------------------------------------------------------------- clusters

// An address without the block's bits, as descriptors need it.
#ifdef REGARD_CLUSTER
inline constexpr uint32 kWithinBlock = 0x3ffff;
#else
inline constexpr uint32 kWithinBlock = ~0u;
#endif
REGARD_DEVICE SharedAddress address_in_block(SharedAddress x) { return x & kWithinBlock; }
// Arrives at a barrier of another block, without ordering (relaxed): a release would wait for
// everything that the thread has written to memory. The data in question is in registers, or in
// shared memory already.
REGARD_DEVICE void mbarrier_arrive_cluster(SharedAddress barrier) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier)
               : "memory");
}

// The same address in the other block of a cluster of two.
REGARD_DEVICE SharedAddress of_peer(SharedAddress own) {
  return address_in_cluster(own, cluster_rank() ^ 1);
}
// A bulk copy to the same address in the other block, whose barrier counts the bytes.
REGARD_DEVICE void bulk_copy_to_peer(SharedAddress to, SharedAddress from, int bytes,
                                     SharedAddress barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(of_peer(to)),
      "r"(from), "r"(bytes), "r"(of_peer(barrier))
      : "memory");
}

// Four 8 x 8 matrices of 16-bit elements, as ldmatrix reads them.
REGARD_DEVICE void stmatrix(SharedAddress row, const uint32 (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
               : "memory");
}

// ---------------------------------------------------------------------- products of a warpgroup

// The matrix descriptor of a tile in shared memory with the 128-byte swizzle. Groups of eight rows
// are 1024 bytes apart; `panel` is the distance of column panels, for operands that are not
// transposed. The low word counts units of 16 bytes, and may be moved within the tile by adding to
// it.
REGARD_DEVICE uint32 descriptor_word(SharedAddress begin, int panel) {
  return (address_in_block(begin) >> 4) | uint32(panel >> 4) << 16;
}
REGARD_DEVICE uint64 matrix_descriptor(uint32 word) { return uint64(0x40000040u) << 32 | word; }

// wgmma is asynchronous: fence, products, commit, then wait until at most kPending committed groups
// are still running. Meanwhile nothing may touch their registers.
REGARD_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
REGARD_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
REGARD_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// d = (adds ? d : 0) + a b^T over 16 columns of both tiles.
template <class T, int kBlocks>
REGARD_DEVICE void wgmma_ss_nt(float (&d)[kBlocks][4], uint64 a, uint64 b, bool adds) {
  WgmmaShape<T, kBlocks>::ss_nt(d, a, b, adds);
}
// d = (adds ? d : 0) + a b over 16 rows of b; a: the same columns of a warp's 16 rows.
template <class T, int kBlocks>
REGARD_DEVICE void wgmma_rs_nn(float (&d)[kBlocks][4], const uint32 (&a)[4], uint64 b, bool adds) {
  WgmmaShape<T, kBlocks>::rs_nn(d, a, b, adds);
}

// Reads and writes of d are not moved across this.
template <int kBlocks>
REGARD_DEVICE void fence_operand(float (&d)[kBlocks][4]) {
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(d[n][e])::"memory");
  }
}

// -------------------------------------------------------------------------- halves of a word

// The larger of each two unsigned halves.
REGARD_DEVICE uint32 max_u16x2(uint32 a, uint32 b) {
  uint32 x;
  asm("max.u16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
  return x;
}
// Each half of the result is 1 if x is below the limit there, else 0.
REGARD_DEVICE uint32 less_u16x2(uint32 x, uint32 limits) {
  uint32 negative;
  asm("add.u16x2 %0, %1, %2;" : "=r"(negative) : "r"(~limits), "r"(0x00010001));
  uint32 below;
  asm("{.reg .b32 least, missing;\n"
      "min.u16x2 least, %1, %2;\n"
      "add.u16x2 missing, least, %3;\n"  // 0, or by how much it is below, as a negative number
      "min.u16x2 %0, missing, %4; }"
      : "=r"(below)
      : "r"(x), "r"(limits), "r"(negative), "r"(0x00010001));
  return below;
}
// Each half all ones if its bit kBit is one, else 0.
template <int kBit>
REGARD_DEVICE uint32 spread_bit_u16x2(uint32 x) {
  static_assert(kBit >= 0 && kBit < 16);
  constexpr uint32 kSigns = kBit >= 8 ? 0xbb99 : 0xaa88;  // of bytes 1 and 3, or 0 and 2, spread
  uint32 halves;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(halves) : "r"(x << (7 - kBit % 8)), "n"(kSigns));
  return halves;
}

// --------------------------------------------------------------------------- the backward pass

// Hides where x comes from, so that the compiler does not keep values derived from it in registers
// across a loop.
REGARD_DEVICE void make_opaque(uint32& x) { asm volatile("" : "+r"(x)); }

// A bulk copy without a tensor map: a multiple of 16 bytes, both addresses multiples of 16.
// `barrier` counts the bytes.
REGARD_DEVICE void bulk_load(SharedAddress to, const void* from, int bytes, SharedAddress barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// The descriptor of a tile without swizzle, with rows of 16 bytes one after another. A product
// takes the eight elements of each row twice, as the first and the second half of its sixteen.
REGARD_DEVICE uint64 unswizzled_descriptor(SharedAddress begin) {
  return uint64(128 >> 4) << 32 | (begin & kWithinBlock) >> 4;
}
// d = (adds ? d : 0) + a b^T over 16 columns of b's tile, which has a row for each column of d; a:
// the same columns of a warp's 16 rows.
template <class T, int kBlocks>
REGARD_DEVICE void wgmma_rs_nt(float (&d)[kBlocks][4], const uint32 (&a)[4], uint64 b, bool adds) {
  WgmmaGradientShape<T, kBlocks>::rs_nt(d, a, b, adds);
}
// d = (adds ? d : 0) + a^T b over 16 rows of both tiles.
template <class T, int kBlocks>
REGARD_DEVICE void wgmma_ss_tn(float (&d)[kBlocks][4], uint64 a, uint64 b, bool adds) {
  WgmmaGradientShape<T, kBlocks>::ss_tn(d, a, b, adds);
}

}  // namespace regard
