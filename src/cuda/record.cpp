// A line is one JSON object: the chip, the pass, every tensor and option that was given.
#include "cuda/record.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <mutex>

#include "cuda/environment.hpp"
#include "cuda/trust.hpp"
#include "problem/describe.hpp"
#include "problem/mask_contents.hpp"
#include "problem/refuse.hpp"

namespace regard::cuda_backend {
namespace {

// Bytes; no kernel asks for more of an address.
constexpr std::uintptr_t kAlignment = 256;

// The fields of an object, in the order in which they are added. Names and texts need no escapes.
class Object {
 public:
  void add(const char* name, const std::string& value) {
    text_.append(text_.size() > 1 ? ", \"" : "\"").append(name).append("\": ").append(value);
  }
  void add_text(const char* name, const std::string& value) { add(name, "\"" + value + "\""); }
  void add_number(const char* name, double value) { add(name, regard::printed(value)); }
  std::string text() const { return text_ + "}"; }

 private:
  std::string text_ = "{";
};

std::string listed(const std::int64_t* values, int count) {
  std::string text;
  for (int n = 0; n < count; ++n) text += (n > 0 ? ", " : "") + std::to_string(values[n]);
  return "[" + text + "]";
}

void add_tensor(Object& object, const char* name, const Tensor& tensor) {
  if (!tensor.given()) return;
  Object fields;
  fields.add_text("type", name_of(tensor.type));
  fields.add("sizes", listed(tensor.sizes.data(), tensor.rank));
  fields.add("strides", listed(tensor.strides.data(), tensor.rank));
  fields.add("offset", std::to_string(reinterpret_cast<std::uintptr_t>(tensor.data) % kAlignment));
  object.add(name, fields.text());
}

// Options that differ from their defaults. Bound member by member, so that a new one is not
// forgotten here.
void add_attention(Object& object, const Attention& attention) {
  constexpr const char* kCausal[] = {"none", "top_left", "bottom_right"};
  constexpr const char* kPrecision[] = {"full", "tf32", "bf16"};
  const auto& [q, k, v, bias, own_mask, own_row_spans, own_key_spans, given, alibi_slopes, sink,
               cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k,
               q_positions, k_position, batch_begin, head_begin, scale, softcap, causal, window,
               dropout, precision, deterministic, continue_from] = attention;
  const auto& [mask, row_spans, key_spans] = visible_tensors(attention);
  add_tensor(object, "q", q);
  add_tensor(object, "k", k);
  add_tensor(object, "v", v);
  add_tensor(object, "bias", bias);
  add_tensor(object, "mask", mask);
  add_tensor(object, "row_spans", row_spans);
  add_tensor(object, "key_spans", key_spans);
  add_tensor(object, "alibi_slopes", alibi_slopes);
  add_tensor(object, "sink", sink);
  add_tensor(object, "cu_seqlens_q", cu_seqlens_q);
  add_tensor(object, "cu_seqlens_k", cu_seqlens_k);
  add_tensor(object, "seqused_q", seqused_q);
  add_tensor(object, "seqused_k", seqused_k);
  if (max_seqlen_q != 0) object.add("max_seqlen_q", std::to_string(max_seqlen_q));
  if (max_seqlen_k != 0) object.add("max_seqlen_k", std::to_string(max_seqlen_k));
  add_tensor(object, "q_positions", q_positions);
  if (k_position != 0) object.add("k_position", std::to_string(k_position));
  if (batch_begin != 0) object.add("batch_begin", std::to_string(batch_begin));
  if (head_begin != 0) object.add("head_begin", std::to_string(head_begin));
  if (scale) object.add_number("scale", *scale);
  if (softcap != 0) object.add_number("softcap", softcap);
  if (causal != Causal::none) object.add_text("causal", kCausal[int(causal)]);
  const std::int64_t sides[] = {window.left, window.right};
  if (sides[0] >= 0 || sides[1] >= 0) object.add("window", listed(sides, 2));
  // Which weights drop has no influence on a kernel; that it reads the seed has.
  if (dropout.p != 0) object.add_number("dropout_p", dropout.p);
  if (dropout.seed_words) object.add("dropout_seed_in_memory", "true");
  if (precision != Precision::full) object.add_text("precision", kPrecision[int(precision)]);
  if (deterministic) object.add("deterministic", "true");
  if (continue_from) object.add("continue_from", "true");
}

void add_forward(Object& object, const ForwardOutputs& to) {
  add_tensor(object, "out", to.out);
  add_tensor(object, "lse", to.lse);
}

void add_backward(Object& object, const BackwardInputs& from, const Gradients& to) {
  add_tensor(object, "out", from.out);
  add_tensor(object, "lse", from.lse);
  add_tensor(object, "dout", from.dout);
  add_tensor(object, "dlse", from.dlse);
  add_tensor(object, "delta", from.delta);
  add_tensor(object, "dq", to.dq);
  add_tensor(object, "dk", to.dk);
  add_tensor(object, "dv", to.dv);
  add_tensor(object, "dbias", to.dbias);
  add_tensor(object, "dsink", to.dsink);
  if (to.accumulate) object.add("accumulate", "true");
}

std::string line_of(const PlannedCall& call, const Chip& chip) {
  const bool backward = call.pass == Pass::backward;
  Object object;
  object.add_text("chip", "sm_" + std::to_string(chip.capability()));
  object.add_text("pass", backward ? "backward" : "forward");
  if (!call.backend.empty()) object.add_text("backend", call.backend);
  add_attention(object, call.attention);
  if (backward) {
    add_backward(object, call.inputs, call.gradients);
  } else {
    add_forward(object, call.outputs);
    if (call.gradients_follow) object.add("gradients_follow", "true");
  }
  return object.text() + "\n";
}

// As forward() or backward() describe it on a GPU.
Problem described(const PlannedCall& call) {
  return call.pass == Pass::forward
             ? describe_forward(call.attention, call.outputs)
             : describe_backward(call.attention, call.inputs, call.gradients);
}

// One write, so that processes may share the file.
void append(const std::string& line) {
  const int file = open(record_file().c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  const bool written = file >= 0 && write(file, line.data(), line.size()) == ssize_t(line.size());
  const int fault = errno;
  if (file >= 0) close(file);
  static bool told = false;
  if (written || told) return;
  told = true;
  write_to_stderr("regard: REGARD_RECORD = \"" + printable(record_file()) +
                  "\": cannot be written: " + std::strerror(fault) + "\n");
}

}  // namespace

bool is_recorded(const Run& run) {
  return !record_file().empty() && run.device.kind == Device::Kind::cuda;
}

void record(const PlannedCall& call, const Run& run) {
  const std::vector<KernelConfig> configs = kernels_of(call, run);
  static std::mutex mutex;
  static auto* const recorded = new std::vector<KernelConfig>;
  const std::lock_guard lock(mutex);
  const std::size_t before = recorded->size();
  recorded->insert(recorded->end(), configs.begin(), configs.end());
  remove_repetitions(*recorded);
  if (recorded->size() > before) append(line_of(call, chip_of(run)));
}

std::vector<KernelConfig> kernels_of(const PlannedCall& call, Run run) {
  run.gradients_follow = call.gradients_follow;
  const Problem p = described(call);
  return kernels_to_load(make_supported_plan(p, run), p, run);
}

}  // namespace regard::cuda_backend
