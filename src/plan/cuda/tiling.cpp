// Shared memory of every kernel.
#include "plan/cuda/tiling.hpp"

#include "plan/cuda/kernel/finish_layout.h"
#include "plan/cuda/kernel/wgmma_backward_layout.h"

namespace regard {

int64 shared_bytes_of(const KernelConfig& c) {
  if (c.kernel == Kernel::finish) return finish_shared_bytes(c);
  if (c.family == Family::simt) return simt_shared_bytes(c);
  if (c.family == Family::wgmma) {
    return c.kernel == Kernel::backward ? backward_wgmma_shared(c) : forward_wgmma_shared(c);
  }
  return c.kernel == Kernel::backward ? backward_mma_shared(c) : forward_mma_shared(c);
}

}  // namespace regard
