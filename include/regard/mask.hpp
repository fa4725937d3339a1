/// \file
/// Mask: what a bool mask and spans show, as a value that many calls share.
#pragma once

#include <memory>

#pragma GCC visibility push(default)

namespace regard {

struct MaskContents;  // the library's own

/// What make_mask makes of a bool mask and spans. Calls take it as Attention::visible. A copy costs
/// a counter and shares what the original holds; any number of threads may use it at once.
class Mask {
 public:
  /// Not given.
  Mask() = default;

  /// Whether this is a mask at all.
  bool given() const noexcept { return contents_ != nullptr; }

 private:
  friend struct MaskContents;
  std::shared_ptr<const MaskContents> contents_;
};

}  // namespace regard

#pragma GCC visibility pop
