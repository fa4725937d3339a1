// Products of a warpgroup, for every width: d[64, 16 n] += a b, for n = 1 to 16.
//
// An instruction names its accumulators one by one: the macros write out 8 n of them, and what
// follows them by number. Included by ptx_hopper.cuh only.
#pragma once

#include "semantics/portable.h"

namespace regard {

struct F16;
struct Bf16;
template <class T>
inline constexpr const bool kIsBf16 = false;
template <>
inline constexpr const bool kIsBf16<Bf16> = true;

// ss_nt: a and b are tiles in shared memory whose rows run along the sum. rs_nn: a is in
// registers, as for mma_m16n8k16, and b a tile whose columns run along the sum.
template <class T, int kBlocks>
struct WgmmaShape;

#define REGARD_D1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define REGARD_D2 REGARD_D1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define REGARD_D3 REGARD_D2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define REGARD_D4 REGARD_D3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define REGARD_D5 REGARD_D4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define REGARD_D6 REGARD_D5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define REGARD_D7 REGARD_D6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define REGARD_D8 REGARD_D7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define REGARD_D9 REGARD_D8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define REGARD_D10 REGARD_D9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define REGARD_D11 REGARD_D10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define REGARD_D12 REGARD_D11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define REGARD_D13 REGARD_D12 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define REGARD_D14 REGARD_D13 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define REGARD_D15 REGARD_D14 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define REGARD_D16 REGARD_D15 ", %120, %121, %122, %123, %124, %125, %126, %127"

#define REGARD_R(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define REGARD_R1 REGARD_R(0), REGARD_R(1)
#define REGARD_R2 REGARD_R1, REGARD_R(2), REGARD_R(3)
#define REGARD_R3 REGARD_R2, REGARD_R(4), REGARD_R(5)
#define REGARD_R4 REGARD_R3, REGARD_R(6), REGARD_R(7)
#define REGARD_R5 REGARD_R4, REGARD_R(8), REGARD_R(9)
#define REGARD_R6 REGARD_R5, REGARD_R(10), REGARD_R(11)
#define REGARD_R7 REGARD_R6, REGARD_R(12), REGARD_R(13)
#define REGARD_R8 REGARD_R7, REGARD_R(14), REGARD_R(15)
#define REGARD_R9 REGARD_R8, REGARD_R(16), REGARD_R(17)
#define REGARD_R10 REGARD_R9, REGARD_R(18), REGARD_R(19)
#define REGARD_R11 REGARD_R10, REGARD_R(20), REGARD_R(21)
#define REGARD_R12 REGARD_R11, REGARD_R(22), REGARD_R(23)
#define REGARD_R13 REGARD_R12, REGARD_R(24), REGARD_R(25)
#define REGARD_R14 REGARD_R13, REGARD_R(26), REGARD_R(27)
#define REGARD_R15 REGARD_R14, REGARD_R(28), REGARD_R(29)
#define REGARD_R16 REGARD_R15, REGARD_R(30), REGARD_R(31)

// What follows the accumulators: a's descriptor or four registers, b's descriptor, whether to add.
#define REGARD_TILES(n, columns, type, a, b, add)                                   \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " add                                 \
               ", 0;\n"                                                             \
               "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type \
               " {" REGARD_D##n "}, " a ", " b ", p, 1, 1, 0, 0;}"                  \
               : REGARD_R##n                                                        \
               : "l"(a_tile), "l"(b_tile), "r"(int(adds)))
#define REGARD_REGISTERS(n, columns, type, a0, a1, a2, a3, b, add)                         \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " add                                        \
               ", 0;\n"                                                                    \
               "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type        \
               " {" REGARD_D##n "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " b ", p, 1, 1, 1;}" \
               : REGARD_R##n                                                               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_tile), "r"(int(adds)))
#define REGARD_WARPGROUP_PRODUCT(n, columns, o0, o1, o2, o3, o4, o5)                         \
  template <class T>                                                                         \
  struct WgmmaShape<T, 2 * n> {                                                              \
    static __device__ __forceinline__ void ss_nt(float (&d)[2 * n][4], uint64 a_tile,        \
                                                 uint64 b_tile, bool adds) {                 \
      if constexpr (kIsBf16<T>) {                                                            \
        REGARD_TILES(n, columns, "bf16", o0, o1, o2);                                        \
      } else {                                                                               \
        REGARD_TILES(n, columns, "f16", o0, o1, o2);                                         \
      }                                                                                      \
    }                                                                                        \
    static __device__ __forceinline__ void rs_nn(float (&d)[2 * n][4], const uint32 (&a)[4], \
                                                 uint64 b_tile, bool adds) {                 \
      if constexpr (kIsBf16<T>) {                                                            \
        REGARD_REGISTERS(n, columns, "bf16", o0, o1, o2, o3, o4, o5);                        \
      } else {                                                                               \
        REGARD_REGISTERS(n, columns, "f16", o0, o1, o2, o3, o4, o5);                         \
      }                                                                                      \
    }                                                                                        \
  };

REGARD_WARPGROUP_PRODUCT(1, "16", "%8", "%9", "%10", "%11", "%12", "%13")
REGARD_WARPGROUP_PRODUCT(2, "32", "%16", "%17", "%18", "%19", "%20", "%21")
REGARD_WARPGROUP_PRODUCT(3, "48", "%24", "%25", "%26", "%27", "%28", "%29")
REGARD_WARPGROUP_PRODUCT(4, "64", "%32", "%33", "%34", "%35", "%36", "%37")
REGARD_WARPGROUP_PRODUCT(5, "80", "%40", "%41", "%42", "%43", "%44", "%45")
REGARD_WARPGROUP_PRODUCT(6, "96", "%48", "%49", "%50", "%51", "%52", "%53")
REGARD_WARPGROUP_PRODUCT(7, "112", "%56", "%57", "%58", "%59", "%60", "%61")
REGARD_WARPGROUP_PRODUCT(8, "128", "%64", "%65", "%66", "%67", "%68", "%69")
REGARD_WARPGROUP_PRODUCT(9, "144", "%72", "%73", "%74", "%75", "%76", "%77")
REGARD_WARPGROUP_PRODUCT(10, "160", "%80", "%81", "%82", "%83", "%84", "%85")
REGARD_WARPGROUP_PRODUCT(11, "176", "%88", "%89", "%90", "%91", "%92", "%93")
REGARD_WARPGROUP_PRODUCT(12, "192", "%96", "%97", "%98", "%99", "%100", "%101")
REGARD_WARPGROUP_PRODUCT(13, "208", "%104", "%105", "%106", "%107", "%108", "%109")
REGARD_WARPGROUP_PRODUCT(14, "224", "%112", "%113", "%114", "%115", "%116", "%117")
REGARD_WARPGROUP_PRODUCT(15, "240", "%120", "%121", "%122", "%123", "%124", "%125")
REGARD_WARPGROUP_PRODUCT(16, "256", "%128", "%129", "%130", "%131", "%132", "%133")

}  // namespace regard
