// Backend: where problems run, as the API sees it.
#pragma once

#include <memory>

#include "problem/mask_contents.hpp"
#include "problem/problem.h"
#include "regard/regard.hpp"

namespace regard {

class Backend {
 public:
  // Whether the host may read tables of sequences, and copies them when it describes a problem.
  virtual bool reads_tables() const = 0;

  // Bytes; an Error where the problem is not supported.
  virtual int64 workspace(const Problem&, const Run&) const = 0;

  // maps: those of the call's Mask; null without one.
  virtual void run(const Problem&, const MadeMaps* maps, const Run&) const = 0;

  // Everything except pairs and flops.
  virtual Explanation explain(const Problem&, const MadeMaps* maps, const Run&) const = 0;

  // What a Mask for such calls keeps next to its tensors: the bytes that it takes of the caller's
  // memory; and the maps, null where there are none.
  virtual int64 mask_memory(const Problem& forward, const Run&) const = 0;
  virtual std::shared_ptr<const MadeMaps> make_maps(const Problem& forward, const Workspace&,
                                                    const Run&) const = 0;

 protected:
  ~Backend() = default;
};

}  // namespace regard
