// One emulated GPU, so that the library and tests/gpu run, unchanged, on a machine without a GPU. A
// launch is over when its call returns, and a kernel's fault is its error.
//
// REGARD_EMULATED_CHIP: the chip ("sm_86"). REGARD_EMULATED_ORDER: of warps between barriers,
// "forward", "backward" or "mixed"; REGARD_EMULATED_SEED.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "tests/cuda/driver.hpp"
#include "tests/cuda/emulator_build.hpp"
#include "tests/cuda/emulator_image.hpp"
#include "tests/cuda/machine/block_machine.hpp"

namespace files = std::filesystem;

namespace regard::fake {

namespace {

using namespace emulated;

BlockMachine& block_machine() {
  static auto* const machine = new BlockMachine;
  return *machine;
}

Order order() {
  const std::string name = setting("REGARD_EMULATED_ORDER", "forward");
  return name == "mixed" ? Order::mixed : name == "backward" ? Order::backward : Order::forward;
}

struct Compiled : Kernel {
  explicit Compiled(const std::string& library) : entry(load_kernel(library, block_machine())) {}
  int ptx_version() const override { return device_chip()->capability(); }
  int run(const Launch& launch, void** parameters, std::string& fault) override;

  KernelEntry entry;
};

struct Bound {
  KernelEntry entry;
  KernelParams params;
  LaunchMaps maps;
};

int Compiled::run(const Launch& launch, void** parameters, std::string& fault) {
  const Bound bound{
      entry, launch.params,
      entry.takes_maps ? *static_cast<const LaunchMaps*>(parameters[1]) : LaunchMaps{}};
  try {
    block_machine().run(
        {.kernel =
             [](const void* context) {
               const Bound& kernel = *static_cast<const Bound*>(context);
               kernel.entry(kernel.params, kernel.maps);
             },
         .params = &bound,
         .blocks = launch.blocks,
         .threads = int(launch.threads),
         .shared_bytes = launch.shared_bytes,
         .cluster = entry.cluster,
         .order = order(),
         .seed = std::strtoull(setting("REGARD_EMULATED_SEED", "1").c_str(), nullptr, 10)});
  } catch (const Fault& error) {
    fault = error.what();
    return kLaunchFailed;
  }
  return kOk;
}

}  // namespace

const int kDevices = 1;
const Chip* device_chip() { return chip_named(setting("REGARD_EMULATED_CHIP", "sm_86")); }
std::string device_name() { return "emulated " + device_chip()->name; }

Kernel* load(const void* image, std::string& fault) {
  ImageHead head, expected;
  std::memcpy(&head, image, sizeof head);
  if (std::memcmp(head.name, expected.name, sizeof head.name) != 0) return nullptr;
  std::string name = (files::temp_directory_path() / "regard-emulated-XXXXXX").string();
  const int file = mkstemp(name.data());
  if (file < 0) return nullptr;
  fclose(fdopen(file, "w"));
  std::ofstream(name, std::ios::binary)
      .write(static_cast<const char*>(image) + sizeof head, std::streamsize(head.size));
  Kernel* kernel = nullptr;
  try {
    kernel = new Compiled(name);
  } catch (const std::exception& error) {
    fault = error.what();
  }
  files::remove(name);
  return kernel;
}

}  // namespace regard::fake
