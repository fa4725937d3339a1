// `regard cache`: the compiled kernels on disk, listed, checked, deleted.
#include <fmt/core.h>

#include "command_line/arguments.hpp"
#include "command_line/parse.hpp"
#include "kernel_words.hpp"
#include "output/json.hpp"
#include "output/output.hpp"
#include "output/table.hpp"
#include "regard/cuda.hpp"

namespace regard::cli {

namespace {

void list_as_json(const std::string& folder, const std::string& fault) {
  std::vector<Json> kernels;
  for (const CompiledKernel& k : cached_kernels()) {
    kernels.push_back(Fields{{"chip", k.chip},
                             {"compiler", k.compiler},
                             {"config", k.config},
                             {"file", k.file},
                             {"registers", k.registers},
                             {"spill_bytes", k.spill_bytes},
                             {"stack_bytes", k.stack_bytes},
                             {"shared_bytes", k.shared_bytes},
                             {"bytes", k.bytes},
                             {"serialized", k.serialized},
                             {"fault", k.fault}});
  }
  const Json all = Fields{{"folder", folder}, {"kernels", kernels}, {"fault", fault}};
  output::print("{}\n", all.text());
}

void list(const std::string& folder) {
  Table table({"<chip", "<compiler", "registers", "spill", "stack", "size", "<  kernel"});
  std::size_t bytes = 0, count = 0, faulty = 0;
  for (const CompiledKernel& k : cached_kernels()) {
    if (!k.fault.empty()) {
      ++faulty;
      continue;
    }
    table.add({printable(k.chip), printable(k.compiler), std::to_string(k.registers),
               std::to_string(k.spill_bytes), std::to_string(k.stack_bytes),
               bytes_text(double(k.bytes)), "  " + joined(kernel_words(k.config))});
    bytes += k.bytes;
    ++count;
  }
  if (count > 0) output::print("{}", table.text());
  output::print("{} kernels, {} in {}\n", count, bytes_text(double(bytes)), printable(folder));
  if (faulty > 0) {
    output::print("{} more files are not used: `regard cache verify` says why\n", faulty);
  }
}

int verify(const std::string& folder) {
  std::size_t good = 0, faulty = 0;
  for (const CompiledKernel& k : cached_kernels()) {
    ++(k.fault.empty() ? good : faulty);
    if (!k.fault.empty()) output::print("{} {}\n", printable(k.file), k.fault);
  }
  output::print("{} kernels in {}, {} files are not used\n", good, printable(folder), faulty);
  if (faulty > 0) output::print("`regard cache clear` deletes them all\n");
  return faulty == 0 ? 0 : 1;
}

}  // namespace

int run_cache(const CacheArguments& arguments) {
  const CudaSetup setup = cuda_setup();
  const std::string& folder = setup.cache;
  if (folder.empty()) {
    throw Error(Code::unavailable, "REGARD_CACHE_DIR", "not set",
                "there is no cache, because HOME is not set either");
  }
  if (arguments.action == CacheArguments::Action::list && arguments.json) {
    list_as_json(folder, setup.cache_fault);
    return setup.cache_fault.empty() ? 0 : 1;
  }
  if (!setup.cache_fault.empty() && arguments.action != CacheArguments::Action::clear) {
    output::error("{}: nothing in it is used", printable(setup.cache_fault));
    return 1;
  }
  switch (arguments.action) {
    case CacheArguments::Action::list:
      list(folder);
      return 0;
    case CacheArguments::Action::verify:
      return verify(folder);
    case CacheArguments::Action::clear:
      break;
  }
  output::print("{} files deleted in {}\n", clear_cached_kernels(), printable(folder));
  return 0;
}

}  // namespace regard::cli
