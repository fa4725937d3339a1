// `regard info`: the machine and its backends, and how to get what is missing.
#include <fmt/core.h>

#include "command_line/arguments.hpp"
#include "output/table.hpp"
#include "regard/cuda.hpp"

namespace regard::cli {

namespace {

std::string cache_text(const std::string& folder) {
  if (folder.empty()) return "none: neither REGARD_CACHE_DIR nor HOME says where it may lie";
  std::size_t bytes = 0, count = 0;
  for (const CompiledKernel& kernel : cached_kernels()) {
    bytes += kernel.bytes;
    ++count;
  }
  return fmt::format("{}: {} kernels, {}", folder, count, bytes_text(double(bytes)));
}

// Devices, driver, compiler, cache: what kernels need, or how to get it.
std::string gpu_text() {
  const CudaSetup setup = cuda_setup();
  Table table({"<", "<"});
  for (std::size_t n = 0; n < setup.devices.size(); ++n) {
    const CudaDevice& d = setup.devices[n];
    table.add({fmt::format("cuda:{}", n),
               fmt::format("{}: {}, {} multiprocessors, {:.0f} GiB, {} KiB shared memory a block",
                           d.name, d.chip, d.multiprocessors, double(d.memory) / double(1 << 30),
                           d.shared_per_block / 1024)});
  }
  if (setup.devices.empty()) table.add({"GPUs", "none"});
  table.add({"driver", setup.has_driver ? "for CUDA " + setup.driver : "none: " + setup.driver});
  table.add({"compiler", setup.has_compiler ? setup.compiler : "none: " + setup.compiler});
  for (const std::string& sentence : setup.skipped) table.add({"not trusted", sentence});
  table.add({"kernel cache", cache_text(setup.cache)});
  return table.text().substr(1);
}

}  // namespace

int run_info() {
  const Machine m = machine();
  std::string isa;
  for (const std::string& name : m.isa) isa += (isa.empty() ? "" : " ") + name;
  auto cache = [](std::size_t bytes) {
    return bytes == 0 ? std::string("unknown") : fmt::format("{} KiB", bytes / 1024);
  };
  Table about({"<", "<"});
  about.add({"regard", version()});
  about.add({"processor", m.cpu});
  about.add({"cores", fmt::format("{} usable by this process", m.threads)});
  about.add({"instructions", isa.empty() ? "baseline only" : isa});
  about.add({"caches", fmt::format("L1 {}, L2 {}, L3 {}", cache(m.l1), cache(m.l2), cache(m.l3))});
  fmt::print("{}\n", about.text().substr(1));
  fmt::print("{}\n", gpu_text());
  Table table({"<backend", "<available", "<what it is, or how to get it"});
  for (const BackendInfo& backend : backends()) {
    table.add({backend.name, backend.available ? "yes" : "no", backend.note});
  }
  fmt::print("{}", table.text());
  return 0;
}

}  // namespace regard::cli
