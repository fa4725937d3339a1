// Backend: where problems run, as the API sees it.
#pragma once

#include "problem/problem.h"
#include "regard/regard.hpp"

namespace regard {

class Backend {
 public:
  // Whether the host may read tables of sequences, and copies them when it describes a problem.
  virtual bool reads_tables() const = 0;

  // Bytes; an Error where the problem is not supported.
  virtual int64 workspace(const Problem&, const Run&) const = 0;

  virtual void run(const Problem&, const Run&) const = 0;

  // Everything except pairs and flops.
  virtual Explanation explain(const Problem&, const Run&) const = 0;

 protected:
  ~Backend() = default;
};

}  // namespace regard
