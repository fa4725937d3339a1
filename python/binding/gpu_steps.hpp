// Work in the order of a stream, made again in many calls: copies of rows of bytes, words for other
// GPUs, and waiting for theirs.
#pragma once

#include <nanobind/nanobind.h>

#include <regard/cuda.hpp>
#include <tuple>
#include <vector>

namespace regard::python {

class GpuSteps {
 public:
  // The number of an address that a run has, and bytes from there.
  using Place = std::tuple<std::size_t, std::size_t>;
  // Rows: likewise the first one, and bytes from one to the next.
  using Rows = std::tuple<std::size_t, std::size_t, std::size_t>;

  // Appends a step.
  void copy(const Rows& to, const Rows& from, std::size_t width, std::size_t rows);
  void place(const Rows& to, const Rows& from, std::size_t width, std::size_t rows);
  void write(const Place& to);
  void wait(const Place& at);

  // Puts all steps on the stream, in their order. value: of the words that are written, and waited
  // for. Error: InvalidArgument for too few addresses.
  void run(const std::vector<std::uintptr_t>& addresses, std::uint32_t value, int device,
           std::uintptr_t stream) const;

 private:
  enum class Kind { copy, place, write, wait };
  struct Step {
    Kind kind = Kind::copy;
    Place to{}, from{};
    cuda_memory::RowCopy rows{};  // of a copy, without its addresses
  };
  void add(Kind, const Rows& to, const Rows& from, std::size_t width, std::size_t rows);

  std::vector<Step> steps_;
};

void bind_gpu_steps(nanobind::module_& m);

}  // namespace regard::python
