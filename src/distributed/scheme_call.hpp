// What a scheme does in one call of one rank: its memory, what it sends, and the calls of Regard
// that it makes. A file for each scheme.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "distributed/memory.hpp"
#include "distributed/part.hpp"
#include "distributed/ranks.hpp"

namespace regard::distributed {

class SchemeCall {
 public:
  virtual ~SchemeCall() = default;

  // Bytes, known before anything is read, written or sent.
  virtual std::int64_t workspace() const = 0;
  // What has to be equal on all ranks, in addition to the part's own facts.
  virtual std::string facts() const { return {}; }
  // The whole pass. Called once.
  virtual void run(const Collectives&, Memory&) = 0;
};

// The part lives longer. Errors where the calls that they will make are refused.
std::unique_ptr<SchemeCall> gather_call(const Part&);  // and halo
std::unique_ptr<SchemeCall> ulysses_call(const Part&);
std::unique_ptr<SchemeCall> ring_call(const Part&);

}  // namespace regard::distributed
