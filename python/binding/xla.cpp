#include "xla.hpp"

#include <exception>
#include <new>

#include "problem.hpp"
#include "xla_call.hpp"
#include "xla_threads.hpp"

namespace nb = nanobind;

namespace regard::python {

namespace {

using namespace xla;

// An error that XLA reported, to be returned to XLA.
struct Failed {
  Failure* failure;
};

void check(Failure* failure) {
  if (failure) throw Failed{failure};
}

Failure* failure_of(const CallFrame& frame, FailureCode code, const char* message) {
  MakeFailure make{
      .size = sizeof(MakeFailure), .extension = nullptr, .message = message, .code = code};
  return frame.api->make_failure(&make);
}

FailureCode failure_code(Code code) {
  switch (code) {
    case Code::invalid_argument:
      return kInvalidArgument;
    case Code::unsupported:
      return kUnimplemented;
    case Code::unavailable:
      return kUnavailable;
    case Code::out_of_memory:
      return kResourceExhausted;
    case Code::device_failure:
    case Code::internal:
      break;
  }
  return kInternal;
}

// XLA may ask a handler which interface version it was written for, instead of calling it.
bool answers_question(const CallFrame& frame) {
  bool asked = false;
  for (Extension* one = frame.extension; one; one = one->next) {
    if (one->type != kMetadata) continue;
    Metadata& answer = *reinterpret_cast<MetadataExtension*>(one)->metadata;
    answer.version = {
        .size = sizeof(Version), .extension = nullptr, .major = kMajor, .minor = kMinor};
    answer.traits = 0;
    asked = true;
  }
  return asked;
}

// ------------------------------------------------------------------------------------ on a device

int device_of(const CallFrame& frame) {
  if (frame.api->size < sizeof(Api)) {
    throw Error(Code::unavailable, "jaxlib", "a version before 0.6",
                "cannot say which GPU a call is for");
  }
  GetDevice get{
      .size = sizeof(GetDevice), .extension = nullptr, .context = frame.context, .ordinal = 0};
  check(frame.api->get_device(&get));
  return get.ordinal;
}

std::uintptr_t stream_of(const CallFrame& frame) {
  GetStream get{
      .size = sizeof(GetStream), .extension = nullptr, .context = frame.context, .stream = nullptr};
  check(frame.api->get_stream(&get));
  return reinterpret_cast<std::uintptr_t>(get.stream);
}

// Device memory from XLA's pool. XLA frees it in the order of the call's stream, so that all work
// that is queued during the lifetime of this object may use it.
class Scratch {
 public:
  static constexpr std::size_t kAlignment = 256;  // more than XLA can be asked for

  Scratch(const CallFrame& frame, std::size_t bytes) : frame_(frame), size_(bytes) {
    if (bytes == 0) return;
    AllocateMemory allocate{.size = sizeof(AllocateMemory),
                            .extension = nullptr,
                            .context = frame.context,
                            .bytes = bytes + kAlignment,
                            .alignment = 1,
                            .data = nullptr};
    check(frame.api->allocate_memory(&allocate));
    data_ = allocate.data;
  }
  ~Scratch() {
    if (!data_) return;
    FreeMemory free{.size = sizeof(FreeMemory),
                    .extension = nullptr,
                    .context = frame_.context,
                    .bytes = size_ + kAlignment,
                    .data = data_};
    frame_.api->free_memory(&free);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  Workspace workspace() const {
    if (!data_) return {};
    const auto begin = reinterpret_cast<std::uintptr_t>(data_) + kAlignment - 1;
    return {.data = reinterpret_cast<void*>(begin / kAlignment * kAlignment), .size = size_};
  }

 private:
  const CallFrame& frame_;
  std::size_t size_;
  void* data_ = nullptr;
};

// ------------------------------------------------------------------------------------- the problem

const std::uint32_t* seed_words(const Buffer& buffer) {
  if (buffer.type != kU32 || buffer.rank != 1 || buffer.sizes[0] != 2) {
    throw Error(Code::invalid_argument, "dropout_seed", "an array", "must be two uint32");
  }
  return static_cast<const std::uint32_t*>(buffer.data);
}

// Sets an option from the operand or the attribute of its name.
struct SetOption {
  const Call& call;
  Problem& problem;

  void operator()(const char* name, Tensor& field) const {
    if (call.buffer_if_any(name)) field = problem.keep(name, call.array(name, problem.device));
  }
  void operator()(const char* name, std::optional<double>& field) const {
    if (call.has_number(name)) field = call.number(name);
  }
  void operator()(const char* name, double& field) const { field = call.number(name); }
  void operator()(const char* name, std::int64_t& field) const { field = call.integer(name); }
  void operator()(const char* name, bool& field) const { field = call.integer(name) != 0; }
  void operator()(const char* name, std::uint64_t& field) const {
    if (const Buffer* buffer = call.buffer_if_any(name)) {
      problem.attention.dropout.seed_words = seed_words(*buffer);
    } else {
      field = static_cast<std::uint64_t>(call.integer(name));
    }
  }
  void operator()(const char* name, Window& field) const {
    field = {.left = call.integer(std::string(name) + "_left"),
             .right = call.integer(std::string(name) + "_right")};
  }
  template <class Enum>
  void operator()(const char* name, Enum& field) const {
    set_named(name, call.text(name), field);
  }
};

Problem problem_in(const Call& call, int device) {
  Problem problem =
      problem_of(call.array("q", device), call.array("k", device), call.array("v", device));
  visit_options(problem.attention, SetOption{call, problem});
  return problem;
}

// ---------------------------------------------------------------------------------------- the call

enum class Platform { cpu, cuda };

// body(ForwardOutputs), or body(BackwardInputs, Gradients).
template <Pass pass, class Body>
void with_tensors(const Call& call, int device, const Body& body) {
  const auto tensor = [&](const char* name) { return call.array_if_any(name, device).tensor; };
  if constexpr (pass == Pass::forward) {
    body(ForwardOutputs{.out = tensor("out"), .lse = tensor("lse")});
  } else {
    body(BackwardInputs{.out = tensor("out"),
                        .lse = tensor("lse"),
                        .dout = tensor("dout"),
                        .dlse = tensor("dlse")},
         Gradients{.dq = tensor("dq"),
                   .dk = tensor("dk"),
                   .dv = tensor("dv"),
                   .dbias = tensor("dbias"),
                   .dsink = tensor("dsink")});
  }
}

template <Pass pass, Platform platform>
void execute(const CallFrame& frame) {
  const Call call(frame);
  constexpr bool on_gpu = platform == Platform::cuda;
  const int device = on_gpu ? device_of(frame) : Array::kHost;
  const Problem problem = problem_in(call, device);
  const Attention& a = problem.attention;
  Run run = run_of(problem, "", on_gpu ? stream_of(frame) : 0,
                   static_cast<int>(call.integer("threads")), call.text("backend"));
  const Threads threads(frame);
  if (!on_gpu && run.threads == 0) run.executor = threads.executor();
  with_tensors<pass>(call, device, [&](const auto&... tensors) {
    const Scratch scratch(frame, on_gpu ? workspace(a, tensors..., run) : 0);
    run.workspace = scratch.workspace();
    if constexpr (pass == Pass::forward) {
      forward(a, tensors..., run);
    } else {
      backward(a, tensors..., run);
    }
  });
}

template <Pass pass, Platform platform>
Failure* handle(CallFrame* frame) {
  if (answers_question(*frame)) return nullptr;
  try {
    if (frame->stage == kExecute) execute<pass, platform>(*frame);
    return nullptr;
  } catch (const Failed& failed) {
    return failed.failure;
  } catch (const Error& error) {
    return failure_of(*frame, failure_code(error.code()), error.what());
  } catch (const std::bad_alloc&) {
    return failure_of(*frame, kResourceExhausted, "regard: out of memory");
  } catch (const std::exception& error) {
    return failure_of(*frame, kInternal, error.what());
  }
}

}  // namespace

nb::typed<nb::dict, nb::any, nb::any> xla_handlers() {
  const auto capsule = [](Handler* handler) {
    return nb::capsule(reinterpret_cast<void*>(handler), "xla._CUSTOM_CALL_TARGET");
  };
  nb::dict all;
  all[nb::make_tuple("regard_forward", "cpu")] = capsule(&handle<Pass::forward, Platform::cpu>);
  all[nb::make_tuple("regard_forward", "CUDA")] = capsule(&handle<Pass::forward, Platform::cuda>);
  all[nb::make_tuple("regard_backward", "cpu")] = capsule(&handle<Pass::backward, Platform::cpu>);
  all[nb::make_tuple("regard_backward", "CUDA")] = capsule(&handle<Pass::backward, Platform::cuda>);
  return all;
}

}  // namespace regard::python
