// `regard info`: the machine and its backends, and how to get what is missing.
#include <fmt/core.h>
#include <fmt/format.h>

#include "command_line/arguments.hpp"
#include "output/json_line.hpp"
#include "output/output.hpp"
#include "output/table.hpp"
#include "regard/cuda.hpp"

namespace regard::cli {

namespace {

std::string cache_text(const CudaSetup& setup) {
  if (!setup.cache_fault.empty()) return "none: " + setup.cache_fault;
  std::size_t bytes = 0, count = 0;
  for (const CompiledKernel& kernel : cached_kernels()) {
    if (!kernel.fault.empty()) continue;
    bytes += kernel.bytes;
    ++count;
  }
  return fmt::format("{}: {} kernels, {}", setup.cache, count, bytes_text(double(bytes)));
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
  table.add({"kernel cache", cache_text(setup)});
  return table.text().substr(1);
}

JsonLine gpu_json() {
  const CudaSetup setup = cuda_setup();
  std::vector<JsonLine> devices;
  for (const CudaDevice& d : setup.devices) {
    JsonLine& device = devices.emplace_back();
    device.text("name", d.name);
    device.text("chip", d.chip);
    device.integer("multiprocessors", d.multiprocessors);
    device.count("memory", d.memory);
    device.count("l2", d.l2);
    device.count("shared_per_block", d.shared_per_block);
  }
  JsonLine gpu;
  gpu.list("devices", devices);
  gpu.boolean("has_driver", setup.has_driver);
  gpu.text("driver", setup.driver);
  gpu.boolean("has_compiler", setup.has_compiler);
  gpu.text("compiler", setup.compiler);
  gpu.list("skipped", setup.skipped);
  gpu.text("cache", setup.cache);
  gpu.text("cache_fault", setup.cache_fault);
  return gpu;
}

std::string json_text(const Machine& m) {
  JsonLine caches, line;
  caches.count("l1", m.l1);
  caches.count("l2", m.l2);
  caches.count("l3", m.l3);
  std::vector<JsonLine> list;
  for (const BackendInfo& b : backends()) {
    JsonLine& backend = list.emplace_back();
    backend.text("name", b.name);
    backend.boolean("available", b.available);
    backend.text("note", b.note);
  }
  line.text("version", version());
  line.text("cpu", m.cpu);
  line.integer("threads", m.threads);
  line.list("isa", m.isa);
  line.object("caches", caches);
  line.object("gpu", gpu_json());
  line.list("backends", list);
  return line.str();
}

std::string tables(const Machine& m) {
  const std::string isa = fmt::format("{}", fmt::join(m.isa, " "));
  const auto cache = [](std::size_t bytes) {
    return bytes == 0 ? std::string("unknown") : fmt::format("{} KiB", bytes / 1024);
  };
  Table about({"<", "<"});
  about.add({"regard", version()});
  about.add({"processor", m.cpu});
  about.add({"cores", fmt::format("{} usable by this process", m.threads)});
  about.add({"instructions", isa.empty() ? "baseline only" : isa});
  about.add({"caches", fmt::format("L1 {}, L2 {}, L3 {}", cache(m.l1), cache(m.l2), cache(m.l3))});
  std::string text = fmt::format("{}\n{}\n", about.text().substr(1), gpu_text());
  Table table({"<backend", "<available", "<what it is, or how to get it"});
  for (const BackendInfo& backend : backends()) {
    table.add({backend.name, backend.available ? "yes" : "no", backend.note});
  }
  return text + table.text();
}

}  // namespace

int run_info(const InfoArguments& arguments) {
  const Machine m = machine();
  output::put(arguments.json ? json_text(m) + "\n" : tables(m));
  return 0;
}

}  // namespace regard::cli
