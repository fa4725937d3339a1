// `regard info`: the machine and its backends, and how to get what is missing.
#include <fmt/core.h>

#include "arguments.hpp"
#include "table.hpp"

namespace regard::cli {

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
  Table table({"<backend", "<available", "<what it is, or how to get it"});
  for (const BackendInfo& backend : backends()) {
    table.add({backend.name, backend.available ? "yes" : "no", backend.note});
  }
  fmt::print("{}", table.text());
  return 0;
}

}  // namespace regard::cli
