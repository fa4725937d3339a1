#include "torch_abi.hpp"

#include <dlfcn.h>

namespace regard::python::torch_abi {

namespace {

template <class Visit>
void visit_functions(Functions& f, Visit&& visit) {
  visit("aoti_torch_get_data_ptr", f.data);
  visit("aoti_torch_get_dim", f.rank);
  visit("aoti_torch_get_numel", f.count);
  visit("aoti_torch_get_sizes", f.sizes);
  visit("aoti_torch_get_strides", f.strides);
  visit("aoti_torch_get_dtype", f.type);
  visit("aoti_torch_get_device_type", f.device_type);
  visit("aoti_torch_get_device_index", f.device_index);
  visit("aoti_torch_is_defined", f.is_defined);
  visit("aoti_torch_empty_strided", f.empty);
  visit("aoti_torch_new_uninitialized_tensor", f.undefined);
  visit("aoti_torch_new_tensor_handle", f.same);
  visit("aoti_torch_delete_tensor_object", f.destroy);
  visit("aoti_torch_dtype_bfloat16", f.bf16);
  visit("aoti_torch_dtype_float16", f.f16);
  visit("aoti_torch_dtype_float32", f.f32);
  visit("aoti_torch_dtype_float64", f.f64);
  visit("aoti_torch_dtype_uint8", f.u8);
  visit("aoti_torch_device_type_cpu", f.cpu);
  visit("aoti_torch_device_type_cuda", f.cuda);
  visit("aoti_torch_memory_format_contiguous_format", f.contiguous);
  visit("torch_list_get_item", f.list_item);
  visit("torch_delete_list", f.destroy_list);
  visit("aoti_torch_library_init_impl", f.open_library);
  visit("torch_library_impl", f.implement);
  visit("torch_call_dispatcher", f.call);
  visit("torch_get_num_threads", f.num_threads);
  visit("aoti_torch_grad_mode_is_enabled", f.is_grad_enabled);
  visit("_Z16THPVariable_WrapRKN2at10TensorBaseE", f.to_object);
  visit("_ZN2at6native6is_negERKNS_6TensorE", f.is_neg);
  visit("_ZNK3c1010TensorImpl13requires_gradEv", f.requires_grad);
  visit("_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv", f.count_function_modes);
  visit("_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv", f.count_dispatch_modes);
  visit("_ZN5torch3jit6tracer15getTracingStateEv", f.tracing);
  visit("_ZN3c104impl31tls_is_dispatch_keyset_includedENS_14DispatchKeySetE", f.keys_are_included);
  visit("_ZN3c104impl31tls_is_dispatch_keyset_excludedENS_14DispatchKeySetE", f.keys_are_excluded);
}

template <class Function>
bool found(void* module, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(module, name));
  return function != nullptr;
}

}  // namespace

std::optional<Functions> functions_of(const std::string& path) {
  // Stays open: PyTorch is never unloaded.
  void* const module = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (!module) return std::nullopt;
  Functions functions;
  bool all = true;
  visit_functions(functions, [&](const char* name, auto& function) {
    all = found(module, name, function) && all;
  });
  if (!all) return std::nullopt;
  found(module, "aoti_torch_get_current_cuda_stream", functions.current_stream);
  return functions;
}

}  // namespace regard::python::torch_abi
