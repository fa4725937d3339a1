// Copies to and from the device, and pointers from one to the other.
#include "tensors/mirror.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "command_line/parse.hpp"
#include "tensors/timing.hpp"

namespace regard::cli {

namespace {

constexpr std::size_t kPage = 256;        // alignments up to this are kept
constexpr unsigned char kBetween = 0xff;  // NaN in every float type

}  // namespace

Mirror::Mirror(const Device& device)
    : on_gpu_(device.kind != Device::Kind::cpu), device_(device.index) {
  if (device.kind == Device::Kind::chip) {
    throw UsageError(fmt::format(
        "--device = {}: names a kind of chip, for which `regard explain` and `regard prebuild` "
        "plan; to compute give cpu or cuda:0",
        device.name));
  }
}

Mirror::~Mirror() {
  try {
    if (memory_) cuda_memory::free(device_, memory_);
    if (workspace_) cuda_memory::free(device_, workspace_);
  } catch (const Error&) {
    // The device has failed, and the call that used it has said so.
  }
}

void Mirror::add(const void* memory, std::size_t bytes) {
  if (!on_gpu_ || !memory) return;
  const std::size_t place = reinterpret_cast<std::uintptr_t>(memory) % kPage;
  const std::size_t begin = (end_ + kPage - 1) / kPage * kPage + place;
  auto* const host = static_cast<std::byte*>(const_cast<void*>(memory));
  blocks_.push_back({.host = host, .bytes = bytes, .begin = begin});
  end_ = begin + bytes + kPage;
}

void Mirror::upload() {
  if (!on_gpu_) return;
  memory_ = static_cast<std::byte*>(cuda_memory::allocate(device_, end_));
  std::size_t between = 0;
  for (const Block& block : blocks_) {
    cuda_memory::fill(device_, memory_ + between, kBetween, block.begin - between);
    cuda_memory::to_device(device_, memory_ + block.begin, block.host, block.bytes);
    between = block.begin + block.bytes;
  }
  cuda_memory::fill(device_, memory_ + between, kBetween, end_ - between);
  cuda_memory::synchronize(device_);
}

void Mirror::download() {
  if (!on_gpu_) return;
  cuda_memory::synchronize(device_);
  std::vector<unsigned char> held;
  const auto look = [&](std::size_t begin, std::size_t end) {
    held.resize(end - begin);
    cuda_memory::to_host(device_, held.data(), memory_ + begin, held.size());
    written_between_ |= std::any_of(held.begin(), held.end(), [](auto x) { return x != kBetween; });
  };
  std::size_t between = 0;
  for (const Block& block : blocks_) {
    look(between, block.begin);
    cuda_memory::to_host(device_, block.host, memory_ + block.begin, block.bytes);
    between = block.begin + block.bytes;
  }
  look(between, end_);
}

Workspace Mirror::workspace(std::size_t bytes) {
  if (!on_gpu_ || bytes == 0) return {};
  workspace_ = cuda_memory::allocate(device_, bytes);
  cuda_memory::fill(device_, workspace_, kBetween, bytes);
  cuda_memory::synchronize(device_);
  return {.data = workspace_, .size = bytes};
}

Tensor Mirror::at(Tensor tensor) const {
  if (!on_gpu_ || !tensor.data) return tensor;
  const auto* const data = static_cast<const std::byte*>(tensor.data);
  const auto begins_in = [&](const Block& b) { return data >= b.host && data < b.host + b.bytes; };
  auto found = std::find_if(blocks_.begin(), blocks_.end(), begins_in);
  if (found == blocks_.end()) {  // a tensor without elements may begin at the end of its block
    const auto ends_at = [&](const Block& b) { return data == b.host + b.bytes; };
    found = std::find_if(blocks_.begin(), blocks_.end(), ends_at);
  }
  if (found == blocks_.end()) throw std::logic_error("a tensor that was not added to the mirror");
  tensor.data = memory_ + found->begin + (data - found->host);
  return tensor;
}

Attention Mirror::at(const Attention& attention) const {
  Attention a = attention;
  for (Tensor* tensor :
       {&a.q, &a.k, &a.v, &a.bias, &a.mask, &a.row_spans, &a.key_spans, &a.alibi_slopes, &a.sink,
        &a.cu_seqlens_q, &a.cu_seqlens_k, &a.seqused_q, &a.seqused_k, &a.q_positions}) {
    *tensor = at(*tensor);
  }
  return a;
}

ForwardOutputs Mirror::at(const ForwardOutputs& o) const {
  return {.out = at(o.out), .lse = at(o.lse)};
}

BackwardInputs Mirror::at(const BackwardInputs& i) const {
  return {.out = at(i.out), .lse = at(i.lse), .dout = at(i.dout), .dlse = at(i.dlse)};
}

Gradients Mirror::at(const Gradients& g) const {
  return {.dq = at(g.dq),
          .dk = at(g.dk),
          .dv = at(g.dv),
          .dbias = at(g.dbias),
          .dsink = at(g.dsink),
          .accumulate = g.accumulate};
}

double device_seconds(const Device& device, const std::function<void()>& work) {
  return device.kind == Device::Kind::cuda ? cuda_seconds(device.index, work) : seconds_of(work);
}

double median_device_seconds(const Device& device, int count, const std::function<void()>& work) {
  if (count > 1) work();
  std::vector<double> times;
  for (int n = 0; n < count; ++n) times.push_back(device_seconds(device, work));
  return median(std::move(times));
}

}  // namespace regard::cli
