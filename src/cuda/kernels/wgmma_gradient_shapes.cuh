// Products of a warpgroup that only the backward pass makes: d[64, 16 n] += a b, for n = 1 to 4
// and 8.
//
// This file uses the macros of wgmma_shapes.cuh, and ptx_hopper.cuh alone includes it.
#pragma once

#include "cuda/kernels/wgmma_shapes.cuh"

namespace regard {

// rs_nt: a is in registers, b a tile whose rows are d's columns. ss_tn:
// a and b are tiles in shared memory whose columns run along d.
template <class T, int kBlocks>
struct WgmmaGradientShape;

#define REGARD_BY_ROWS(n, columns, type, a0, a1, a2, a3, b, add)                           \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " add                                        \
               ", 0;\n"                                                                    \
               "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type        \
               " {" REGARD_D##n "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " b ", p, 1, 1, 0;}" \
               : REGARD_R##n                                                               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_tile), "r"(int(adds)))
#define REGARD_TRANSPOSED(n, columns, type, a, b, add)                              \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " add                                 \
               ", 0;\n"                                                             \
               "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type \
               " {" REGARD_D##n "}, " a ", " b ", p, 1, 1, 1, 1;}"                  \
               : REGARD_R##n                                                        \
               : "l"(a_tile), "l"(b_tile), "r"(int(adds)))
#define REGARD_GRADIENT_PRODUCT(n, columns, o0, o1, o2, o3, o4, o5)                          \
  template <class T>                                                                         \
  struct WgmmaGradientShape<T, 2 * n> {                                                      \
    static __device__ __forceinline__ void rs_nt(float (&d)[2 * n][4], const uint32 (&a)[4], \
                                                 uint64 b_tile, bool adds) {                 \
      if constexpr (kIsBf16<T>) {                                                            \
        REGARD_BY_ROWS(n, columns, "bf16", o0, o1, o2, o3, o4, o5);                          \
      } else {                                                                               \
        REGARD_BY_ROWS(n, columns, "f16", o0, o1, o2, o3, o4, o5);                           \
      }                                                                                      \
    }                                                                                        \
    static __device__ __forceinline__ void ss_tn(float (&d)[2 * n][4], uint64 a_tile,        \
                                                 uint64 b_tile, bool adds) {                 \
      if constexpr (kIsBf16<T>) {                                                            \
        REGARD_TRANSPOSED(n, columns, "bf16", o0, o1, o2);                                   \
      } else {                                                                               \
        REGARD_TRANSPOSED(n, columns, "f16", o0, o1, o2);                                    \
      }                                                                                      \
    }                                                                                        \
  };

REGARD_GRADIENT_PRODUCT(1, "16", "%8", "%9", "%10", "%11", "%12", "%13")
REGARD_GRADIENT_PRODUCT(2, "32", "%16", "%17", "%18", "%19", "%20", "%21")
REGARD_GRADIENT_PRODUCT(3, "48", "%24", "%25", "%26", "%27", "%28", "%29")
REGARD_GRADIENT_PRODUCT(4, "64", "%32", "%33", "%34", "%35", "%36", "%37")
REGARD_GRADIENT_PRODUCT(8, "128", "%64", "%65", "%66", "%67", "%68", "%69")

}  // namespace regard
