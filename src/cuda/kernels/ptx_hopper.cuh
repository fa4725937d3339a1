// The machine's Hopper part (compute capability 9.0): barriers in shared memory, the copy engine,
// products of warpgroups, registers that warps hand to one another.
//
// As ptx.cuh, of which it is a sister: nothing else that kernels for Hopper use is CUDA's.
#pragma once

#include "cuda/kernels/ptx.cuh"
#include "cuda/kernels/tensor_maps.h"
#include "cuda/kernels/wgmma_gradient_shapes.cuh"
#include "cuda/kernels/wgmma_shapes.cuh"

namespace regard {

// ---------------------------------------------------------------------------------- where am I

// What is the same in the whole warp, so that the compiler knows it: descriptors of products must
// be in uniform registers, or each is moved there first.
REGARD_DEVICE int uniform(int x) { return shuffle(x, 0); }
REGARD_DEVICE int warpgroup_index() { return uniform(int(threadIdx.x / 128)); }
REGARD_DEVICE int64 block_count() { return gridDim.x; }

// ------------------------------------------------------------------------- registers of a role

// For a whole warpgroup: how many registers each of its threads has from here on.
template <int kRegisters>
REGARD_DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
REGARD_DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ------------------------------------------------------------------------------------ barriers

// A barrier for the first threads of a block, whole warps; numbers from 1 to 15.
REGARD_DEVICE void bar_sync(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Says so at one, and does not wait.
REGARD_DEVICE void bar_arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
// Barriers in shared memory, 8 bytes each. A phase ends when so many arrivals and all announced
// bytes have come.
REGARD_DEVICE void mbarrier_init(SharedAddress barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// After mbarrier_init, by the same thread; a barrier of the block follows.
REGARD_DEVICE void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
REGARD_DEVICE void mbarrier_arrive(SharedAddress barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// The same, and so many bytes are to come in this phase.
REGARD_DEVICE void mbarrier_arrive_expect_tx(SharedAddress barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Until the phase of this parity is over. The first phase has parity 0; parity 1 is over before it.
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

// -------------------------------------------------------------------------------- copy engine

// The first element of a box in its tensor.
struct TmaCoords {
  int column, row, head, batch;
};

// Elements outside the tensor become 0. `barrier` is told of the whole box's bytes.
REGARD_DEVICE void tma_load(SharedAddress to, const TensorMap& map, const TmaCoords& at,
                            SharedAddress barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(&map), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch), "r"(barrier)
      : "memory");
}
// Elements outside the tensor are not written, but for those of the 16 bytes in which a row ends.
REGARD_DEVICE void tma_store(const TensorMap& map, const TmaCoords& at, SharedAddress from) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group "
      "[%0, {%1, %2, %3, %4}], [%5];" ::"l"(&map),
      "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch), "r"(from)
      : "memory");
}
// Closes a group of this thread's stores; waits until those that are closed have been read.
REGARD_DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
REGARD_DEVICE void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// What this thread wrote to shared memory can be read by the copy engine and by products.
REGARD_DEVICE void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ------------------------------------------------------------------------------------- clusters

REGARD_DEVICE int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Every thread of every block of the cluster; what was written to shared memory before can be seen.
REGARD_DEVICE void sync_cluster() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
}
// The same place in the shared memory of another block of the cluster; an address without the
// block, as descriptors want it.
#ifdef REGARD_CLUSTER
inline constexpr uint32 kWithinBlock = 0x3ffff;
#else
inline constexpr uint32 kWithinBlock = ~0u;
#endif
REGARD_DEVICE SharedAddress address_in_cluster(SharedAddress own, int rank) {
  SharedAddress x;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(x) : "r"(own), "r"(rank));
  return x;
}
REGARD_DEVICE SharedAddress address_in_block(SharedAddress x) { return x & kWithinBlock; }
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
// At a barrier of another block. It orders nothing by itself: a release would wait for all that the
// thread has written to memory. What it tells of is in shared memory already, of which there is one
// copy, or in registers.
REGARD_DEVICE void mbarrier_arrive_cluster(SharedAddress barrier) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier)
               : "memory");
}

// In a cluster of two: the same place in the other block.
REGARD_DEVICE SharedAddress of_peer(SharedAddress own) {
  return address_in_cluster(own, cluster_rank() ^ 1);
}
// By the copy engine, to a place in the other block, whose barrier is told of the bytes.
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

// A tile in shared memory with the 128-byte swizzle, as products name it: groups of eight rows are
// 1024 bytes apart; panels, where the tile's columns are b's, so many bytes. The low word counts in
// units of 16 bytes, and may be moved within the tile by adding to it.
REGARD_DEVICE uint32 descriptor_word(SharedAddress begin, int panel) {
  return (address_in_block(begin) >> 4) | uint32(panel >> 4) << 16;
}
REGARD_DEVICE uint64 matrix_descriptor(uint32 word) { return uint64(0x40000040u) << 32 | word; }

// Products run in the background: begin, multiply, commit; wait until at most so many committed
// groups are under way. Operands in registers and accumulators are not touched meanwhile.
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
// d = (adds ? d : 0) + a b over 16 rows of b; a: those columns of a warp's 16 rows.
template <class T, int kBlocks>
REGARD_DEVICE void wgmma_rs_nn(float (&d)[kBlocks][4], const uint32 (&a)[4], uint64 b, bool adds) {
  WgmmaShape<T, kBlocks>::rs_nn(d, a, b, adds);
}

// Reads and writes of d stay on their side of this.
template <int kBlocks>
REGARD_DEVICE void fence_operand(float (&d)[kBlocks][4]) {
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(d[n][e])::"memory");
  }
}

// ------------------------------------------------------------------------------- shared counters

// A number in global memory that blocks share, each at its own time: what it is; what it was before
// one is added; x in place of what it was, if it is that still.
REGARD_DEVICE uint64 load_relaxed(const uint64* number) {
  uint64 x;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(x) : "l"(number) : "memory");
  return x;
}
REGARD_DEVICE uint64 atomic_increment(uint64* number) { return atomicAdd(number, uint64(1)); }
REGARD_DEVICE void atomic_cas(uint64* number, uint64 was, uint64 x) { atomicCAS(number, was, x); }

// -------------------------------------------------------------------------- halves of a word

// Of the two halves, numbers without a sign, each the larger one.
REGARD_DEVICE uint32 max_u16x2(uint32 a, uint32 b) {
  uint32 x;
  asm("max.u16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
  return x;
}
// In each half 1 where that of x is below its limit, else 0.
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
// Each half all ones where this bit of it is one, else 0.
template <int kBit>
REGARD_DEVICE uint32 spread_bit_u16x2(uint32 x) {
  static_assert(kBit >= 0 && kBit < 16);
  constexpr uint32 kSigns = kBit >= 8 ? 0xbb99 : 0xaa88;  // of bytes 1 and 3, or 0 and 2, spread
  uint32 halves;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(halves) : "r"(x << (7 - kBit % 8)), "n"(kSigns));
  return halves;
}

// --------------------------------------------------------------------------- the backward pass

// The compiler forgets what it knows of x, so that it does not keep what follows from it in
// registers across a loop.
REGARD_DEVICE void make_opaque(uint32& x) { asm volatile("" : "+r"(x)); }

// Bytes as they lie in global memory: a multiple of 16, from and to multiples of 16. `barrier` is
// told of them.
REGARD_DEVICE void bulk_load(SharedAddress to, const void* from, int bytes, SharedAddress barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// A tile of rows of 16 bytes, one after another. A product takes each row's eight elements twice,
// as the first and as the second half of its sixteen.
REGARD_DEVICE uint64 unswizzled_descriptor(SharedAddress begin) {
  return uint64(128 >> 4) << 32 | (begin & kWithinBlock) >> 4;
}
// d = (adds ? d : 0) + a b^T over 16 columns of b's tile, whose rows are d's columns; a: those
// columns of a warp's 16 rows.
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
