// regard._core: the library's calls on Arrays. What users see is made of it in Python.
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <regard/cuda.hpp>

#include "gil.hpp"
#include "problem.hpp"
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

// regard.errors has a class for each code, made from (text, argument, value). What is a field of a
// field in C++, dropout.p, is one keyword in Python, dropout_p.
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

// A function of Python that is given a number of bytes and returns the address of as many; none:
// the library allocates its own. The caller keeps the memory until the call has returned.
using Allocate = std::optional<nb::typed<nb::callable, std::uintptr_t(std::size_t)>>;

template <class... Tensors>
Run with_workspace(Run run, const Allocate& allocate, const Attention& a,
                   const Tensors&... tensors) {
  if (!allocate) return run;
  const std::size_t size = workspace(a, tensors..., run);
  if (size == 0) return run;
  const auto address = nb::cast<std::uintptr_t>((*allocate)(size));
  run.workspace = {.data = reinterpret_cast<void*>(address), .size = size};
  return run;
}

void run_forward(const Problem& p, const Array& out, const Array* lse, std::uintptr_t stream,
                 int threads, const std::string& backend, const Allocate& allocate) {
  const ForwardOutputs outputs{.out = p.place("out", &out), .lse = p.place("lse", lse)};
  const Run run =
      with_workspace(run_of(p, "", stream, threads, backend), allocate, p.attention, outputs);
  without_gil([&] { forward(p.attention, outputs, run); });
}

void run_backward(const Problem& p, const Array& out, const Array& lse, const Array& dout,
                  const Array* dlse, const Array* dq, const Array* dk, const Array* dv,
                  const Array* dbias, const Array* dsink, bool accumulate, std::uintptr_t stream,
                  int threads, const std::string& backend, const Allocate& allocate) {
  const BackwardInputs inputs{.out = p.place("out", &out),
                              .lse = p.place("lse", &lse),
                              .dout = p.place("dout", &dout),
                              .dlse = p.place("dlse", dlse)};
  const Gradients gradients{.dq = p.place("dq", dq),
                            .dk = p.place("dk", dk),
                            .dv = p.place("dv", dv),
                            .dbias = p.place("dbias", dbias),
                            .dsink = p.place("dsink", dsink),
                            .accumulate = accumulate};
  const Run run = with_workspace(run_of(p, "", stream, threads, backend), allocate, p.attention,
                                 inputs, gradients);
  without_gil([&] { backward(p.attention, inputs, gradients, run); });
}

// What is said of something, by name.
using Facts = nb::typed<nb::dict, nb::str, nb::any>;

Facts setup() {
  nb::list backends_list;
  for (const BackendInfo& backend : backends()) {
    nb::dict one;
    one["name"] = backend.name;
    one["available"] = backend.available;
    one["note"] = backend.note;
    backends_list.append(one);
  }
  nb::list devices;
  const CudaSetup cuda = cuda_setup();
  for (const CudaDevice& device : cuda.devices) {
    nb::dict one;
    one["name"] = device.name;
    one["chip"] = device.chip;
    one["multiprocessors"] = device.multiprocessors;
    one["memory"] = device.memory;
    devices.append(one);
  }
  const Machine host = machine();
  nb::dict all;
  all["version"] = version();
  all["backends"] = backends_list;
  all["cpu"] = host.cpu;
  all["isa"] = nb::cast(host.isa);
  all["threads"] = host.threads;
  all["gpus"] = devices;
  all["driver"] = cuda.driver;
  all["compiler"] = cuda.compiler;
  all["cache"] = cuda.cache;
  return all;
}

}  // namespace

NB_MODULE(_core_of_main, m) {
  nb::register_exception_translator(translate);
  nb::set_leak_warnings(false);  // of Problems that a program still holds when it ends

  nb::class_<Array>(m, "Array", "Memory, its element type, sizes and strides (in elements).")
      .def_static("at", &array_at, "pointer"_a, "type"_a, "sizes"_a, "strides"_a, "device"_a = -1,
                  "owner"_a = nb::none())
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

  nb::class_<Problem>(m, "Problem", "What is computed: regard::Attention of the C++ API.")
      .def(
          "__init__",
          [](Problem* self, const Array& q, const Array& k, const Array& v, const Arrays& arrays,
             std::optional<double> scale, double softcap, const std::string& causal,
             std::pair<std::int64_t, std::int64_t> window, double dropout_p,
             std::uint64_t dropout_seed, std::uint64_t dropout_offset, std::int64_t max_seqlen_q,
             std::int64_t max_seqlen_k, const std::string& precision, bool deterministic) {
            new (self) Problem(problem_of(q, k, v, arrays,
                                          {.scale = scale,
                                           .softcap = softcap,
                                           .causal = causal,
                                           .window = window,
                                           .dropout_p = dropout_p,
                                           .dropout_seed = dropout_seed,
                                           .dropout_offset = dropout_offset,
                                           .max_seqlen_q = max_seqlen_q,
                                           .max_seqlen_k = max_seqlen_k,
                                           .precision = precision,
                                           .deterministic = deterministic}));
          },
          "q"_a, "k"_a, "v"_a, "arrays"_a = nb::dict(), nb::kw_only(), "scale"_a = nb::none(),
          "softcap"_a = 0.0, "causal"_a = "none",
          "window"_a = std::pair<std::int64_t, std::int64_t>{-1, -1}, "dropout_p"_a = 0.0,
          "dropout_seed"_a = 0, "dropout_offset"_a = 0, "max_seqlen_q"_a = 0, "max_seqlen_k"_a = 0,
          "precision"_a = "full", "deterministic"_a = false)
      .def_prop_ro("type", [](const Problem& p) { return name_of(p.attention.q.type); })
      .def("forward", &run_forward, "out"_a, "lse"_a = nb::none(), nb::kw_only(), "stream"_a = 0,
           "threads"_a = 0, "backend"_a = "", "allocate"_a = nb::none())
      .def("backward", &run_backward, "out"_a, "lse"_a, "dout"_a, "dlse"_a = nb::none(),
           nb::kw_only(), "dq"_a = nb::none(), "dk"_a = nb::none(), "dv"_a = nb::none(),
           "dbias"_a = nb::none(), "dsink"_a = nb::none(), "accumulate"_a = false, "stream"_a = 0,
           "threads"_a = 0, "backend"_a = "", "allocate"_a = nb::none())
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
            const Explanation e =
                explain(p.attention, pass_named(pass), run_of(p, device, 0, threads, backend));
            nb::dict all;
            all["supported"] = e.supported;
            all["backend"] = e.backend;
            all["kernel"] = e.kernel;
            all["text"] = e.text;
            all["workspace"] = e.workspace;
            all["pairs"] = e.pairs;
            all["flops"] = e.flops;
            return all;
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
  m.def("allow_compilation", &allow_compilation, "allowed"_a);
}

}  // namespace regard::python

// The binding's types are the process's: ending a second interpreter would take them from the
// first.
extern "C" NB_EXPORT PyObject* PyInit__core() {
  if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0) {
    PyErr_SetString(PyExc_ImportError,
                    "regard can be imported into Python's main interpreter only, not into a "
                    "subinterpreter");
    return nullptr;
  }
  return regard::python::PyInit__core_of_main();
}
