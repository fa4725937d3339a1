// Reads files, converts types, and turns ranks 2 to 4 and both layouts into (B, H, S, D) views.
#include "attend_inputs.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "command_line/parse.hpp"
#include "files/npy.hpp"
#include "files/safetensors.hpp"
#include "output/output.hpp"

namespace regard::cli {

namespace {

bool is_float(Type type) { return type == f64 || type == f32 || type == f16 || type == bf16; }

Tensor with_leading_ones(Tensor tensor, int rank) {
  while (tensor.rank < rank) {
    for (int axis = tensor.rank; axis > 0; --axis) {
      tensor.sizes[axis] = tensor.sizes[axis - 1];
      tensor.strides[axis] = tensor.strides[axis - 1];
    }
    tensor.sizes[0] = 1;
    ++tensor.rank;
  }
  return tensor;
}

void read_files(const AttendArguments& arguments, AttendInputs& inputs) {
  std::vector<std::string> names{"q", "k", "v"};
  for (const auto& [name, file] : arguments.extra_files) names.push_back(name);
  if (arguments.files.size() == 3) {
    for (int n = 0; n < 3; ++n)
      inputs.arrays.emplace(names[n], read_npy(arguments.files[n], names[n]));
  } else if (arguments.files.size() == 1 && arguments.files[0].ends_with(".safetensors")) {
    std::vector<std::string> ignored;
    inputs.arrays = read_safetensors(arguments.files[0], names, ignored);
    for (const char* name : {"q", "k", "v"}) {
      if (!inputs.arrays.contains(name)) {
        throw UsageError(fmt::format("{}: {}: is missing", arguments.files[0], name));
      }
    }
    std::string list;
    for (const std::string& name : ignored) list += (list.empty() ? "" : ", ") + name;
    if (!list.empty()) output::note("{}: not used: {}", arguments.files[0], list);
  } else {
    throw UsageError("files: give one FILE.safetensors, or three: q.npy k.npy v.npy");
  }
  for (const auto& [name, file] : arguments.extra_files) {
    if (!file.empty()) inputs.arrays.insert_or_assign(name, read_npy(file, name));
  }
}

void convert(AttendInputs& inputs, const std::string& name, Type type) {
  const auto found = inputs.arrays.find(name);
  if (found == inputs.arrays.end() || found->second.type == type) return;
  if (!is_float(found->second.type)) return;  // the library refuses it by name
  output::note("{}: {} converted to {}", name, name_of(found->second.type), name_of(type));
  found->second = converted(found->second.tensor(), type);
}

Index longest_sequence(const char* name, const Array& begins) {
  if (begins.type != i32 || begins.sizes.size() != 1 || begins.count() < 1) {
    throw UsageError(fmt::format("{}: must be a list of batch + 1 integers", name));
  }
  Index longest = 0;
  for (Index b = 0; b + 1 < begins.count(); ++b) {
    longest = std::max<Index>(
        longest, Index{begins.as<std::int32_t>()[b + 1]} - begins.as<std::int32_t>()[b]);
  }
  return longest;
}

void require_rank(const char* name, const Array& array, int rank) {
  if (static_cast<int>(array.sizes.size()) == rank) return;
  throw UsageError(
      fmt::format("{} = {}: must have {} dimensions", name, to_string(array.tensor()), rank));
}

}  // namespace

Tensor AttendInputs::view(const Array& array) const {
  if (packed || !array.given()) return array.tensor();
  const Tensor whole = with_leading_ones(array.tensor(), 4);
  return rows_first && rank > 2 ? permuted(whole, {0, 2, 1, 3}) : whole;
}

Tensor AttendInputs::lse_view(const Array& array) const {
  if (packed || !array.given()) return array.tensor();
  return with_leading_ones(array.tensor(), 3);
}

Array AttendInputs::like_q(Index last, Type type) const {
  Sizes sizes = arrays.at("q").sizes;
  sizes.back() = last;
  const double bytes = double(count_of(sizes, "out")) * double(size_of(type));
  if (bytes > double(physical_memory())) {
    throw UsageError(
        fmt::format("v: the results of this head size need {:.3g} bytes, more than "
                    "this machine has",
                    bytes));
  }
  return Array(type, sizes);
}

Array AttendInputs::like_lse() const {
  const Type type = attention.q.type == f64 ? f64 : f32;
  const Tensor& q = attention.q;
  if (packed) return Array(type, {q.sizes[1], q.sizes[0]});
  Sizes sizes{q.sizes[0], q.sizes[1], q.sizes[2]};
  sizes.erase(sizes.begin(), sizes.begin() + (4 - rank));
  return Array(type, sizes);
}

AttendInputs read_inputs(const AttendArguments& arguments) {
  AttendInputs in;
  in.rows_first = arguments.layout == "bshd";
  read_files(arguments, in);
  auto& arrays = in.arrays;
  if (!arguments.type.empty()) {
    const Type type = parse_type(arguments.type, "--type");
    for (const char* name : {"q", "k", "v", "dout"}) convert(in, name, type);
  }
  for (const char* name : {"sink", "alibi_slopes"}) convert(in, name, f32);
  convert(in, "dlse", arrays["q"].type == f64 ? f64 : f32);

  Attention& a = in.attention = without_tensors(arguments.attention);
  in.packed = arrays.contains("cu_seqlens_q") || arrays.contains("cu_seqlens_k");
  if (in.packed && (!arrays.contains("cu_seqlens_q") || !arrays.contains("cu_seqlens_k"))) {
    throw UsageError("cu_seqlens_q, cu_seqlens_k: packed sequences need both");
  }
  in.rank = in.packed ? 3 : static_cast<int>(arrays["q"].sizes.size());
  if (in.rank < 2 || in.rank > 4) {
    throw UsageError(
        fmt::format("q = {}: must be (batch, heads, length, size), (heads, length, "
                    "size) or (length, size)",
                    to_string(arrays["q"].tensor())));
  }
  for (const char* name : {"q", "k", "v"}) require_rank(name, arrays[name], in.rank);
  a.q = in.view(arrays["q"]);
  a.k = in.view(arrays["k"]);
  a.v = in.view(arrays["v"]);
  const auto tensor = [&](const char* name) {
    const auto found = arrays.find(name);
    return found == arrays.end() ? Tensor{} : found->second.tensor();
  };
  a.bias = tensor("bias");
  a.mask = tensor("mask");
  a.row_spans = tensor("row_spans");
  a.key_spans = tensor("key_spans");
  a.sink = tensor("sink");
  a.alibi_slopes = tensor("alibi_slopes");
  a.cu_seqlens_q = tensor("cu_seqlens_q");
  a.cu_seqlens_k = tensor("cu_seqlens_k");
  a.seqused_q = tensor("seqused_q");
  a.seqused_k = tensor("seqused_k");
  a.q_positions = tensor("q_positions");
  if (in.packed) {
    a.max_seqlen_q = longest_sequence("cu_seqlens_q", arrays["cu_seqlens_q"]);
    a.max_seqlen_k = longest_sequence("cu_seqlens_k", arrays["cu_seqlens_k"]);
  }
  if (arrays.contains("dout")) {
    require_rank("dout", arrays["dout"], in.rank);
    in.dout = in.view(arrays["dout"]);
  }
  if (arrays.contains("dlse")) {
    require_rank("dlse", arrays["dlse"], in.packed ? 2 : in.rank - 1);
    in.dlse = in.lse_view(arrays["dlse"]);
  }
  return in;
}

}  // namespace regard::cli
