#include "cuda/write_rows.hpp"

#include <limits>

#include "cuda/kernel_cache.hpp"
#include "cuda/launch.hpp"
#include "plan/cuda/write_rows.hpp"
#include "problem/refuse.hpp"

namespace regard::cuda_backend {
namespace {

View view_of(const Tensor& x) {
  return {.data = x.data,
          .type = x.type,
          .strides = {.batch = x.strides[0],
                      .head = x.strides[1],
                      .row = x.strides[2],
                      .column = x.strides[3]}};
}

const LoadedKernel& loaded(const KernelConfig& config, const Chip& chip, std::uint64_t context) {
  const LoadedKernel* kernel = loaded_kernel(config, context);
  if (!kernel) load_kernels({config}, chip, context);
  return kernel ? *kernel : *loaded_kernel(config, context);
}

}  // namespace

void write_rows(const RowSum& sum, const Chip& chip, std::uint64_t context, Stream stream,
                int device) {
  constexpr std::int64_t kMostRows = std::numeric_limits<std::int32_t>::max();
  const auto& sizes = sum.to.sizes;
  const std::int64_t rows = sizes[0] * sizes[1] * sizes[2];
  if (rows == 0 || sizes[3] == 0) return;
  require(rows <= kMostRows, "rows", rows, "are more than a grid has blocks for");
  const CudaLaunch launch = write_rows_launch(sum.first.type, sum.to.type, rows);
  KernelParams params;
  Problem& p = params.problem;
  p.sizes = {.batch = sizes[0], .heads_q = sizes[1], .len_q = sizes[2], .dim = sizes[3]};
  p.q = view_of(sum.first);
  if (sum.second.given()) p.k = view_of(sum.second);
  p.out = view_of(sum.to);
  p.accumulate = sum.add;
  launch_kernel(driver(), launch, loaded(launch.config, chip, context), params, nullptr, stream,
                device);
}

}  // namespace regard::cuda_backend
