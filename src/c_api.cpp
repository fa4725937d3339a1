// The C API over the C++ one: converts, calls, and lets no exception out.
#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "c_layout.hpp"
#include "problem/error_text.hpp"
#include "regard/cuda.hpp"
#include "regard/regard.h"
#include "regard/regard.hpp"
#include "system/system.hpp"

// What the opaque type of the header is.
struct regard_mask {
  regard::Mask value;
};

namespace {

// -------------------------------------------------------------------------------------- last error
// Fixed buffers: recording a failed allocation must not allocate, and a thread's end has nothing to
// destroy.

struct LastError {
  char message[1024];
  char argument[128];
  char value[256];
};
thread_local LastError last_error{};

template <std::size_t N>
void copy(char (&to)[N], const char* from) noexcept {
  std::snprintf(to, N, "%s", from);
}

regard_status fail(regard_status status, const char* message, const char* argument = "",
                   const char* value = "") noexcept {
  copy(last_error.message, message);
  copy(last_error.argument, argument);
  copy(last_error.value, value);
  return status;
}

// What the C structs call an argument that errors name as C++ does.
const char* field_name(const std::string& argument) noexcept {
  static constexpr std::pair<const char*, const char*> kFields[] = {
      {"dropout.p", "dropout_p"},           {"dropout.seed", "dropout_seed"},
      {"dropout.offset", "dropout_offset"}, {"dropout.seed_words", "dropout_seed_words"},
      {"window.left", "window_left"},       {"window.right", "window_right"},
      {"workspace.size", "workspace_size"}, {"workspace.data", "workspace"}};
  for (const auto& [name, field] : kFields) {
    if (argument == name) return field;
  }
  return argument.c_str();
}
// Allocates nothing: memory may have run out.
regard_status fail(const regard::Error& error) noexcept {
  const char* const name = field_name(error.argument());
  copy(last_error.argument, name);
  regard::write_shortened(last_error.value, sizeof last_error.value - 1, error.value());
  regard::write_text(last_error.message, sizeof last_error.message, name, error);
  return 1 + static_cast<regard_status>(error.code());
}

// Calls body; what it throws becomes a status and the thread's last error. A thread that is
// cancelled in it would throw what nobody may catch.
template <class Body>
regard_status guarded(Body&& body) noexcept {
  const regard::system::CancellationDisabled until_the_end;
  try {
    std::forward<Body>(body)();
    return fail(REGARD_OK, "");
  } catch (const regard::Error& error) {
    return fail(error);
  } catch (const std::bad_alloc&) {
    return fail(REGARD_OUT_OF_MEMORY, "memory = exhausted: an allocation failed", "memory",
                "exhausted");
  } catch (const std::exception& error) {
    return fail(REGARD_INTERNAL, error.what());
  } catch (...) {
    return fail(REGARD_INTERNAL, "an exception of unknown type");
  }
}

[[noreturn]] void refuse(const std::string& argument, std::string value,
                         const std::string& reason) {
  throw regard::Error(regard::Code::invalid_argument, argument, std::move(value), reason);
}

template <class T>
T& required(T* pointer, const char* argument) {
  if (!pointer) refuse(argument, "null", "must be given");
  return *pointer;
}

// ------------------------------------------------------------------------------------- conversions

// The caller's struct with the fields past its size at their defaults. `least` ends the fields that
// have no default; a struct is also refused when its size would cut a field in two.
template <class T>
T completed(const T* given, const char* argument, std::size_t least, T defaults) {
  const std::size_t size = required(given, argument).size;
  if (size < least || size > sizeof(T) || !regard::c_layout::ends_at_field<T>(size)) {
    refuse(std::string(argument) + ".size", std::to_string(size),
           "must be sizeof the struct: at least " + std::to_string(least) + ", at most " +
               std::to_string(sizeof(T)) + " in this version of the library");
  }
  std::memcpy(&defaults, given, size);
  return defaults;
}

void must_be_zero(std::int32_t reserved, const char* argument) {
  if (reserved != 0) refuse(argument, std::to_string(reserved), "must be 0");
}

template <class Enum>
Enum to_enum(std::int32_t value, Enum last, const std::string& argument) {
  if (value < 0 || value > static_cast<std::int32_t>(last)) {
    refuse(argument, std::to_string(value),
           "must be 0 to " + std::to_string(static_cast<int>(last)));
  }
  return static_cast<Enum>(value);
}

bool to_bool(std::int32_t value, const char* argument) {
  if (value != 0 && value != 1) refuse(argument, std::to_string(value), "must be 0 or 1");
  return value == 1;
}

regard::Tensor to_tensor(const regard_tensor& given, const char* argument) {
  if (given.rank < 0 || given.rank > 4) {
    refuse(std::string(argument) + ".rank", std::to_string(given.rank), "must be 0 to 4");
  }
  regard::Tensor tensor;
  tensor.data = given.data;
  tensor.type = to_enum(given.type, regard::Type::i32, std::string(argument) + ".type");
  tensor.rank = given.rank;
  std::copy_n(given.sizes, 4, tensor.sizes.begin());
  std::copy_n(given.strides, 4, tensor.strides.begin());
  return tensor;
}

regard::Attention to_attention(const regard_attention* given) {
  const auto a =
      completed(given, "attention", offsetof(regard_attention, bias), REGARD_ATTENTION_INIT);
  regard::Attention attention;
  attention.q = to_tensor(a.q, "q");
  attention.k = to_tensor(a.k, "k");
  attention.v = to_tensor(a.v, "v");
  attention.bias = to_tensor(a.bias, "bias");
  attention.mask = to_tensor(a.mask, "mask");
  attention.row_spans = to_tensor(a.row_spans, "row_spans");
  attention.key_spans = to_tensor(a.key_spans, "key_spans");
  if (a.visible) attention.visible = a.visible->value;
  attention.alibi_slopes = to_tensor(a.alibi_slopes, "alibi_slopes");
  attention.sink = to_tensor(a.sink, "sink");
  attention.cu_seqlens_q = to_tensor(a.cu_seqlens_q, "cu_seqlens_q");
  attention.cu_seqlens_k = to_tensor(a.cu_seqlens_k, "cu_seqlens_k");
  attention.seqused_q = to_tensor(a.seqused_q, "seqused_q");
  attention.seqused_k = to_tensor(a.seqused_k, "seqused_k");
  attention.max_seqlen_q = a.max_seqlen_q;
  attention.max_seqlen_k = a.max_seqlen_k;
  attention.q_positions = to_tensor(a.q_positions, "q_positions");
  attention.k_position = a.k_position;
  attention.batch_begin = a.batch_begin;
  attention.head_begin = a.head_begin;
  if (to_bool(a.has_scale, "has_scale")) attention.scale = a.scale;
  attention.softcap = a.softcap;
  attention.dropout = {.p = a.dropout_p,
                       .seed = a.dropout_seed,
                       .offset = a.dropout_offset,
                       .seed_words = a.dropout_seed_words};
  attention.window = {.left = a.window_left, .right = a.window_right};
  attention.causal = to_enum(a.causal, regard::Causal::bottom_right, "causal");
  attention.precision = to_enum(a.precision, regard::Precision::bf16, "precision");
  attention.deterministic = to_bool(a.deterministic, "deterministic");
  attention.continue_from = to_bool(a.continue_from, "continue_from");
  must_be_zero(a.reserved, "attention.reserved");
  return attention;
}

regard::Run to_run(const regard_run* given) {
  regard::Run run;
  if (!given) return run;
  const auto r = completed(given, "run", offsetof(regard_run, device), REGARD_RUN_INIT);
  run.device.kind = to_enum(r.device, regard::Device::Kind::chip, "device");
  run.device.index = r.device_index;
  if (r.device_name) run.device.name = r.device_name;
  run.stream = r.stream;
  run.workspace = {.data = r.workspace, .size = r.workspace_size};
  run.threads = r.threads;
  run.executor = {.run = r.executor, .self = r.executor_self};
  if (r.backend) run.backend = r.backend;
  run.allocator = {.allocate = r.allocator, .self = r.allocator_self};
  run.gradients_follow = to_bool(r.gradients_follow, "gradients_follow");
  run.multiprocessors = r.multiprocessors;
  must_be_zero(r.reserved, "run.reserved");
  return run;
}

regard::Pass to_pass(regard_pass pass) { return to_enum(pass, regard::Pass::backward, "pass"); }

// Made once and never destroyed: callers keep the strings, also while the process ends.
const std::vector<regard::BackendInfo>& known_backends() {
  static const auto* list = new std::vector<regard::BackendInfo>(regard::backends());
  return *list;
}

const regard::BackendInfo* backend_at(std::int32_t index) noexcept {
  try {
    const auto& list = known_backends();
    if (index < 0 || static_cast<std::size_t>(index) >= list.size()) return nullptr;
    return &list[static_cast<std::size_t>(index)];
  } catch (...) {
    return nullptr;
  }
}

}  // namespace

// --------------------------------------------------------------------------------------- functions

extern "C" {

regard_status regard_forward(const regard_attention* attention,
                             const regard_forward_tensors* tensors, const regard_run* run) {
  return guarded([&] {
    const auto a = to_attention(attention);
    const auto t = completed(tensors, "tensors", offsetof(regard_forward_tensors, lse),
                             REGARD_FORWARD_TENSORS_INIT);
    const regard::ForwardOutputs outputs{.out = to_tensor(t.out, "out"),
                                         .lse = to_tensor(t.lse, "lse")};
    regard::forward(a, outputs, to_run(run));
  });
}

regard_status regard_backward(const regard_attention* attention,
                              const regard_backward_tensors* tensors, const regard_run* run) {
  return guarded([&] {
    const auto a = to_attention(attention);
    const auto t = completed(tensors, "tensors", offsetof(regard_backward_tensors, dlse),
                             REGARD_BACKWARD_TENSORS_INIT);
    must_be_zero(t.reserved, "tensors.reserved");
    const regard::BackwardInputs inputs{.out = to_tensor(t.out, "out"),
                                        .lse = to_tensor(t.lse, "lse"),
                                        .dout = to_tensor(t.dout, "dout"),
                                        .dlse = to_tensor(t.dlse, "dlse"),
                                        .delta = to_tensor(t.delta, "delta")};
    const regard::Gradients gradients{.dq = to_tensor(t.dq, "dq"),
                                      .dk = to_tensor(t.dk, "dk"),
                                      .dv = to_tensor(t.dv, "dv"),
                                      .dbias = to_tensor(t.dbias, "dbias"),
                                      .dsink = to_tensor(t.dsink, "dsink"),
                                      .accumulate = to_bool(t.accumulate, "accumulate")};
    regard::backward(a, inputs, gradients, to_run(run));
  });
}

regard_status regard_workspace(const regard_attention* attention, regard_pass pass,
                               const regard_run* run, size_t* bytes) {
  return guarded([&] {
    std::size_t& result = required(bytes, "bytes");
    result = regard::workspace(to_attention(attention), to_pass(pass), to_run(run));
  });
}

regard_status regard_explain(const regard_attention* attention, regard_pass pass,
                             const regard_run* run, regard_explanation* numbers, char* text,
                             size_t capacity, size_t* needed) {
  return guarded([&] {
    regard_explanation filled = REGARD_EXPLANATION_INIT;
    if (numbers) {
      filled.size =
          completed(numbers, "numbers", offsetof(regard_explanation, backend), filled).size;
    }
    if (!text && capacity > 0) refuse("text", "null", "must be given where capacity > 0");
    const regard::Explanation explanation =
        regard::explain(to_attention(attention), to_pass(pass), to_run(run));
    if (numbers) {
      filled.supported = explanation.supported;
      filled.workspace = explanation.workspace;
      filled.pairs = explanation.pairs;
      filled.flops = explanation.flops;
      copy(filled.backend, explanation.backend.c_str());
      copy(filled.kernel, explanation.kernel.c_str());
      std::memcpy(numbers, &filled, filled.size);
    }
    if (capacity > 0) {
      const std::size_t length = std::min(explanation.text.size(), capacity - 1);
      std::memcpy(text, explanation.text.data(), length);
      text[length] = '\0';
    }
    if (needed) *needed = explanation.text.size() + 1;
  });
}

regard_status regard_mask_memory(const regard_attention* attention, const regard_run* run,
                                 size_t* bytes) {
  return guarded([&] {
    std::size_t& result = required(bytes, "bytes");
    result = regard::mask_memory(to_attention(attention), to_run(run));
  });
}

regard_status regard_mask_make(const regard_attention* attention, void* memory, size_t memory_size,
                               const regard_run* run, regard_mask** mask) {
  return guarded([&] {
    regard_mask*& result = required(mask, "mask");
    auto made = std::make_unique<regard_mask>();
    made->value = regard::make_mask(to_attention(attention), {.data = memory, .size = memory_size},
                                    to_run(run));
    result = made.release();
  });
}

void regard_mask_free(regard_mask* mask) { delete mask; }

regard_status regard_prepare(const regard_attention* attention, regard_pass pass,
                             const regard_run* run) {
  return guarded([&] { regard::prepare(to_attention(attention), to_pass(pass), to_run(run)); });
}

void regard_show_compiling(int32_t shown) { regard::show_compiling(shown != 0); }

void regard_allow_compilation(int32_t allowed) { regard::allow_compilation(allowed != 0); }

regard_status regard_trim_memory(int32_t device) {
  return guarded([&] { regard::cuda_memory::trim(device); });
}

regard_status regard_dropout_mask(const regard_attention* attention, const regard_tensor* keep) {
  return guarded([&] {
    const auto a = to_attention(attention);
    regard::dropout_mask(a, to_tensor(required(keep, "keep"), "keep"));
  });
}

regard_status regard_dropout_probability(double p, double* realised) {
  return guarded([&] {
    double& result = required(realised, "realised");
    result = regard::dropout_probability(p);
  });
}

int32_t regard_backend_count(void) {
  try {
    return static_cast<int32_t>(known_backends().size());
  } catch (...) {
    return 0;
  }
}

const char* regard_backend_name(int32_t index) {
  const auto* backend = backend_at(index);
  return backend ? backend->name.c_str() : nullptr;
}

int32_t regard_backend_available(int32_t index) {
  const auto* backend = backend_at(index);
  return backend && backend->available ? 1 : 0;
}

const char* regard_backend_note(int32_t index) {
  const auto* backend = backend_at(index);
  return backend ? backend->note.c_str() : nullptr;
}

const char* regard_version(void) { return regard::version(); }

const char* regard_status_name(regard_status status) {
  static constexpr const char* kNames[] = {
      "ok",       "invalid_argument", "unsupported", "unavailable", "out_of_memory",
      "internal", "device_failure"};
  return status >= 0 && status <= REGARD_DEVICE_FAILURE ? kNames[status] : "unknown";
}

const char* regard_last_error(void) { return last_error.message; }
const char* regard_last_error_argument(void) { return last_error.argument; }
const char* regard_last_error_value(void) { return last_error.value; }

}  // extern "C"
