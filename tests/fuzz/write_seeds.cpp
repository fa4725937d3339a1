// Writes the fuzzer's first inputs: one for each feature, type and layout.
//
//   write_seeds FOLDER
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

int main(int count, char** arguments) {
  if (count != 2) return 2;
  const std::filesystem::path folder = arguments[1];
  std::filesystem::create_directories(folder);
  std::uint64_t state = 1;
  for (int number = 0; number < 64; ++number) {
    std::vector<std::uint8_t> bytes;
    // Plain sizes first (type, packed, batch, group, heads, lengths, head sizes), the rest drawn
    // below the values that spoil a tensor.
    for (int n : {number % 4, number % 8, 2, number % 3, number % 2, 1, 17, 1, 33, 7, 9}) {
      bytes.push_back(std::uint8_t(n));
    }
    for (int n = 0; n < 120; ++n) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      const auto drawn = std::uint8_t(state >> 56);
      bytes.push_back(drawn % 16 == 15 || drawn >= 239 ? 0 : drawn);
    }
    std::ofstream file(folder / ("seed_" + std::to_string(number)), std::ios::binary);
    file.write(reinterpret_cast<const char*>(bytes.data()), std::streamsize(bytes.size()));
    if (!file) return 1;
  }
}
