// Copies of what TMA cannot load, or mma only one element at a time.
#include "plan/cuda/input_copies.hpp"

#include <cstdint>
#include <string>

#include "plan/cuda/facts.hpp"
#include "plan/cuda/launches.hpp"
#include "plan/cuda/tma_tensor.hpp"

namespace regard {
namespace {

constexpr int kRows = 64;  // of a block
constexpr const char* kNames[kInputs] = {"q", "k", "v", "dout"};

template <class Work>
void each_of(InputSet inputs, Work work) {
  for (int n = 0; n < kInputs; ++n) {
    if (inputs.has(Input(n))) work(Input(n));
  }
}

Count elements(const InputShape& x) { return Count(x.batch) * x.heads * x.rows * x.row(); }

// Calls place(input, offset) for each, and returns the bytes of all.
template <class Place>
Count lay_out(const Problem& p, InputSet inputs, Place place) {
  MemoryLayout<256> layout;
  each_of(inputs, [&](Input input) {
    place(input, layout.take(elements(shape_of(p, input)) * int64(size_of(p.type))));
  });
  return layout.size();
}

// Elements of k or v in memory: what heads or batch entries share counts once.
Count distinct_elements(const Problem& p, Input input) {
  const InputShape shape = shape_of(p, input);
  const Strides& s = view_of(p, input).strides;
  return Count(s.batch == 0 ? 1 : shape.batch) * (s.head == 0 ? 1 : shape.heads) *
         (s.row == 0 ? 1 : shape.rows) * shape.columns;
}

BlockGrid copies_grid(const Problem& p, InputSet inputs) {
  int64 heads = 0, rows = 0;
  int32 count = 0;
  each_of(inputs, [&](Input input) {
    const InputShape shape = shape_of(p, input);
    heads = larger(heads, shape.batch * shape.heads);
    rows = larger(rows, shape.rows);
    ++count;
  });
  const auto number = [](int64 x) { return int32(smaller<int64>(x, INT32_MAX)); };
  return {.heads = number(heads), .tiles = number(divide_up(rows, kRows)), .splits = count};
}

std::string names_of(InputSet inputs) {
  std::string text;
  each_of(inputs, [&](Input input) {
    text += (text.empty() ? "" : ", ") + std::string(kNames[int(input)]);
  });
  return text;
}

// The problem as long as no addresses are known.
Problem without_data(const Problem& p) {
  Problem placed = p;
  for (int n = 0; n < kInputs; ++n) view_of(placed, Input(n)).data = nullptr;
  return placed;
}

bool rows_begin_at_16(const Problem& p, Input input) {
  const InputShape shape = shape_of(p, input);
  return rows_begin_at_16(view_of(p, input), shape.batch, shape.heads, shape.rows);
}

// Few rows read keys and values as seldom as a copy would.
bool has_rows_for_copies(const Problem& p) {
  constexpr int64 kLeastRows = 128;
  const Sizes& s = p.sizes;
  return s.group() * mean_length(p, s.rows_q, s.len_q) >= kLeastRows;
}

}  // namespace

InputSet inputs_to_align(const Problem& p) {
  if ((p.type != Type::f16 && p.type != Type::bf16) || is_aligned(p)) return {};
  const Problem placed = without_data(p);
  InputSet inputs;
  for (const Input input : {Input::q, Input::k, Input::v}) {
    if (!rows_begin_at_16(placed, input)) inputs.add(input);
  }
  if (inputs.empty() || !has_rows_for_copies(p)) return {};
  const bool may_copy_dout = p.dout.given() && p.dout.type == p.type;
  if (may_copy_dout && !rows_begin_at_16(placed, Input::dout)) inputs.add(Input::dout);
  // The kernel reads all inputs in one way.
  if (why_not_copies(p, inputs) || !is_aligned(with_copies(p, inputs, nullptr))) return {};
  return inputs;
}

InputSet inputs_to_copy(const Problem& p) {
  InputSet inputs;
  if (p.type != Type::f16 && p.type != Type::bf16) return inputs;
  const TmaTensors tensors = tma_tensors(without_data(p), {});
  const TmaTensor* const by_input[] = {&tensors.q, &tensors.k, &tensors.v, &tensors.dout};
  for (int n = 0; n < kInputs; ++n) {
    const InputShape shape = shape_of(p, Input(n));
    const bool given = view_of(p, Input(n)).given() && shape.batch * shape.heads * shape.rows > 0;
    if (given && !is_tma_loadable(*by_input[n])) inputs.add(Input(n));
  }
  return inputs;
}

Refusal why_not_copies(const Problem& p, InputSet inputs) {
  constexpr int64 kLeastKeys = 256;
  constexpr int64 kMostTimes = 4;  // what the other tensors take
  if (inputs.empty()) return {};
  if (keys_in_reach(p) < kLeastKeys) {
    return "so few keys do not repay copies of inputs that TMA cannot load";
  }
  const Count there = elements(shape_of(p, Input::q)) + elements(shape_of(p, Input::dout)) +
                      distinct_elements(p, Input::k) + distinct_elements(p, Input::v);
  const Count most = there * kMostTimes * int64(size_of(p.type));
  if (copies_bytes(p, inputs).value() > most.value()) {
    return "copies of broadcast keys and values would be many times as large as the inputs";
  }
  const BlockGrid grid = copies_grid(p, inputs);
  if (double(grid.heads) * grid.tiles * grid.splits > double(INT32_MAX)) {
    return "copies would take more blocks than a grid can have";
  }
  return {};
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

Count copies_bytes(const Problem& p, InputSet inputs) {
  return lay_out(p, inputs, [](Input, int64) {});
}

InputSet copies_at_most(const CudaPlan& plan, const Problem& p) {
  InputSet inputs = plan.copies;
  const bool may_load_dout = plan.family == Family::wgmma
                                 ? p.type != Type::f32
                                 : plan.family == Family::mma && !plan.copies.empty();
  if (p.backward && may_load_dout && !p.dout.given()) inputs.add(Input::dout);
  return inputs;
}

void add_copies_launch(Draft& d) {
  if (d.plan.copies.empty()) return;
  if (d.because.asked()) {
    d.because(
        "copied first: ", names_of(d.plan.copies),
        d.plan.family == Family::wgmma
            ? ": TMA cannot load f32 together with 16-bit types, rows that do not begin at "
              "multiples of 16 bytes, or strides of 0 or below"
            : ": rows that do not begin at multiples of 16 bytes would be read one element at "
              "a time");
  }
  KernelConfig c{.kernel = Kernel::copy_inputs,
                 .family = Family::simt,
                 .level = 50,
                 .type = d.p.type,
                 .tiling = {.rows = kRows, .keys = kRows, .warps = 8, .stages = 1}};
  const BlockGrid grid = copies_grid(d.p, d.plan.copies);
  add_launch(d, c, grid.heads, grid.tiles, grid.splits);
}

}  // namespace regard
