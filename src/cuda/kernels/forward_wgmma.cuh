// Forward attention on Hopper: out and lse of one tile of query rows after another.
//
// The grid is persistent. Thread 0 of warpgroup 0 keeps shared memory full by TMA; the next two to
// four warpgroups multiply, 64 rows of the tile each; the last one may generate dropout bits.
// docs/kernels.md draws the pipeline.
#pragma once

#include "cuda/kernels/tile/wgmma/forward/consumer.cuh"
#include "cuda/kernels/tile/wgmma/forward/dropout_producer.cuh"
#include "cuda/kernels/tile/wgmma/forward/f32_consumer.cuh"
#include "cuda/kernels/tile/wgmma/forward/f32_producer.cuh"
#include "cuda/kernels/tile/wgmma/forward/producer.cuh"

namespace regard {

template <KernelConfig kConfig>
REGARD_DEVICE void forward_wgmma(const KernelParams& params, const ForwardMaps& maps) {
  // setmaxnreg shares out anew the registers that the threads of the block have at the start.
  constexpr int kConsumers = consumers_of(kConfig.tiling);
  static_assert(kConsumers >= 2 && kConsumers <= 4);
  static_assert(kConfig.tiling.warps == forward_warps(kConfig));
  constexpr bool kTwo = kConsumers == 2, kDropout = has_dropout_warpgroup(kConfig);
  constexpr int kDropoutRegisters = kConfig.dim_v <= 64 ? 48 : 64;  // measured
  const ForwardMemory<kConfig> memory;
  const int warpgroup = warpgroup_index();
  if (thread_index() == 0) memory.init_barriers();
  sync_block();
  if constexpr (hi_lo_parts(kConfig) > 1) {
    if (warpgroup == 0) {
      setmaxnreg_dec<kTwo ? 24 : 32>();
      if (thread_index() == 0) F32Producer<kConfig>{params, maps, memory}.run();
    } else {
      setmaxnreg_inc<kTwo ? 240 : 160>();
      F32Consumer<kConfig>(params, maps, memory, warpgroup - 1).run();
    }
  } else if (warpgroup == 0) {
    setmaxnreg_dec<kTwo && !kDropout ? 40 : 32>();
    // TFLOP/s with an elected thread, and without (H100, bf16, 16384 tokens in all): D 128, no
    // mask: 512 tokens a sequence 490 and 500, 2048 681 and 695; causal: 323 and 310, 572 and 569;
    // D 256, causal, 16384: 807 and 769.
    constexpr bool kElects =
        kConfig.features.interval || kConfig.tile_map || larger(kConfig.dim, kConfig.dim_v) > 128;
    ForwardProducer<kConfig> producer{params, maps, memory};
    if constexpr (kElects) {
      by_elected_thread([&] { producer.run(); });
    } else if (thread_index() == 0) {
      producer.run();
    }
  } else if (kDropout && warpgroup == kConsumers + 1) {
    setmaxnreg_dec<kDropoutRegisters>();
    ForwardDropoutProducer<kConfig>{params, memory}.run();
  } else {
    setmaxnreg_inc<kDropout          ? (480 - kDropoutRegisters) / 2
                   : kTwo            ? 232
                   : kConsumers == 3 ? 160
                                     : 112>();
    ForwardConsumer<kConfig>(params, maps, memory, warpgroup - 1).run();
  }
}

}  // namespace regard
