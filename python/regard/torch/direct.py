"""Calls on plain tensors, without PyTorch's dispatcher, which boxes every argument of an operator.

The binding reads tensors through DLPack's C exchange API, which PyTorch has from 2.10 on. The
operators take what is not plain: subclasses of Tensor, fake tensors, modes, autocast, transforms,
strided rows and empty tensors; and every call that breaks a rule, for the text of their errors.
The operators, which compiled programs call, and their kernels begin with a direct call as well.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import _core
from ..element_types import NAMES, type_name
from ..kept_options import NO_ARRAYS, PLAIN, REFUSED, KeptOptions, separated
from .kernels import ARGUMENTS, TENSORS, VALUES, dense, run_backward, run_forward
from .threads import TORCH_THREADS

_is_compiling = torch.compiler.is_dynamo_compiling  # a constant for the compiler
_is_deterministic = torch._C._get_deterministic_algorithms


class Options(KeptOptions):
    """One combination of options. `values` are what the operators take for it after tensors."""

    def __init__(self, given: dict[str, Any], equal_heads: bool, out_type: Any, threads: int,
                 backend: str) -> None:
        if not all(type(value) in (*PLAIN, torch.dtype) for value in (out_type, threads, backend)):
            raise TypeError
        if given.get("dropout_p") and "dropout_seed" not in given:
            raise ValueError  # one is drawn for each call
        type_ = None if out_type is None else getattr(torch, NAMES[type_name("", out_type)])
        super().__init__(given, equal_heads, type_, threads, backend)
        self.values = (*(VALUES | self.checked | {"layout": self.layout}).values(), type_, threads,
                       backend)


@lru_cache(maxsize=1024, typed=True)
def _options(out_type: Any, threads: int, backend: str, **given: Any) -> Options:
    return Options(given, False, out_type, threads, backend)


@lru_cache(maxsize=1024, typed=True)
def _stock_options(is_causal: bool, scale: Any, enable_gqa: bool, deterministic: bool) -> Options:
    given = {"causal": "top_left" if is_causal else "none", "scale": scale,
             "deterministic": deterministic}
    return Options(given, not enable_gqa, None, 0, "")


_THREADS, _BACKEND = 0, ""  # defaults, which are recognised by identity: a look-up takes longer
_NO_OPTIONS = _options(None, _THREADS, _BACKEND)


def attention(q: Any, k: Any, v: Any, given: dict[str, Any], dropout_seed: Any, return_lse: Any,
              out_type: Any, threads: Any, backend: Any) -> Any:
    """The result; or None where the operators must take the call."""
    if _is_compiling() or _direct is None or forward_ad._current_level >= 0:
        return None
    try:
        if not given and dropout_seed is None and not _is_deterministic():
            is_kept = out_type is None and threads is _THREADS and backend is _BACKEND
            options = _NO_OPTIONS if is_kept else _options(out_type, threads, backend)
            return _direct.forward(options, q, k, v, NO_ARRAYS, return_lse)
        arrays, values = separated(given)
        if "cu_seqlens_q" in arrays and None in (values.get("max_seqlen_q"),
                                                 values.get("max_seqlen_k")):
            return None
        if _is_deterministic() and values.setdefault("deterministic", True) is not True:
            return None
        if dropout_seed is not None:
            values["dropout_seed"] = dropout_seed
        return _direct.forward(_options(out_type, threads, backend, **values), q, k, v, arrays,
                               return_lse)
    except REFUSED:
        return None


_NO_STOCK_OPTIONS = _stock_options(False, None, False, False)


def scaled_dot_product_attention(query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any,
                                 is_causal: Any, scale: Any, enable_gqa: Any) -> Any:
    """The result; or None where it takes more than one direct call to have PyTorch's meaning."""
    if _is_compiling() or _direct is None or forward_ad._current_level >= 0:
        return None
    if type(dropout_p) is not float or dropout_p != 0:
        return None
    try:
        arrays = NO_ARRAYS
        if attn_mask is not None:
            if not isinstance(attn_mask, Tensor):
                return None
            arrays = {"mask" if attn_mask.dtype is torch.bool else "bias": attn_mask}
        deterministic = _is_deterministic()
        if is_causal is False is enable_gqa is deterministic and scale is None:
            options = _NO_STOCK_OPTIONS
        else:
            if type(is_causal) is not bool or type(enable_gqa) is not bool:
                return None
            options = _stock_options(is_causal, scale, enable_gqa, deterministic)
        return _direct.forward(options, query, key, value, arrays, False)
    except REFUSED:
        return None


# ------------------------------------------------------------------------ into tensors of the caller

def forward_into(q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any], out: Tensor, lse: Tensor,
                 continue_from: bool, threads: int, backend: str) -> bool:
    """Writes out and lse; False where another path must take the call. given: checked options, (B, H,
    S, D) among them."""
    if _direct is None:
        return False
    try:
        arrays, values = separated(given)
        _direct.results_into(_options(None, threads, backend, **values), q, k, v, arrays, out, lse,
                             continue_from)
    except REFUSED:
        return False
    return True


def backward_into(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor,
                  v: Tensor, given: dict[str, Any], gradients: dict[str, Any], accumulate: bool,
                  threads: int, backend: str) -> bool:
    """Likewise; gradients: those to write or to add to, by name."""
    if _direct is None:
        return False
    try:
        arrays, values = separated(given)
        _direct.gradients_into(_options(None, threads, backend, **values), (out, lse, q, k, v),
                               arrays, dout, dlse, gradients, accumulate)
    except REFUSED:
        return False
    return True


def add_rows(first: Tensor, second: Tensor, to: Tensor) -> None:
    """to = first + second, which are float32, or float64 as all, and have rank 4: in one pass over
    memory, where PyTorch's own takes a third longer on an H100 if `to` has another type."""
    if _direct is not None and to.is_cuda:
        try:
            _direct.add_rows(first, second, to)
            return
        except REFUSED:  # a subclass of Tensor
            pass
    torch.add(first, second, out=to)


# ----------------------------------------------------------------------------- operators' kernels

_NAMES = [*ARGUMENTS][:TENSORS - 1]


@lru_cache(maxsize=1024, typed=True)
def _options_of_operator(*values: Any) -> Options:
    *options, out_type, threads, backend = values
    return Options(dict(zip(VALUES, options)), False, out_type, threads, backend)


def _operators_call(rest: Sequence[Any]) -> tuple[Options, dict[str, Any]]:
    """The options and arrays among the arguments of an operator after q, k and v.
    Errors: TypeError, ValueError, where a direct call cannot take them."""
    if _direct is None or rest[TENSORS - 1] is not None:  # a drawn seed is no option to be kept
        raise TypeError
    values = (tuple(x) if type(x) is list else x for x in rest[TENSORS:])
    return _options_of_operator(*values), {
        name: x for name, x in zip(_NAMES, rest) if x is not None}


def forward_kernel(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """out and lse."""
    try:
        options, arrays = _operators_call(rest)
        return _direct.results(options, q, k, v, arrays)  # type: ignore[no-any-return]
    except REFUSED:
        return run_forward(q, k, v, *rest)


def backward_kernel(wanted: Sequence[bool], dout: Tensor, dlse: Tensor | None, out: Tensor,
                    lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    """Those gradients that are wanted."""
    try:
        options, arrays = _operators_call(rest)
        found = _direct.gradients(options, wanted, (out, lse, q, k, v), arrays, dout, dlse)
        return [x for x in found if x is not None]
    except REFUSED:
        return run_backward(wanted, dout, dlse, out, lse, q, k, v, *rest)


_DEFAULTS = [*ARGUMENTS.values()][TENSORS:]
_OPTIONAL = (type(None), float, torch.dtype)


def _options_of_call(*values: Any) -> Options:
    """As _options_of_operator, for values that no dispatcher has converted to the schema's types.
    Errors: TypeError, ValueError, also where it would convert one."""
    for value, default in zip(values, _DEFAULTS):
        if type(value) not in (_OPTIONAL if default is None else (type(default),)):
            raise TypeError
        if type(value) is tuple and not all(type(side) is int for side in value):
            raise TypeError
    return _options_of_operator(*values)


def operators_calls(forward: Any, backward: Any) -> Any:
    """Functions `forward` and `backward` that try a direct call before the given ones, which enter
    the dispatcher; None where PyTorch lacks what they need. Compiled programs call operators with
    plain tensors, for which the dispatcher would convert thirty arguments to C++, and back for the
    kernels of autograd, which PyTorch's C ABI cannot have."""
    if _direct is None:
        return None
    return _core.DirectOperators({
        "direct": _direct, "tensors": (*_NAMES,), "values": len(_DEFAULTS),
        "options": _options_of_call, "forward": forward, "backward": backward,
        "modes": [torch._C._autograd._profiler_enabled,  # profiles show operators
                  lambda: forward_ad._current_level >= 0]})


# ---------------------------------------------------------------------------------------- autograd

class RegardAttention(torch.autograd.Function):
    """As the operators' function of this name."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None,
                sink: Tensor | None, options: Options, arrays: dict[str, Tensor],
                return_lse: bool) -> Any:
        for name, x in arrays.items():
            if x is not bias and x is not sink and x.is_inference():
                arrays = arrays | {name: x.clone()}  # which autograd can save
        if len(arrays) > 1:
            arrays = {name: arrays[name] for name in _NAMES if name in arrays}
        return _direct.record(ctx, q, k, v, bias, sink, options, arrays, return_lse)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Any, ...]:
        if dout is None and dlse is None:
            return (None,) * 8
        saved = ctx.saved_tensors
        if dout is None:
            dout = saved[0].new_zeros(saved[0].shape[-1]).expand_as(saved[0])
        try:
            found = _direct.backward(ctx, saved, dout, dlse)
        except REFUSED:
            found = None
        return _by_operators(ctx, saved, dout, dlse) if found is None else found


def _by_operators(ctx: Any, saved: tuple[Tensor, ...], dout: Tensor, dlse: Tensor | None
                  ) -> tuple[Any, ...]:
    arrays = dict(zip(ctx.names, saved[5:]))
    wanted = ctx.needs_input_grad[:5]
    tensors = [arrays.get(name) for name in [*ARGUMENTS][:TENSORS]]
    backward = torch.ops.regard.backward.default
    found = iter(backward(wanted, dout, dlse, *saved[:5], *tensors, *ctx.options.values))
    return (*(next(found) if is_wanted else None for is_wanted in wanted), None, None, None)


_SCHEMAS = (
    ("CPU", "_scaled_dot_product_efficient_attention",
     "(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, bool compute_log_sumexp, "
     "float dropout_p=0., bool is_causal=False, *, float? scale=None) -> (Tensor output, "
     "Tensor log_sumexp, Tensor philox_seed, Tensor philox_offset)"),
    ("CPU", "_scaled_dot_product_efficient_attention_backward",
     "(Tensor grad_out_, Tensor query, Tensor key, Tensor value, Tensor attn_bias, Tensor out, "
     "Tensor logsumexp, Tensor philox_seed, Tensor philox_offset, float dropout_p, "
     "bool[4] grad_input_mask, bool is_causal=False, *, float? scale=None) -> "
     "(Tensor, Tensor, Tensor, Tensor)"),
    ("CUDA", "_scaled_dot_product_fused_attention_overrideable",
     "(Tensor query, Tensor key, Tensor value, Tensor? attn_bias=None, float dropout_p=0., "
     "bool is_causal=False, bool return_debug_mask=False, *, float? scale=None) -> "
     "(Tensor output, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, "
     "SymInt max_k, Tensor philox_seed, Tensor philox_offset, Tensor debug_attn_mask)"),
    ("CUDA", "_scaled_dot_product_fused_attention_overrideable_backward",
     "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor attn_bias, "
     "bool[4] grad_input_mask, Tensor out, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, "
     "SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, Tensor philox_seed, "
     "Tensor philox_offset, *, float? scale=None) -> (Tensor grad_query, Tensor grad_key, "
     "Tensor grad_value, Tensor grad_attn_bias)"))


@lru_cache(maxsize=1)
def _autograd() -> Any:
    """Calls whose node of autograd is C++; None where an operator of this PyTorch is another one, or
    somebody else has given it kernels."""
    for key, name, schema in _SCHEMAS:
        found = getattr(torch.ops.aten, name).default
        if not str(found._schema).endswith(schema):
            return None
        if torch._C._dispatch_has_kernel_for_dispatch_key(found._name, key):
            return None
    # This function converts arguments faster than the operator's own.
    on_cpu = getattr(torch._C._VariableFunctions, _SCHEMAS[0][1], None)
    on_cuda = getattr(torch.ops.aten, _SCHEMAS[2][1]).default._op
    if on_cpu is None:
        return None
    _register_fake_backward()
    return _core.TorchAutograd(on_cpu, on_cuda)


def _register_fake_backward() -> None:
    """For compiled autograd: PyTorch's shapes and strides of these gradients are those of its CUDA
    kernel, also on the CPU. An older PyTorch keeps them."""
    try:
        from torch._subclasses import fake_impls
        register: Any = fake_impls.register_op_impl
    except (ImportError, AttributeError):
        return
    operator = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default

    @register(operator)  # type: ignore[untyped-decorator]
    def fake_backward(mode: Any, function: Any, dout: Tensor, q: Any, k: Tensor, v: Tensor,
                      bias: Tensor | None, out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor,
                      dropout_p: float, wanted: Sequence[bool], *rest: Any, **options: Any) -> Any:
        if q.fake_device.type != "cpu":
            return NotImplemented
        with mode:
            found = [dense(x, x.shape[-1], None) if is_wanted else None
                     for x, is_wanted in zip((q, k, v), wanted)]
            return *found, None if bias is None or not wanted[3] else bias.new_empty(bias.shape)


def _bits(*keys: str) -> int:
    """A set of dispatch keys."""
    sets = (torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)) for key in keys)
    return functools.reduce(operator.or_, (keys.raw_repr() for keys in sets))


def _made() -> Any:
    """The binding's side; None where this PyTorch lacks what it needs."""
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None:
        return None
    if not _core.load_torch(torch._C.__file__, torch.empty(0)):
        return None
    # Function.apply, whose checks `modes` has made
    apply = torch._C._FunctionBase.__dict__["apply"].__get__(None, RegardAttention)
    return _core.Direct({
        "tensor": Tensor, "parameter": torch.nn.Parameter, "exchange": exchange,
        "autocast": _bits("AutocastCPU", "AutocastCUDA"),
        "transforms": _bits("FuncTorchDynamicLayerFrontMode"), "dense": dense, "apply": apply,
        "torch_threads": TORCH_THREADS, "autograd": _autograd(),
        "hooks": torch._C._autograd._top_saved_tensors_default_hooks})


_direct = _made()
