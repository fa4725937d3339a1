// Building, poisoning and inspecting slabs.
#include "tensors/slab.hpp"

#include <limits>
#include <utility>

namespace regard::cli {

Slab::Slab(Random& random, std::string name, Type type, const Sizes& sizes, SlabLayout layout)
    : name(std::move(name)) {
  const int rank = static_cast<int>(sizes.size());
  tensor.type = type;
  tensor.rank = rank;
  std::vector<int> order;  // outermost first
  for (int axis = 0; axis < rank; ++axis) {
    order.push_back(axis);
    tensor.sizes[axis] = sizes[axis];
  }
  // Half of the tensors keep the usual order of the axes.
  const Index step = layout.for_tma ? 16 / static_cast<Index>(size_of(type)) : 1;
  const int movable = layout.free_last && random.chance(0.3) ? rank : rank - 1;
  if (random.chance(0.5)) {
    for (int n = movable - 1; n > 0; --n) std::swap(order[n], order[random.between(0, n)]);
  }
  Index stride = 1;
  if (layout.free_last && random.chance(0.15)) stride = random.between(2, 3);
  for (int n = rank - 1; n >= 0; --n) {
    const int axis = order[n];
    if (layout.may_broadcast && !layout.for_tma && n < rank - 1 && axis != rank - 1 &&
        random.chance(0.04)) {
      tensor.strides[axis] = 0;
      continue;
    }
    tensor.strides[axis] = stride;
    stride *= std::max<Index>(sizes[axis], 1);
    if (random.chance(0.25)) stride += random.between(1, 9);
    stride = (stride + step - 1) / step * step;
  }
  Index lead = random.chance(0.5) ? random.between(0, 15) * step : 0;
  for (int axis = 0; axis < rank - 1; ++axis) {
    if (layout.for_tma || sizes[axis] == 0 || !random.chance(0.04)) continue;
    lead += (sizes[axis] - 1) * tensor.strides[axis];
    stride -= (sizes[axis] - 1) * tensor.strides[axis];
    tensor.strides[axis] = -tensor.strides[axis];
  }
  const std::size_t width = size_of(type);
  memory.assign(static_cast<std::size_t>(stride + lead + random.between(0, 8)) * width,
                std::byte{0xff});
  tensor.data = memory.data() + static_cast<std::size_t>(lead) * width;
}

double Slab::get_before(Index offset) const {
  const std::size_t lead =
      static_cast<std::size_t>(static_cast<std::byte*>(tensor.data) - memory.data());
  return load(before.data() + lead, tensor.type, offset);
}

bool Slab::changed_outside() const {
  std::vector<std::byte> expected = before;
  const std::size_t lead =
      static_cast<std::size_t>(static_cast<std::byte*>(tensor.data) - memory.data());
  const std::size_t width = size_of(tensor.type);
  for_each_offset(tensor, [&](Index offset) {
    const std::size_t at = lead + static_cast<std::size_t>(offset) * width;
    std::memcpy(expected.data() + at, memory.data() + at, width);
  });
  return expected != memory;
}

void Slab::poison_rows(Random& random, const std::unordered_set<Index>& seen) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  Tensor rows = tensor;
  const int last = tensor.rank - 1;
  rows.sizes[last] = 1;
  if (tensor.sizes[last] == 0) return;
  for_each_offset(rows, [&](Index offset) {
    if (seen.contains(offset)) return;
    const double poison =
        random.pick({std::numeric_limits<double>::quiet_NaN(), kInfinity, -kInfinity});
    for (Index n = 0; n < tensor.sizes[last]; ++n) {
      store(tensor.data, tensor.type, offset + n * tensor.strides[last], poison);
    }
  });
}

}  // namespace regard::cli
