// Which terms of the specification take part: the half of the meaning without numbers.
#pragma once

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

}  // namespace regard
