// regard._core: the library's calls on Arrays. The package builds on it what users see.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <regard/cuda.hpp>

#include "direct.hpp"
#include "direct_arrays.hpp"
#include "direct_operators.hpp"
#include "gil.hpp"
#include "gpu_steps.hpp"
#include "kept_maps.hpp"
#include "problem.hpp"
#include "torch_autograd.hpp"
#include "torch_tensor.hpp"
#include "torch_threads.hpp"
#include "xla.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace regard::python {

namespace {

const char* name_of_code(Code code) {
  switch (code) {
    case Code::invalid_argument:
      return "InvalidArgument";
    case Code::unsupported:
      return "Unsupported";
    case Code::unavailable:
      return "Unavailable";
    case Code::out_of_memory:
      return "OutOfMemory";
    case Code::device_failure:
      return "DeviceFailure";
    case Code::internal:
      break;
  }
  return "InternalError";
}

// regard.errors has a class for each code, with the constructor (text, argument, value). The nested
// field dropout.p in C++ is the keyword dropout_p in Python.
void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    const nb::object type = nb::module_::import_("regard.errors").attr(name_of_code(error.code()));
    std::string argument = error.argument();
    std::replace(argument.begin(), argument.end(), '.', '_');
    const std::string text = argument + std::string(error.what()).substr(argument.size());
    const nb::object value = type(text, argument, error.value());
    PyErr_SetObject(type.ptr(), value.ptr());
  }
}

Pass pass_named(const std::string& name) {
  if (name == "forward") return Pass::forward;
  if (name == "backward") return Pass::backward;
  throw Error(Code::invalid_argument, "pass", "'" + name + "'", "must be forward or backward");
}

// A Python function that takes a number of bytes and returns the address of that much memory, which
// the caller keeps until the call has returned. Without one the library allocates the workspace.
using Allocate = std::optional<nb::typed<nb::callable, std::uintptr_t(std::size_t)>>;

// The library asks for memory without the interpreter's lock. Python's error passes through it.
Allocator allocator_of(const Allocate& allocate) {
  if (!allocate) return {};
  return {.allocate =
              [](void* self, std::size_t size) {
                const nb::gil_scoped_acquire lock;
                const auto& function = **static_cast<const Allocate*>(self);
                return reinterpret_cast<void*>(nb::cast<std::uintptr_t>(function(size)));
              },
          .self = const_cast<Allocate*>(&allocate)};
}

// torch_threads: null for the library's own.
Run with(TorchThreads* torch_threads, const Allocate& allocate, Run run) {
  if (torch_threads) run.executor = torch_threads->executor();
  run.allocator = allocator_of(allocate);
  return run;
}

// multiprocessors: as Run's.
Run limited(Run run, int multiprocessors) {
  run.multiprocessors = multiprocessors;
  return run;
}

void run_forward(const Problem& p, const Array& out, const Array* lse, bool continue_from,
                 int multiprocessors, std::uintptr_t stream, int threads,
                 const std::string& backend, const Allocate& allocate,
                 TorchThreads* torch_threads) {
  const ForwardOutputs outputs{.out = p.place("out", &out), .lse = p.place("lse", lse)};
  Attention attention = p.attention;
  attention.continue_from = continue_from;
  const Run run = with(torch_threads, allocate,
                       limited(run_of(p, "", stream, threads, backend), multiprocessors));
  const UsedMap map(attention, run);
  without_gil([&] { forward(attention, outputs, run); });
}

void run_backward(const Problem& p, const Array* out, const Array& lse, const Array& dout,
                  const Array* dlse, const Array* delta, const Array* dq, const Array* dk,
                  const Array* dv, const Array* dbias, const Array* dsink, bool accumulate,
                  int multiprocessors, std::uintptr_t stream, int threads,
                  const std::string& backend, const Allocate& allocate,
                  TorchThreads* torch_threads) {
  const BackwardInputs inputs{.out = p.place("out", out),
                              .lse = p.place("lse", &lse),
                              .dout = p.place("dout", &dout),
                              .dlse = p.place("dlse", dlse),
                              .delta = p.place("delta", delta)};
  const Gradients gradients{.dq = p.place("dq", dq),
                            .dk = p.place("dk", dk),
                            .dv = p.place("dv", dv),
                            .dbias = p.place("dbias", dbias),
                            .dsink = p.place("dsink", dsink),
                            .accumulate = accumulate};
  const Run run = with(torch_threads, allocate,
                       limited(run_of(p, "", stream, threads, backend), multiprocessors));
  Attention attention = p.attention;
  const UsedMap map(attention, run);
  without_gil([&] { backward(attention, inputs, gradients, run); });
}

// Values by name.
using Facts = nb::typed<nb::dict, nb::str, nb::any>;

// facts("name", value, "name", value, ...)
template <class... Rest>
Facts facts(const char* name, const auto& value, const Rest&... rest) {
  nb::dict all;
  all[name] = value;
  if constexpr (sizeof...(rest) > 0) all.update(facts(rest...));
  return all;
}

Facts setup() {
  nb::list found;
  for (const BackendInfo& one : backends()) {
    found.append(facts("name", one.name, "available", one.available, "note", one.note));
  }
  nb::list gpus;
  const CudaSetup cuda = cuda_setup();
  for (const CudaDevice& gpu : cuda.devices) {
    gpus.append(facts("name", gpu.name, "chip", gpu.chip, "multiprocessors", gpu.multiprocessors,
                      "memory", gpu.memory));
  }
  const Machine host = machine();
  return facts("version", version(), "backends", found, "cpu", host.cpu, "isa", host.isa, "threads",
               host.threads, "gpus", gpus, "driver", cuda.driver, "compiler", cuda.compiler,
               "skipped", cuda.skipped, "cache", cuda.cache, "cache_fault", cuda.cache_fault);
}

}  // namespace

NB_MODULE(_core_of_main, m) {
  nb::register_exception_translator(translate);
  nb::set_leak_warnings(false);  // a program may still hold Problems when it ends

  nb::class_<Array>(m, "Array", "Memory, its element type, sizes and strides (in elements).")
      .def_static("at", &array_at, "argument"_a, "pointer"_a, "type"_a, "sizes"_a, "strides"_a,
                  "device"_a = -1, "owner"_a = nb::none())
      .def_static("of", &array_from, "source"_a, "argument"_a, "type"_a = "", "writable"_a = false)
      .def("swapped", &swapped, "first"_a, "second"_a)
      .def_prop_ro("type", [](const Array& a) { return name_of(a.tensor.type); })
      .def_prop_ro(
          "shape",
          [](const Array& a) {
            return nb::tuple(nb::cast(std::vector<std::int64_t>(
                a.tensor.sizes.begin(), a.tensor.sizes.begin() + a.tensor.rank)));
          },
          nb::sig("def shape(self) -> tuple[int, ...]"))
      .def_prop_ro(
          "strides",
          [](const Array& a) {
            return nb::tuple(nb::cast(std::vector<std::int64_t>(
                a.tensor.strides.begin(), a.tensor.strides.begin() + a.tensor.rank)));
          },
          nb::sig("def strides(self) -> tuple[int, ...]"))
      .def_prop_ro("device", [](const Array& a) { return device_name(a.device); })
      .def("__repr__", [](const Array& a) {
        return "<Array " + to_string(a.tensor) + " on " + device_name(a.device) + ">";
      });

  bind_torch_threads(m);
  bind_direct_options(m);
  bind_kept_maps(m);
  m.def("load_torch", &load_torch, "path"_a, "example"_a,
        "Whether the PyTorch whose Python module this is has what Direct calls need. example: any "
        "plain tensor.");
  bind_torch_autograd(m);
  bind_direct(m);
  bind_direct_operators(m);
  bind_direct_arrays(m);
  bind_gpu_steps(m);
  nb::class_<Problem>(m, "Problem", "One call: regard::Attention of the C++ API.")
      .def(
          "__init__",
          [](Problem* self, const Array& q, const Array& k, const Array& v, const Facts& options) {
            new (self) Problem(problem_of(q, k, v, options));
          },
          "q"_a, "k"_a, "v"_a, "options"_a = nb::dict())
      .def_prop_ro("type", [](const Problem& p) { return name_of(p.attention.q.type); })
      .def("forward", &run_forward, "out"_a, "lse"_a = nb::none(), nb::kw_only(),
           "continue_from"_a = false, "multiprocessors"_a = 0, "stream"_a = 0, "threads"_a = 0,
           "backend"_a = "", "allocate"_a = nb::none(), "torch_threads"_a = nb::none())
      .def("backward", &run_backward, "out"_a.none(), "lse"_a, "dout"_a, "dlse"_a = nb::none(),
           nb::kw_only(), "delta"_a = nb::none(), "dq"_a = nb::none(), "dk"_a = nb::none(),
           "dv"_a = nb::none(), "dbias"_a = nb::none(), "dsink"_a = nb::none(),
           "accumulate"_a = false, "multiprocessors"_a = 0, "stream"_a = 0, "threads"_a = 0,
           "backend"_a = "", "allocate"_a = nb::none(), "torch_threads"_a = nb::none())
      .def(
          "dropout_mask",
          [](const Problem& p, const Array& keep) {
            without_gil([&] { dropout_mask(p.attention, keep.tensor); });
          },
          "keep"_a)
      .def(
          "explain",
          [](const Problem& p, const std::string& pass, const std::string& device, int threads,
             const std::string& backend) -> Facts {
            const Run run = run_of(p, device, 0, threads, backend);
            Attention attention = p.attention;
            use_found_map(attention, run);
            const Explanation e = explain(attention, pass_named(pass), run);
            return facts("supported", e.supported, "backend", e.backend, "kernel", e.kernel, "text",
                         e.text, "workspace", e.workspace, "pairs", e.pairs, "flops", e.flops);
          },
          "pass_"_a = "forward", "device"_a = "", "threads"_a = 0, "backend"_a = "")
      .def(
          "prepare",
          [](const Problem& p, const std::string& pass, const std::string& device,
             const std::string& backend) {
            const Pass which = pass_named(pass);
            const Run run = run_of(p, device, 0, 0, backend);
            without_gil([&] { prepare(p.attention, which, run); });
          },
          "pass_"_a = "forward", "device"_a = "", "backend"_a = "");

  m.def("setup", &setup);
  m.def("option_defaults", &option_defaults);
  m.def("xla_handlers", &xla_handlers);
  m.def("version", &version);
  m.def("dropout_probability", &dropout_probability, "p"_a);
  m.def(
      "measured_peak",
      [](const std::string& type, int threads, const std::string& backend) {
        return measured_peak(type_named("type", type), {.threads = threads, .backend = backend});
      },
      "type"_a, "threads"_a = 0, "backend"_a = "",
      "FLOP/s of the instruction behind a CPU kernel in a register-only loop, measured now.");
  m.def(
      "trim_memory", [](int device) { cuda_memory::trim(device); }, "device"_a);
  m.def("allow_compilation", &allow_compilation, "allowed"_a);
}

}  // namespace regard::python

// All interpreters of the process share the binding's types, and a subinterpreter that ends would
// take them away from the others.
extern "C" NB_EXPORT PyObject* PyInit__core() {
  if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0) {
    PyErr_SetString(PyExc_ImportError,
                    "regard can be imported into Python's main interpreter only, not into a "
                    "subinterpreter");
    return nullptr;
  }
  return regard::python::PyInit__core_of_main();
}
