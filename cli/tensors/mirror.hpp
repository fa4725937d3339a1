// Mirror: tensors where the device can read them, in host memory for the CPU, copies on a GPU.
#pragma once

#include <functional>
#include <vector>

#include "regard/cuda.hpp"

namespace regard::cli {

// Blocks of host memory and their copies. The copies lie in one allocation, and each has the
// alignment of its original.
class Mirror {
 public:
  // Refuses a chip: only plans can be made for one.
  explicit Mirror(const Device& device);
  ~Mirror();
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;

  // First add() all blocks, then upload() once. The blocks must stay where they are.
  void add(const void* memory, std::size_t bytes);
  void upload();
  void download();  // waits for the device, and looks at the memory between the copies
  bool written_between() const { return written_between_; }

  // A workspace of so many bytes that hold NaN; empty on the CPU. May be called once.
  Workspace workspace(std::size_t bytes);

  // The same tensors on the device; on the CPU, the tensors themselves.
  Tensor at(Tensor tensor) const;
  Attention at(const Attention& attention) const;
  ForwardOutputs at(const ForwardOutputs& outputs) const;
  BackwardInputs at(const BackwardInputs& inputs) const;
  Gradients at(const Gradients& gradients) const;

 private:
  struct Block {
    std::byte* host;
    std::size_t bytes;
    std::size_t begin;  // in the allocation
  };

  bool on_gpu_ = false;
  int device_ = 0;
  std::vector<Block> blocks_;
  std::byte* memory_ = nullptr;
  void* workspace_ = nullptr;
  std::size_t end_ = 0;
  bool written_between_ = false;
};

// Seconds of one run of work, by the events of a GPU or by the host's clock.
double device_seconds(const Device& device, const std::function<void()>& work);

// The median of `count` runs. If there are several, a run that does not count comes first.
double median_device_seconds(const Device& device, int count, const std::function<void()>& work);

}  // namespace regard::cli
