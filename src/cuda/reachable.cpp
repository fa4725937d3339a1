// Asks the driver about addresses, as seldom as it can.
#include "cuda/reachable.hpp"

#include <algorithm>

#include "problem/refuse.hpp"

namespace regard::cuda_backend {

void ReachableMemory::check(const char* name, const void* pointer) {
  const auto address = reinterpret_cast<DevicePointer>(pointer);
  if (!pointer || is_known(address) || is_reachable(address)) return;
  refuse_unreachable(name, pointer);
}

bool ReachableMemory::is_known(DevicePointer address) const {
  return std::any_of(known_.begin(), known_.end(), [&](const Range& range) {
    return range.begin <= address && address < range.end;
  });
}

bool ReachableMemory::is_reachable(DevicePointer address) {
  DevicePointer reachable_at = 0, range = 0, mapping = 0;
  std::size_t range_size = 0, mapping_size = 0;
  int attributes[] = {kReachableAt, kRangeBegin, kRangeSize, kMappingBegin, kMappingSize};
  void* values[] = {&reachable_at, &range, &range_size, &mapping, &mapping_size};
  // A driver that does not know mappings is asked about each address alone.
  if (d_.pointer_attributes(5, attributes, values, address) != kSuccess) {
    range_size = 0;
    cuda_backend::check(d_.pointer_attributes(1, attributes, values, address),
                        "cuPointerGetAttributes", device_);
  }
  if (reachable_at != address) return false;
  // Reserved addresses are one range, with a mapping for each part that has memory; an allocation
  // may be one of many in a mapping.
  known_[count_++ % known_.size()] = {.begin = std::max(range, mapping),
                                      .end = std::min(range + range_size, mapping + mapping_size)};
  return true;
}

void ReachableMemory::refuse_unreachable(const char* name, const void* pointer) const {
  int ordinal = -1;
  std::uint32_t kind = 0;
  int attributes[] = {kOrdinal, kMemoryType};
  void* values[] = {&ordinal, &kind};
  cuda_backend::check(
      d_.pointer_attributes(2, attributes, values, reinterpret_cast<DevicePointer>(pointer)),
      "cuPointerGetAttributes", device_);
  const std::string device = "cuda:" + std::to_string(device_);
  if (kind == 0) {
    refuse(name, pointer, "is memory of the host that " + device + " does not know");
  }
  refuse(name, pointer,
         "is memory of cuda:" + std::to_string(ordinal) + " that " + device + " cannot reach");
}

}  // namespace regard::cuda_backend
