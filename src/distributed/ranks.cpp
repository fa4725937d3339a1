#include "distributed/ranks.hpp"

#include <array>
#include <cstdint>
#include <cstring>
#include <exception>

#include "problem/error_text.hpp"
#include "problem/refuse.hpp"

namespace regard::distributed {
namespace {

std::string this_rank(const Collectives& ranks) {
  return "rank " + std::to_string(ranks.rank) + " of " + std::to_string(ranks.size);
}

std::string printed_kind(Device::Kind kind) {
  switch (kind) {
    case Device::Kind::cpu:
      return "cpu";
    case Device::Kind::cuda:
      return "cuda";
    case Device::Kind::chip:
      return "chip";
  }
  return std::to_string(int(kind));
}

// What a rank says of its arguments.
struct Word {
  std::uint64_t digest = 0;
  std::uint64_t refused = 0;
  std::array<char, 496> text{};  // of the Error; ends with a zero
};
static_assert(sizeof(Word) == 512);

std::uint64_t digest_of(const std::string& facts) {  // FNV-1a
  std::uint64_t digest = 0xcbf29ce484222325;
  for (const char letter : facts) digest = (digest ^ std::uint8_t(letter)) * 0x100000001b3;
  return digest;
}

Word refusal(const std::exception& thrown) {
  Word word{.refused = 1};
  if (const auto* const error = dynamic_cast<const Error*>(&thrown)) {
    write_text(word.text.data(), word.text.size(), error->argument().c_str(), *error);
  } else {
    std::strncpy(word.text.data(), thrown.what(), word.text.size() - 1);
  }
  return word;
}

// The words of all ranks.
std::vector<Word> told(const Collectives& ranks, const Word& own) {
  std::vector<Word> words(std::size_t(ranks.size), own);
  Messages messages;
  for (int other = 0; other < ranks.size; ++other) {
    if (other == ranks.rank) continue;
    messages.sends.push_back({other, &own, sizeof own});
    messages.receives.push_back({other, &words[std::size_t(other)], sizeof own});
  }
  exchange(ranks, messages, nullptr);
  return words;
}

// Where the transport fails, the other ranks find out by it too: this one's own error is the
// reason.
void tell(const Collectives& ranks, const Word& own) {
  try {
    told(ranks, own);
  } catch (const std::exception&) {
  }
}

void compare(const Collectives& ranks, const std::string& facts) {
  const Word own{.digest = digest_of(facts)};
  const std::vector<Word> words = told(ranks, own);
  for (std::size_t rank = 0; rank < words.size(); ++rank) {
    if (words[rank].refused == 0) continue;
    refuse("collectives", this_rank(ranks),
           "rank " + std::to_string(rank) + " refused: " +
               std::string(words[rank].text.data(),
                           strnlen(words[rank].text.data(), words[rank].text.size())));
  }
  for (std::size_t rank = 0; rank < words.size(); ++rank) {
    if (words[rank].digest == own.digest) continue;
    refuse("collectives", this_rank(ranks),
           "rank " + std::to_string(rank) +
               " has another plan, or other sizes, types or options; here: " + facts);
  }
}

}  // namespace

void exchange(const Collectives& ranks, const Messages& messages, void* stream) {
  if (messages.sends.empty() && messages.receives.empty()) return;
  const char* const failure =
      ranks.exchange(ranks.self, messages.sends.data(), messages.sends.size(),
                     messages.receives.data(), messages.receives.size(), stream);
  if (failure) refuse("collectives.exchange", this_rank(ranks), failure, Code::device_failure);
}

void check_collectives(const Collectives& ranks, int size) {
  if (ranks.size != size) {
    refuse("collectives.size", ranks.size,
           "must be " + std::to_string(size) + ", the number of the plan's ranks");
  }
  require(ranks.rank >= 0 && ranks.rank < size, "collectives.rank", ranks.rank,
          "must be from 0 to size - 1");
  require(size == 1 || ranks.exchange != nullptr, "collectives.exchange", "null",
          "must be given for more than one rank");
}

void check_memory(const Collectives& ranks, const Run& run) {
  if (ranks.size == 1 || ranks.memory == run.device.kind) return;
  refuse("collectives.memory", printed_kind(ranks.memory),
         "must be that of the call's device: exchange would move its tensors");
}

void agree(const Collectives& ranks, const std::function<std::string()>& check) {
  if (ranks.size == 1 || ranks.memory != Device::Kind::cpu) {
    check();
    return;
  }
  std::string facts;
  try {
    facts = check();
  } catch (const std::exception& error) {
    tell(ranks, refusal(error));
    throw;
  }
  compare(ranks, facts);
}

}  // namespace regard::distributed
