// `regard info`: the machine and its backends, and how to get what is missing.
#include <fmt/core.h>
#include <fmt/format.h>

#include "command_line/arguments.hpp"
#include "output/json.hpp"
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

Json gpu_json() {
  const CudaSetup setup = cuda_setup();
  std::vector<Json> devices;
  for (const CudaDevice& d : setup.devices) {
    devices.push_back(Fields{{"name", d.name},
                             {"chip", d.chip},
                             {"multiprocessors", d.multiprocessors},
                             {"memory", d.memory},
                             {"l2", d.l2},
                             {"shared_per_block", d.shared_per_block}});
  }
  return Fields{{"devices", devices},         {"has_driver", setup.has_driver},
                {"driver", setup.driver},     {"has_compiler", setup.has_compiler},
                {"compiler", setup.compiler}, {"skipped", setup.skipped},
                {"cache", setup.cache},       {"cache_fault", setup.cache_fault}};
}

Json json_of(const Machine& m) {
  std::vector<Json> list;
  for (const BackendInfo& b : backends()) {
    list.push_back(Fields{{"name", b.name}, {"available", b.available}, {"note", b.note}});
  }
  return Fields{{"version", version()},
                {"cpu", m.cpu},
                {"threads", m.threads},
                {"isa", m.isa},
                {"caches", Fields{{"l1", m.l1}, {"l2", m.l2}, {"l3", m.l3}}},
                {"gpu", gpu_json()},
                {"backends", list}};
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
  output::put(arguments.json ? json_of(m).text() + "\n" : tables(m));
  return 0;
}

}  // namespace regard::cli
