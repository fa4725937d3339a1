// What is done next to products, and at which pace.
#pragma once

#include "semantics/portable.h"

namespace regard {
namespace {

// A step follows each product of tiles, or two of k by vectors. Something may go before each
// product of tiles, too.
struct Nothing {
  REGARD_INLINE void step() {}
};
template <class Beside>
REGARD_INLINE void before_product(Beside& beside) {
  if constexpr (requires { beside.before(); }) beside.before();
}

// What is done next to products derives from this, or has it as a member (and so do its members of
// several words), and is then copied member by member. GCC copies other classes 64 bytes at once.
// Where smaller stores have just written some of these bytes, such a load waits until all stores
// before it, tiles among them, have reached the cache.
struct CopiedByMember {
  CopiedByMember() = default;
  REGARD_INLINE CopiedByMember(const CopiedByMember&) {}
  REGARD_INLINE CopiedByMember& operator=(const CopiedByMember&) { return *this; }
};

// How parts of other work are spread over products of tiles: two with each, one before and one
// after it, if there are more parts than products. The fewer instructions stand between two
// products, the more of these a core has under way.
class Pace {
 public:
  Pace(int64 parts, int64 products)
      : each_(products > 0 ? int32(smaller(2 * kOne, divide_up(parts * kOne, products))) : 0) {}

  REGARD_INLINE bool is_two() const { return each_ > kOne; }
  // After a product, whether a part is due; where it is not two.
  REGARD_INLINE bool is_due() {
    due_ += each_;
    if (due_ < kOne) return false;
    due_ -= int32(kOne);
    return true;
  }

 private:
  static constexpr int64 kOne = 256;
  int32 each_, due_ = 0;
};

}  // namespace
}  // namespace regard
