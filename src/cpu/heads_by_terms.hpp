// Which key heads the kernels by terms serve, backward: those of long sequences (repays_terms) that
// hold no infinity and no NaN. Sums of terms have neither: an infinity less itself is NaN.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/batch.hpp"
#include "regard/regard.hpp"

namespace regard::cpu_backend {

class HeadsByTerms {
 public:
  // Reads q, k, v and dout, which are f16, and dlse and delta once.
  HeadsByTerms(const Problem&, const Batch&, int workers, const Run&);

  // Of a key head with its query heads.
  bool operator()(int64 b, int64 kv) const { return served_[std::size_t(b * heads_ + kv)] != 0; }

 private:
  int64 heads_;
  std::vector<std::uint8_t> served_;
};

}  // namespace regard::cpu_backend
