#include "gpu_steps.hpp"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "gil.hpp"

namespace regard::python {

namespace nb = nanobind;
using namespace nb::literals;

void GpuSteps::add(Kind kind, const Rows& to, const Rows& from, std::size_t width,
                   std::size_t rows) {
  steps_.push_back({.kind = kind,
                    .to = {std::get<0>(to), std::get<1>(to)},
                    .from = {std::get<0>(from), std::get<1>(from)},
                    .rows = {.to_pitch = std::get<2>(to),
                             .from_pitch = std::get<2>(from),
                             .width = width,
                             .rows = rows}});
}

void GpuSteps::copy(const Rows& to, const Rows& from, std::size_t width, std::size_t rows) {
  add(Kind::copy, to, from, width, rows);
}

void GpuSteps::place(const Rows& to, const Rows& from, std::size_t width, std::size_t rows) {
  add(Kind::place, to, from, width, rows);
}

void GpuSteps::write(const Place& to) { steps_.push_back({.kind = Kind::write, .to = to}); }

void GpuSteps::wait(const Place& at) { steps_.push_back({.kind = Kind::wait, .to = at}); }

void GpuSteps::run(const std::vector<std::uintptr_t>& addresses, std::uint32_t value, int device,
                   std::uintptr_t stream) const {
  const auto at = [&](const Place& place) {
    const auto [number, offset] = place;
    if (number < addresses.size()) return reinterpret_cast<void*>(addresses[number] + offset);
    throw Error(Code::invalid_argument, "addresses", std::to_string(addresses.size()) + " of them",
                "are too few for address " + std::to_string(number));
  };
  void* const on = reinterpret_cast<void*>(stream);
  without_gil([&] {
    for (const Step& step : steps_) {
      cuda_memory::RowCopy rows = step.rows;
      switch (step.kind) {
        case Kind::write:
          cuda_memory::write_word(device, at(step.to), value, on);
          break;
        case Kind::wait:
          cuda_memory::wait_for_word(device, at(step.to), value, on);
          break;
        case Kind::copy:
        case Kind::place:
          rows.to = at(step.to);
          rows.from = at(step.from);
          (step.kind == Kind::copy ? cuda_memory::copy_rows : cuda_memory::copy_rows_by_kernels)(
              device, &rows, 1, on);
      }
    }
  });
}

void bind_gpu_steps(nb::module_& m) {
  nb::class_<GpuSteps>(m, "GpuSteps",
                       "Copies of rows of bytes, and words, in the order of a stream.")
      .def(nb::init<>())
      .def("copy", &GpuSteps::copy, "to"_a, "from_"_a, "width"_a, "rows"_a,
           "to, from_: the number of an address, and bytes: from there to the first row, and from "
           "one row to the next. width: bytes of a row.")
      .def("place", &GpuSteps::place, "to"_a, "from_"_a, "width"_a, "rows"_a,
           "The same within this GPU's memory, by a kernel.")
      .def("write", &GpuSteps::write, "to"_a, "A word: the number of an address, and bytes.")
      .def("wait", &GpuSteps::wait, "at"_a, "For a word, likewise.")
      .def("run", &GpuSteps::run, "addresses"_a, "value"_a, "device"_a, "stream"_a);
}

}  // namespace regard::python
