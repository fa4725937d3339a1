// Which terms of the specification take part: the half of the meaning without numbers.
#pragma once

#include "semantics/portable.h"

namespace regard {

struct Features {
  bool softcap = false;
  bool bias = false;
  bool mask = false;
  bool alibi = false;
  bool sink = false;
  bool dropout = false;
  bool interval = false;      // causal or a window: a row sees an interval of the keys
  bool signed_scale = false;  // scale <= 0, or next to it: products are scaled one by one

  bool operator==(const Features&) const = default;
};

// Whether every feature that is on is among those that a shortcut knows.
REGARD_INLINE bool is_within(const Features& on, const Features& known) {
  const auto& [softcap, bias, mask, alibi, sink, dropout, interval, signed_scale] = on;
  return softcap <= known.softcap && bias <= known.bias && mask <= known.mask &&
         alibi <= known.alibi && sink <= known.sink && dropout <= known.dropout &&
         interval <= known.interval && signed_scale <= known.signed_scale;
}

}  // namespace regard
