// The machine code of every kernel of the representative problems, a file each: what
// tools/compare_kernels.py compares between two states of the source.
//
// kernel_images FOLDER CHIP[,CHIP...] [TEXT]   writes FOLDER/CHIP/PROBLEM.PASS.LAUNCH.cubin, of the
//                                              kernels whose configuration holds the text
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "cuda/in_parallel.hpp"
#include "cuda/kernel_cache.hpp"
#include "plan/cuda/config_text.hpp"
#include "plan/cuda/planner.hpp"
#include "plan/cuda/representative.hpp"

using namespace regard;
namespace fs = std::filesystem;

namespace {

struct Image {
  KernelConfig config;
  fs::path path;
};

// The launches of every problem in order; a kernel that two of them share stands twice.
std::vector<Image> images_of(const Chip& chip, const fs::path& folder, const std::string& text) {
  std::vector<Image> images;
  int number = 0;
  for (const Problem& problem : representative_problems()) {
    const CudaPlan plan = plan_cuda(problem, chip, {}, Reasons::left_out);
    for (std::size_t i = 0; i < plan.launches.size(); ++i) {
      if (to_text(plan.launches[i].config).find(text) == std::string::npos) continue;
      char name[64];
      std::snprintf(name, sizeof name, "%02d.%s.%zu.cubin", number,
                    problem.backward ? "backward" : "forward", i);
      images.push_back({plan.launches[i].config, folder / name});
    }
    ++number;
  }
  return images;
}

void write(const Image& image, int capability) {
  const cuda_backend::KernelBinary& binary =
      cuda_backend::kernel_binary(image.config, capability, nullptr);
  std::ofstream(image.path, std::ios::binary) << binary.image;
  fs::path text = image.path;
  std::ofstream(text.replace_extension(".txt")) << to_text(image.config) << "\n";
}

}  // namespace

int main(int count, char** words) {
  if (count < 3) return std::fprintf(stderr, "kernel_images FOLDER CHIP[,CHIP...] [TEXT]\n"), 2;
  std::istringstream chips(words[2]);
  for (std::string name; std::getline(chips, name, ',');) {
    const Chip* const chip = chip_named(name);
    if (!chip) return std::fprintf(stderr, "no chip %s is known\n", name.c_str()), 2;
    const fs::path folder = fs::path(words[1]) / name;
    fs::create_directories(folder);
    const std::vector<Image> images = images_of(*chip, folder, count > 3 ? words[3] : "");
    cuda_backend::in_parallel(images.size(),
                              [&](std::size_t n) { write(images[n], chip->capability()); });
    std::printf("%s: %zu kernels\n", name.c_str(), images.size());
  }
}
