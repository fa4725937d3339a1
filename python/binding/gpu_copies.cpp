#include "gpu_copies.hpp"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>

#include "gil.hpp"

namespace regard::python {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Side = std::tuple<std::size_t, std::size_t, std::size_t>;  // address, offset, pitch

GpuCopies::Copy copy_of(const std::tuple<Side, Side, std::size_t, std::size_t>& given) {
  const auto& [to, from, width, rows] = given;
  return {.to = {std::get<0>(to), std::get<1>(to)},
          .from = {std::get<0>(from), std::get<1>(from)},
          .rows = {.to_pitch = std::get<2>(to),
                   .from_pitch = std::get<2>(from),
                   .width = width,
                   .rows = rows}};
}

}  // namespace

void GpuCopies::run(const std::vector<std::uintptr_t>& addresses, int device,
                    std::uintptr_t stream) const {
  const auto at = [&](const Place& place) {
    if (place.address < addresses.size()) return addresses[place.address] + place.offset;
    throw Error(Code::invalid_argument, "addresses", std::to_string(addresses.size()) + " of them",
                "are too few for address " + std::to_string(place.address));
  };
  std::vector<cuda_memory::RowCopy> copies;
  copies.reserve(copies_.size());
  for (const Copy& copy : copies_) {
    copies.push_back(copy.rows);
    copies.back().to = reinterpret_cast<void*>(at(copy.to));
    copies.back().from = reinterpret_cast<const void*>(at(copy.from));
  }
  without_gil([&] {
    cuda_memory::copy_rows(device, copies.data(), copies.size(),
                           reinterpret_cast<void*>(stream));
  });
}

void bind_gpu_copies(nb::module_& m) {
  nb::class_<GpuCopies>(m, "GpuCopies", "Copies of rows of bytes in the order of a stream.")
      .def(
          "__init__",
          [](GpuCopies* self,
             const std::vector<std::tuple<Side, Side, std::size_t, std::size_t>>& copies) {
            std::vector<GpuCopies::Copy> made;
            for (const auto& copy : copies) made.push_back(copy_of(copy));
            new (self) GpuCopies(std::move(made));
          },
          "copies"_a,
          "Each is (to, from, bytes of a row, rows); to and from are the number of an address, and "
          "bytes: the first row's offset, and from one row to the next.")
      .def("run", &GpuCopies::run, "addresses"_a, "device"_a, "stream"_a);
}

}  // namespace regard::python
