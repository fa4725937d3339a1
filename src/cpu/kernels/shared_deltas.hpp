// delta of a block's rows, which every chunk of keys needs: the first task that comes to the block
// computes it for the others. Whoever comes meanwhile computes it for itself and does not wait.
#pragma once

#include "semantics/portable.h"

namespace regard {
namespace {

template <class Real>
class SharedDeltas {
 public:
  // values: of the block's rows, panel by panel. state: 0 at first; null: nothing is shared.
  SharedDeltas(Real* values, int32* state)
      : values_(values),
        state_(state),
        ready_(state && __atomic_load_n(state, __ATOMIC_ACQUIRE) == kReady),
        writes_(state && !ready_ && claim()) {}

  bool are_ready() const { return ready_; }
  bool are_wanted() const { return writes_; }  // whether this task computes them for the others

  // `count` of them, from the block's `first` on.
  void load(Real* to, int64 first, int64 count) const {
    __builtin_memcpy(to, values_ + first, uint64(count) * sizeof(Real));
  }
  void store(const Real* from, int64 first, int64 count) const {
    __builtin_memcpy(values_ + first, from, uint64(count) * sizeof(Real));
  }
  // After the last of them is stored.
  void publish() const {
    if (writes_) __atomic_store_n(state_, kReady, __ATOMIC_RELEASE);
  }

 private:
  static constexpr int32 kNone = 0, kClaimed = 1, kReady = 2;

  bool claim() const {
    int32 found = kNone;
    return __atomic_compare_exchange_n(state_, &found, kClaimed, false, __ATOMIC_RELAXED,
                                       __ATOMIC_RELAXED);
  }

  Real* values_;
  int32* state_;
  bool ready_, writes_;
};

}  // namespace
}  // namespace regard
