// What each compute capability offers, after the tables of the CUDA programming guide; counts of
// multiprocessors and second-level caches are those of one widespread card.
#include "plan/cuda/chip.hpp"

#include <algorithm>

namespace regard {
namespace {

struct Row {
  int capability;
  int multiprocessors;
  int block_kb;  // shared memory that a block may opt in to
  int multiprocessor_kb;
  int l2_mb;
};

constexpr Row kRows[] = {
    {50, 5, 48, 64, 2},         // GTX 750 Ti
    {52, 24, 48, 96, 3},        // M40
    {60, 56, 48, 64, 4},        // P100
    {61, 30, 48, 96, 3},        // P40
    {70, 80, 96, 96, 6},        // V100
    {75, 40, 64, 64, 4},        // T4
    {80, 108, 163, 164, 40},    // A100
    {86, 82, 99, 100, 6},       // RTX 3090
    {87, 16, 163, 164, 4},      // Orin
    {89, 128, 99, 100, 72},     // RTX 4090
    {90, 132, 227, 228, 50},    // H100
    {100, 148, 227, 228, 126},  // B200
    {103, 148, 227, 228, 126},  // B300
    {120, 170, 99, 100, 96},    // RTX 5090
    {121, 48, 99, 100, 24},     // GB10
};

std::vector<Chip> make_chips() {
  std::vector<Chip> chips;
  for (const Row& row : kRows) {
    chips.push_back({.major = row.capability / 10,
                     .minor = row.capability % 10,
                     .multiprocessors = row.multiprocessors,
                     .shared_per_block = row.block_kb * int64(1024),
                     .shared_per_multiprocessor = row.multiprocessor_kb * int64(1024),
                     .registers_per_multiprocessor = 65536,
                     .l2 = row.l2_mb * int64(1024 * 1024),
                     .name = "sm_" + std::to_string(row.capability)});
  }
  return chips;
}

}  // namespace

const std::vector<Chip>& known_chips() {
  // Never destroyed: calls may come while the process ends.
  static const auto* const chips = new std::vector<Chip>(make_chips());
  return *chips;
}

const Chip* chip_named(const std::string& name) {
  const std::vector<Chip>& chips = known_chips();
  const auto found =
      std::find_if(chips.begin(), chips.end(), [&](const Chip& chip) { return chip.name == name; });
  return found == chips.end() ? nullptr : &*found;
}

}  // namespace regard
