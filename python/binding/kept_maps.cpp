#include "kept_maps.hpp"

#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <cstdint>
#include <map>

#include "direct_options.hpp"
#include "gil.hpp"

namespace regard::python {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// Never destroyed: calls may still be made while the process ends.
std::map<KeptMaps::Addresses, std::weak_ptr<KeptMaps>>& known() {
  static auto* const maps = new std::map<KeptMaps::Addresses, std::weak_ptr<KeptMaps>>;
  return *maps;
}

template <class Value>
void append(std::string& bytes, const Value& value) {
  static_assert(std::is_trivially_copyable_v<Value>);
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void append(std::string& bytes, const Tensor& x) {
  append(bytes, x.given());
  append(bytes, x.type);
  append(bytes, x.rank);
  for (int axis = 0; axis < x.rank; ++axis) {
    append(bytes, x.sizes[axis]);
    append(bytes, x.strides[axis]);
  }
}

// What the tiles of a call's kernels depend on, and more: everything but addresses, seeds and the
// scale. The library itself compares what a map was made of with what a call would make.
std::string geometry_of(const Attention& call, const Run& run) {
  Attention a = call;
  a.scale.reset();
  a.dropout.seed = a.dropout.offset = 0;
  std::string bytes = run.backend + '\0';
  append(bytes, run.device.index);
  append(bytes, run.multiprocessors);
  append(bytes, a.continue_from);
  for (const Tensor* x : {&a.q, &a.k, &a.v}) append(bytes, *x);
  visit_options(a, [&](const char*, auto& field) {
    using Field = std::decay_t<decltype(field)>;
    if constexpr (std::is_same_v<Field, Window>) {
      append(bytes, field.left);
      append(bytes, field.right);
    } else if constexpr (!std::is_same_v<Field, std::optional<double>>) {
      append(bytes, field);
    }
  });
  return bytes;
}

// Null for a call that shows every pair, is on the CPU, or has tables in memory that may change.
std::shared_ptr<KeptMaps> maps_of(const Attention& a, const Run& run) {
  if (run.device.kind != Device::Kind::cuda || is_ragged(a) || a.q_positions.given()) return {};
  const KeptMaps::Addresses addresses = {a.mask.data, a.row_spans.data, a.key_spans.data};
  if (addresses == KeptMaps::Addresses{}) return {};
  return KeptMaps::at(addresses);
}

void use(const KeptMap& map, Attention& a) {
  a.visible = map.value;
  a.mask = a.row_spans = a.key_spans = {};
}

}  // namespace

KeptMaps::KeptMaps(const nb::dict& framework)
    : version_(framework["version"]),
      may_keep_(framework["may_keep"]),
      allocate_(framework["allocate"]),
      seen_version_(version_()) {}

std::shared_ptr<KeptMaps> KeptMaps::at(const Addresses& addresses) {
  const auto found = known().find(addresses);
  return found == known().end() ? nullptr : found->second.lock();
}

// The arrays live as long as the maps, so that no other array is at their addresses.
std::shared_ptr<KeptMaps> KeptMaps::made_at(const Addresses& addresses, const nb::dict& framework) {
  if (std::shared_ptr<KeptMaps> maps = at(addresses)) return maps;
  std::erase_if(known(), [](const auto& entry) { return entry.second.expired(); });
  auto maps = std::make_shared<KeptMaps>(framework);
  known()[addresses] = maps;
  return maps;
}

void KeptMaps::forget_changed() {
  nb::object version = version_();
  if (version.equal(seen_version_)) return;
  seen_version_ = std::move(version);
  all_.clear();
}

std::shared_ptr<const KeptMap> KeptMaps::map_for(const Attention& a, const Run& run) {
  if (!nb::cast<bool>(may_keep_())) return {};
  forget_changed();
  std::string geometry = geometry_of(a, run);
  for (const auto& map : all_) {
    if (map->stream == run.stream && map->geometry == geometry) return map;
  }
  return make(a, run, std::move(geometry));
}

std::shared_ptr<const KeptMap> KeptMaps::found_for(const Attention& a, const Run& run) {
  forget_changed();
  const std::string geometry = geometry_of(a, run);
  const auto found = std::find_if(all_.begin(), all_.end(),
                                  [&](const auto& map) { return map->geometry == geometry; });
  return found == all_.end() ? nullptr : *found;
}

// A call is right without a kept map: where none can be made, it makes its own, or says what is
// wrong with it.
std::shared_ptr<const KeptMap> KeptMaps::make(const Attention& a, const Run& run,
                                              std::string geometry) {
  auto map = std::make_shared<KeptMap>();
  map->geometry = std::move(geometry);
  map->stream = run.stream;
  const nb::object version = seen_version_;
  try {
    if (const std::size_t size = mask_memory(a, run); size > 0) {
      const nb::tuple memory(allocate_(size));
      map->memory = memory[1];
      const Workspace given{.data = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(memory[0])),
                            .size = size};
      without_gil([&] { map->value = make_mask(a, given, run); });
      ++made_;
    }
  } catch (const Error&) {
    map->memory.reset();
  } catch (nb::python_error&) {
    map->memory.reset();
  }
  // Another thread may have changed the arrays meanwhile: then this map is of the old ones.
  if (!version.equal(seen_version_) || !version.equal(version_())) return {};
  if (all_.size() == kMost) all_.erase(all_.begin());
  all_.push_back(map);
  return map;
}

UsedMap::UsedMap(Attention& a, const Run& run) {
  const std::shared_ptr<KeptMaps> maps = maps_of(a, run);
  map_ = maps ? maps->map_for(a, run) : nullptr;
  if (map_ && map_->value.given()) use(*map_, a);
}

void use_found_map(Attention& a, const Run& run) {
  const std::shared_ptr<KeptMaps> maps = maps_of(a, run);
  const std::shared_ptr<const KeptMap> map = maps ? maps->found_for(a, run) : nullptr;
  if (map && map->value.given()) use(*map, a);
}

void bind_kept_maps(nb::module_& m) {
  nb::class_<KeptMaps>(m, "KeptMaps", "The tile maps of a Mask's arrays on a GPU.")
      .def_static(
          "of",
          [](std::uintptr_t mask, std::uintptr_t row_spans, std::uintptr_t key_spans,
             const nb::typed<nb::dict, nb::str, nb::any>& framework) {
            const auto at = [](std::uintptr_t x) { return reinterpret_cast<const void*>(x); };
            return KeptMaps::made_at({at(mask), at(row_spans), at(key_spans)}, framework);
          },
          "mask"_a, "row_spans"_a, "key_spans"_a, "framework"_a,
          "The maps of the arrays at these addresses; 0 is none. Calls find them while it lives.")
      .def_prop_ro("made", &KeptMaps::made, "How many maps were made so far.");
}

}  // namespace regard::python
