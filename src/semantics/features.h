// Which terms of the specification take part: the half of the meaning without numbers.
#pragma once

#include "semantics/portable.h"

namespace regard {

struct Features {
  bool softcap = false;
  bool bias = false;
  bool mask = false;
  bool row_spans = false;
  bool key_spans = false;
  bool alibi = false;
  bool sink = false;
  bool dropout = false;
  bool positions = false;     // rows and keys stand anywhere in a longer sequence
  bool interval = false;      // causal or a window: a row sees an interval of the keys
  bool signed_scale = false;  // scale <= 0, or next to it: products are scaled one by one

  bool operator==(const Features&) const = default;
};

REGARD_INLINE bool has_spans(const Features& on) { return on.row_spans || on.key_spans; }

// Whether something that a score does not hold may hide any single pair.
REGARD_INLINE bool tests_pairs(const Features& on) { return on.mask || has_spans(on); }

// Whether every feature that is on is among those that a shortcut knows.
REGARD_INLINE bool is_within(const Features& on, const Features& known) {
  const auto& [softcap, bias, mask, row_spans, key_spans, alibi, sink, dropout, positions, interval,
               signed_scale] = on;
  return softcap <= known.softcap && bias <= known.bias && mask <= known.mask &&
         row_spans <= known.row_spans && key_spans <= known.key_spans && alibi <= known.alibi &&
         sink <= known.sink && dropout <= known.dropout && positions <= known.positions &&
         interval <= known.interval && signed_scale <= known.signed_scale;
}

}  // namespace regard
