// Keys with their values, as schemes that move rows of keys hold and send them: (n, B, Hkv, D +
// Dv).
#pragma once

#include <cstddef>
#include <cstdint>

#include "distributed/part.hpp"
#include "distributed/views.hpp"
#include "plan/count.h"

namespace regard::distributed {

enum class Half : bool { keys, values };
inline constexpr Half kHalves[] = {Half::keys, Half::values};

class KeyRows {
 public:
  explicit KeyRows(const Part& part) : KeyRows(part, part.whole().heads_kv) {}
  // Of so many heads.
  KeyRows(const Part& part, std::int64_t heads)
      : batch_(part.batch()),
        heads_(heads),
        size_(part.whole().head_size),
        size_v_(part.whole().head_size_v) {}

  // Bytes of one key and its value, for all batch entries and these heads.
  std::int64_t bytes(Type type) const {
    return (Count(batch_) * heads_ * (size_ + size_v_) * std::int64_t(size_of(type))).value();
  }
  // n rows of keys or of values, (B, Hkv, n, D or Dv).
  Tensor view(void* memory, Type type, std::int64_t n, Half half) const {
    const Tensor both = rows_first(memory, type, batch_, heads_, n, size_ + size_v_);
    return slice(both, 3, half == Half::keys ? Rows{0, size_} : Rows{size_, size_ + size_v_});
  }

 private:
  std::int64_t batch_, heads_, size_, size_v_;
};

}  // namespace regard::distributed
