// A layer of a model on a device, with a mask of documents: calls with its tensors, or with a Mask.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "tests/cuda/fake.hpp"

namespace regard::tests {

struct LayerSizes {
  std::int64_t batch = 2, heads_q = 2, heads_kv = 1, len_q = 270, len_k = 300, dim = 32;
};

// Device memory is the host's (driver.hpp), so that a test reads and writes it.
struct Layer {
  LayerSizes s;
  DeviceBytes memory;
  Attention a;
  ForwardOutputs outputs;
  BackwardInputs inputs;
  Gradients gradients;
  Run run{.device = cuda(0)};

  explicit Layer(const LayerSizes& sizes = {}, unsigned seed = 1)
      : s(sizes), memory(0, 12 * room()) {
    std::memset(memory.data(), 0, 12 * room());
    const auto q = [&](int at) {
      return Tensor(part(at), f16, {s.batch, s.heads_q, s.len_q, s.dim});
    };
    const auto k = [&](int at) {
      return Tensor(part(at), f16, {s.batch, s.heads_kv, s.len_k, s.dim});
    };
    a.q = q(0), a.k = k(1), a.v = k(2);
    outputs.out = q(3);
    outputs.lse = Tensor(part(4), f32, {s.batch, s.heads_q, s.len_q});
    inputs = {.out = q(3), .lse = outputs.lse, .dout = q(5), .dlse = {}};
    gradients = {.dq = q(6), .dk = k(7), .dv = k(8), .dbias = {}, .dsink = {}};
    a.deterministic = true;
    for (const int at : {0, 1, 2, 5}) draw(at, seed);
    write_documents();
  }

  std::size_t room() const {  // of the largest tensor, and at least of the spans and tables
    return std::size_t(s.batch * s.heads_q * (s.len_q + s.len_k) * s.dim * 4 + 1023) / 256 * 256;
  }
  char* part(int number) const {
    return static_cast<char*>(memory.data()) + std::size_t(number) * room();
  }

  void forward() const { regard::forward(a, outputs, run); }
  void backward() const { regard::backward(a, inputs, gradients, run); }
  // What both passes write.
  std::string results() const {
    forward();
    backward();
    return std::string(part(3), 2 * room()) + std::string(part(6), 3 * room());
  }
  void clear_results() const {
    std::memset(part(3), 0x55, 2 * room());
    std::memset(part(6), 0x55, 3 * room());
  }

 private:
  // Halves from -1 to 1.
  void draw(int at, unsigned seed) {
    auto* const values = reinterpret_cast<std::uint16_t*>(part(at));
    for (std::size_t n = 0; n < room() / 2; ++n) {
      seed = seed * 1664525u + 1013904223u;
      values[n] = std::uint16_t((seed >> 16 & 0x8000) | 0x3000 | (seed >> 9 & 0xbff));
    }
  }
  // Each row sees the keys of its document.
  void write_documents() {
    auto* const spans = reinterpret_cast<std::int32_t*>(part(9));
    const std::int64_t document = s.len_q / 3 + 1;
    for (std::int64_t i = 0; i < s.len_q; ++i) {
      const std::int64_t first = i / document * document;
      spans[2 * i] = std::int32_t(first * s.len_k / s.len_q);
      spans[2 * i + 1] = std::int32_t((first + document) * s.len_k / s.len_q);
    }
    a.row_spans = Tensor(spans, i32, {s.len_q, 2});
  }
};

// A Mask of an Attention in device memory of its own.
struct DeviceMask {
  std::size_t bytes;
  DeviceBytes memory;
  Mask value;

  DeviceMask(const Attention& a, const Run& run)
      : bytes(mask_memory(a, run)), memory(run.device.index, bytes + 256) {
    std::memset(memory.data(), 0xa5, bytes + 256);
    value = make_mask(a, {.data = memory.data(), .size = bytes}, run);
  }

  // The Attention with the Mask in place of its tensors.
  Attention in(Attention a) const {
    a.mask = a.row_spans = a.key_spans = {};
    a.visible = value;
    return a;
  }
};

}  // namespace regard::tests
