// Copies of rows of bytes in the order of a stream, made again in many calls.
#pragma once

#include <nanobind/nanobind.h>

#include <regard/cuda.hpp>
#include <vector>

namespace regard::python {

class GpuCopies {
 public:
  // Bytes from the beginning of one of the addresses that a run has.
  struct Place {
    std::size_t address = 0;  // its number
    std::size_t offset = 0;
  };
  struct Copy {
    Place to, from;
    cuda_memory::RowCopy rows;  // without its addresses
  };
  explicit GpuCopies(std::vector<Copy> copies) : copies_(std::move(copies)) {}

  // Puts them on the stream, in their order. Error: InvalidArgument for too few addresses.
  void run(const std::vector<std::uintptr_t>& addresses, int device, std::uintptr_t stream) const;

 private:
  std::vector<Copy> copies_;
};

void bind_gpu_copies(nanobind::module_& m);

}  // namespace regard::python
