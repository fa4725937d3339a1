// Products of a warpgroup over whole tiles, as sequences of wgmma instructions. The caller fences
// before them and commits behind them, so that one group can hold several.
//
// A tile lies in panels (wgmma_layout.h) and is named by its descriptor word. An f32 tile is a hi
// and a lo part, both of f16, one behind the other; a product of two such tiles is three products.
#pragma once

#include "cuda/kernels/tile/wgmma/pipeline.cuh"

namespace regard {

// hi hi^T + hi lo^T + lo hi^T, small products first. lo lo^T is below f32's last place.
template <int kParts>
inline constexpr int kPartProducts = kParts == 1 ? 1 : 3;
template <int kParts>
REGARD_DEVICE constexpr int part_of_a(int product) {
  return kParts > 1 && product == 0;
}
template <int kParts>
REGARD_DEVICE constexpr int part_of_b(int product) {
  return kParts > 1 && product == 1;
}
// From one part of a tile to the next, in units of descriptor_word.
REGARD_DEVICE constexpr int part_words(int columns, int rows) {
  return panels_of(columns) * panel_bytes(rows) / 16;
}

// d = (adds ? d : 0) + A B^T over kColumns columns of tiles of kRowsA and kRowsB rows. `a` begins
// at the warpgroup's 64 rows.
template <class T, int kColumns, int kRowsA, int kRowsB, int kParts = 1, int kBlocks>
REGARD_DEVICE void multiply_nt(float (&d)[kBlocks][4], uint32 a, uint32 b, bool adds = false) {
#pragma unroll
  for (int product = 0; product < kPartProducts<kParts>; ++product) {
#pragma unroll
    for (int k = 0; k < kColumns / 16; ++k) {
      const int column = k % 4 * 2;
      wgmma_ss_nt<T>(
          d,
          matrix_descriptor(a + part_of_a<kParts>(product) * part_words(kColumns, kRowsA) +
                            k / 4 * (panel_bytes(kRowsA) / 16) + column),
          matrix_descriptor(b + part_of_b<kParts>(product) * part_words(kColumns, kRowsB) +
                            k / 4 * (panel_bytes(kRowsB) / 16) + column),
          adds || product + k > 0);
    }
  }
}

// d = (adds ? d : 0) + A B over the kSteps * 16 rows of B; A's fragments are in registers. `lo`:
// the distance of B's lo part, in descriptor words.
template <class T, int kParts, int kSteps, int kBlocks>
REGARD_DEVICE void multiply_nn(float (&d)[kBlocks][4], const uint32 (&a)[kParts][kSteps][4],
                               uint32 b, uint32 lo, bool adds) {
#pragma unroll
  for (int product = 0; product < kPartProducts<kParts>; ++product) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      wgmma_rs_nn<T>(
          d, a[part_of_a<kParts>(product)][k],
          matrix_descriptor(b + part_of_b<kParts>(product) * lo + k * panel_bytes(16) / 16),
          adds || product + k > 0);
    }
  }
}

}  // namespace regard
