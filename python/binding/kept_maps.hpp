// The tile maps that a Mask of Python keeps on a GPU, for the calls of many layers.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "problem.hpp"

namespace regard::python {

// A value of make_mask, which calls of one geometry on one stream read. Everything happens in that
// stream's order: making it, reading it, and the framework's reuse of its memory.
struct KeptMap {
  std::string geometry;
  void* stream = nullptr;
  nanobind::object memory;  // and what must live as long
  Mask value;               // not given where calls of this geometry read no map
};

// The maps of some arrays, as long as one object of Python holds them. Calls find them by where the
// arrays lie. Used under the interpreter's lock only.
class KeptMaps {
 public:
  static constexpr std::size_t kMost = 8;
  using Addresses = std::array<const void*, 3>;  // mask, row_spans, key_spans; null: not given

  // Functions of the framework by name: `version()`, which changes whenever the arrays do;
  // `may_keep()`, whether what the current stream makes now can be read by it later; and
  // `allocate(size)`, the address of memory on the GPU, and an object that keeps it.
  explicit KeptMaps(const nanobind::dict& framework);

  static std::shared_ptr<KeptMaps> at(const Addresses& addresses);  // null: there are none
  static std::shared_ptr<KeptMaps> made_at(const Addresses& addresses,
                                           const nanobind::dict& framework);

  // The map of such a call; made if there is none yet. Null where none can be kept now.
  std::shared_ptr<const KeptMap> map_for(const Attention& a, const Run& run);
  // One that is there already, whatever its stream; null without one.
  std::shared_ptr<const KeptMap> found_for(const Attention& a, const Run& run);
  // How many were made so far.
  int made() const { return made_; }

 private:
  void forget_changed();
  std::shared_ptr<const KeptMap> make(const Attention& a, const Run& run, std::string geometry);

  nanobind::object version_, may_keep_, allocate_, seen_version_;
  std::vector<std::shared_ptr<const KeptMap>> all_;  // the oldest first
  int made_ = 0;
};

// Gives a call the kept map of its mask and spans, and holds it until this ends, which must be
// behind the call's launches and under the interpreter's lock.
class UsedMap {
 public:
  UsedMap(Attention& a, const Run& run);

 private:
  std::shared_ptr<const KeptMap> map_;
};

// The same for an explanation, which makes no map.
void use_found_map(Attention& a, const Run& run);

void bind_kept_maps(nanobind::module_& m);

}  // namespace regard::python
