// Tensors where the device sees them: host memory itself for the CPU, copies on a GPU.
#pragma once

#include <functional>
#include <vector>

#include "regard/cuda.hpp"

namespace regard::cli {

// Host blocks and their copies, which lie in one allocation, each aligned as its original is.
class Mirror {
 public:
  // Refuses a chip: only plans can be made for one.
  explicit Mirror(const Device& device);
  ~Mirror();
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;

  // Blocks first, then one upload(), then the rest. The blocks must stay where they are.
  void add(const void* memory, std::size_t bytes);
  void upload();
  void download();  // waits for the device; also looks at the memory between the copies
  bool written_between() const { return written_between_; }

  // So many bytes of the device that hold NaN; none on the CPU. Once.
  Workspace workspace(std::size_t bytes);

  // The same tensors on the device; on the CPU as they are.
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

// Seconds of one run of work: of the GPU where it runs there, else of the clock.
double device_seconds(const Device& device, const std::function<void()>& work);

// The median of `count` runs; more than one is preceded by a run that is not counted.
double median_device_seconds(const Device& device, int count, const std::function<void()>& work);

}  // namespace regard::cli
