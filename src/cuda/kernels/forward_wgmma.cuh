// Forward attention on Hopper: out and lse of tile after tile of query rows.
//
// A block stays on its multiprocessor. One warpgroup keeps shared memory filled through the copy
// engine, the others multiply: each has 64 rows of the tile. Registers go from the one to the
// others.
#pragma once

#include "cuda/kernels/tile/wgmma/forward_consumer.cuh"
#include "cuda/kernels/tile/wgmma/forward_drops.cuh"
#include "cuda/kernels/tile/wgmma/forward_producer.cuh"
#include "cuda/kernels/tile/wgmma/plane_consumer.cuh"
#include "cuda/kernels/tile/wgmma/plane_producer.cuh"

namespace regard {

template <KernelConfig kConfig>
REGARD_DEVICE void forward_wgmma(const KernelParams& params, const ForwardMaps& maps) {
  // Of the 65536 of a block: what its threads have at the start is shared out anew.
  constexpr int kConsumers = consumers_of(kConfig.tiling);
  static_assert(kConsumers >= 2 && kConsumers <= 4);
  static_assert(kConfig.tiling.warps == forward_warps(kConfig));
  constexpr bool kTwo = kConsumers == 2, kDrops = has_dropout_warpgroup(kConfig);
  constexpr int kOfDrops = kConfig.dim_v <= 64 ? 48 : 64;  // by measurement
  const WarpgroupMemory<kConfig> memory;
  const int warpgroup = warpgroup_index();
  if (thread_index() == 0) memory.init_barriers();
  sync_block();
  if constexpr (hi_lo_parts(kConfig) > 1) {
    if (warpgroup == 0) {
      setmaxnreg_dec<kTwo ? 24 : 32>();
      if (thread_index() == 0) PlaneProducer<kConfig>{params, maps, memory}.run();
    } else {
      setmaxnreg_inc<kTwo ? 240 : 160>();
      PlaneConsumer<kConfig>{params, maps, memory, warpgroup - 1}.run();
    }
  } else if (warpgroup == 0) {
    setmaxnreg_dec<kTwo && !kDrops ? 40 : 32>();
    if (thread_index() == 0) ForwardProducer<kConfig>{params, maps, memory}.run();
  } else if (kDrops && warpgroup == kConsumers + 1) {
    setmaxnreg_dec<kOfDrops>();
    ForwardDrops<kConfig>{params, memory}.run();
  } else {
    setmaxnreg_inc<kDrops ? (480 - kOfDrops) / 2 : kTwo ? 232 : kConsumers == 3 ? 160 : 112>();
    ForwardConsumer<kConfig>{params, maps, memory, warpgroup - 1}.run();
  }
}

}  // namespace regard
