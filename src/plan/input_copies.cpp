// Copies of what the copy engine cannot load.
#include "plan/input_copies.hpp"

#include <string>

#include "plan/boxed_tensor.hpp"
#include "plan/cuda_facts.hpp"
#include "plan/simt_layout.h"
#include "plan/workspace_room.hpp"

namespace regard {
namespace {

constexpr const char* kNames[kInputs] = {"q", "k", "v", "dout"};

template <class Work>
void each_of(InputSet inputs, Work work) {
  for (int n = 0; n < kInputs; ++n) {
    if (inputs.has(Input(n))) work(Input(n));
  }
}

// Calls place(input, offset) for each, and returns the bytes of all.
template <class Place>
int64 lay_out(const Problem& p, InputSet inputs, Place place) {
  WorkspaceRoom room;
  each_of(inputs, [&](Input input) {
    int64 offset = 0;
    room.take(offset, shape_of(p, input).elements() * int64(size_of(p.type)));
    place(input, offset);
  });
  return room.size;
}

std::string names_of(InputSet inputs) {
  std::string text;
  each_of(inputs, [&](Input input) {
    text += (text.empty() ? "" : ", ") + std::string(kNames[int(input)]);
  });
  return text;
}

}  // namespace

InputSet inputs_to_copy(const Problem& p) {
  InputSet inputs;
  if (p.type != Type::f16 && p.type != Type::bf16) return inputs;
  Problem placed = p;
  for (int n = 0; n < kInputs; ++n) view_of(placed, Input(n)).data = nullptr;
  const BackwardBoxes boxes = backward_boxes(placed, {});
  const BoxedTensor* const boxed[] = {&boxes.q, &boxes.k, &boxes.v, &boxes.dout};
  for (int n = 0; n < kInputs; ++n) {
    const InputShape shape = shape_of(p, Input(n));
    const bool given = view_of(p, Input(n)).given() && shape.elements() > 0;
    if (given && !is_boxable(*boxed[n])) inputs.add(Input(n));
  }
  return inputs;
}

const char* why_not_copies(const Problem& p, InputSet inputs) {
  constexpr int64 kLeastKeys = 256;
  if (inputs.empty() || keys_in_reach(p) >= kLeastKeys) return nullptr;
  return "so few keys do not repay copies of inputs that the copy engine cannot load";
}

Problem with_copies(const Problem& p, InputSet inputs, uint8* memory) {
  Problem copied = p;
  lay_out(p, inputs, [&](Input input, int64 offset) {
    view_of(copied, input) = {.data = memory ? memory + offset : nullptr,
                              .type = p.type,
                              .strides = shape_of(p, input).strides()};
  });
  return copied;
}

int64 copies_bytes(const Problem& p, InputSet inputs) {
  return lay_out(p, inputs, [](Input, int64) {});
}

void add_copies_launch(CudaPlan& plan, const Problem& p, const Because& because) {
  int64 heads = 0, rows = 0, count = 0;
  each_of(plan.copies, [&](Input input) {
    const InputShape shape = shape_of(p, input);
    heads = larger(heads, shape.batch * shape.heads);
    rows = larger(rows, shape.rows);
    ++count;
  });
  if (count == 0) return;
  if (because.asked()) {
    because("copied first: ", names_of(plan.copies),
            ": the copy engine loads no f32 beside 16-bit types, no rows that do not begin at 16 "
            "bytes, no strides of 0 or below");
  }
  const KernelConfig c{.kernel = Kernel::copy_inputs,
                       .family = Family::simt,
                       .level = 50,
                       .type = p.type,
                       .tiling = {.rows = 64, .keys = 64, .warps = 8, .stages = 1}};
  plan.launches.push_back({.config = c,
                           .grid = {.heads = int32(heads),
                                    .tiles = int32(divide_up(rows, c.tiling.rows)),
                                    .splits = int32(count)},
                           .threads = c.tiling.warps * 32,
                           .shared_bytes = simt_shared_bytes(c)});
}

}  // namespace regard
