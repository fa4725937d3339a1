"""`regard.torch.attention`: the options that a user gives, as the operator takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Union, overload

import torch
from torch import Tensor

from ..arrays import framework_of
from ..call import checked_options
from ..checks import flag, run_options
from ..docstrings import documented
from ..element_types import NAMES, type_name
from ..errors import Unsupported, WrongType, refuse
from ..mask_options import resolved
from ..options import ARRAYS
from . import direct
from .kernels import arguments
from .limits import is_causal_bias, is_distributed
from .operators import forward, refuse_tangents

if TYPE_CHECKING:
    from ..typing import AttentionOptions, Unpack

Result = Union[Tensor, tuple[Tensor, Tensor]]


@overload
def attention(q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False,
              out_type: Any = None, threads: int = 0, backend: str = "",
              **options: Unpack[AttentionOptions]) -> Tensor: ...


@overload
def attention(q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True],
              out_type: Any = None, threads: int = 0, backend: str = "",
              **options: Unpack[AttentionOptions]) -> tuple[Tensor, Tensor]: ...


@overload
def attention(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, out_type: Any = None,
              threads: int = 0, backend: str = "", **options: Unpack[AttentionOptions]
              ) -> Result: ...


@documented
def attention(q: Tensor, k: Tensor, v: Tensor, *, dropout_seed: int | Tensor | None = None,
              return_lse: bool = False, out_type: Any = None, threads: int = 0,
              backend: str = "", **options: Any) -> Result:
    """softmax(scale q k^T + bias) v, exactly, in memory linear in the sequence.

    Differentiable in q, k, v, bias and sink, through out and through lse; gradients of gradients
    are not available. Runs on the CPU and on CUDA, there on the current stream; under
    torch.compile, torch.autocast, torch.utils.checkpoint and in CUDA graphs. Arrays are tensors: of
    any strides (a last one that is not 1 costs a dense copy); alibi_slopes and sink may be of any
    float type. torch.use_deterministic_algorithms sets deterministic.

    Args:
        {q}
        {k}
        {v}
        {options}
        dropout_seed: 64 bits; with dropout_offset it decides which weights drop, see
            `regard.dropout_mask`. A tensor of one int64 or uint64 on q's GPU is read by the kernels
            when they run, of backward too: it must not change in between. None draws a seed from
            PyTorch's generator of the CPU, which torch.manual_seed sets; while a CUDA graph is
            captured, from the GPU's generator, anew at each replay.
        {return_lse}
        {out_type}
        threads: of the CPU; 0 is PyTorch's own, torch.get_num_threads() of them, another number
            is so many of the library's.
        {backend}

    Returns:
        {results}

    Raises:
        {errors}
    """
    if options and "mask" in options:
        options = resolved(q, k, options)
    result: Any = direct.attention(q, k, v, options, dropout_seed, return_lse, out_type, threads,
                                   backend)
    if result is not None:
        return result  # type: ignore[no-any-return]
    for name, x in (("q", q), ("k", k), ("v", v)):
        require_tensor(name, x)
    for name, option in options.items():
        if option is not None and name in ARRAYS:
            require_tensor(name, option)
    if isinstance(dropout_seed, Tensor):
        require_tensor("dropout_seed", dropout_seed)
    refuse_tangents({"q": q, "k": k, "v": v, **options})
    is_number = isinstance(dropout_seed, int) or not hasattr(dropout_seed, "shape")  # as checks.seed
    if dropout_seed is not None and is_number:
        options["dropout_seed"] = dropout_seed
    if torch.compiler.is_dynamo_compiling():
        check_when_run(options.get("max_seqlen_q"))
        check_when_run(options.get("max_seqlen_k"))
    rest = checked_options(q, k, v, options, arguments())
    for name in ("sink", "alibi_slopes"):
        if rest[name] is not None:
            rest[name] = rest[name].float()
    if dropout_seed is None and rest["dropout_p"] > 0:
        rest["seed_tensor"] = _drawn_seed(q)
    elif isinstance(dropout_seed, Tensor):
        rest["seed_tensor"] = dropout_seed
    elif not is_number:
        framework = framework_of(dropout_seed, "dropout_seed")
        rest["dropout_seed"] = framework.seed_number(dropout_seed, "dropout_seed")
    if torch.are_deterministic_algorithms_enabled():
        rest["deterministic"] = True
    if out_type is not None:
        rest["out_type"] = getattr(torch, NAMES[type_name("out_type", out_type)])
    rest.update(run_options(threads, backend))
    out, lse = forward(q, k, v, *rest.values())
    return (out, lse) if flag("return_lse", return_lse) else out


_check: Any = torch._check


def check_when_run(longest: Any) -> None:
    """The compiler does not know a number that its program reads from a tensor, such as the largest
    difference of cu_seqlens: the program checks it."""
    if isinstance(longest, int):
        _check(longest >= 0)
        _check(longest < 2**31)  # as cu_seqlens, which is int32


def _drawn_seed(q: Tensor) -> Tensor:
    """A graph that is captured draws at each replay; a draw on the CPU would be part of it."""
    captured = (q.is_cuda and not torch.compiler.is_compiling()
                and torch.cuda.is_current_stream_capturing())
    return torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device=q.device if captured else "cpu")


def require_tensor(name: str, x: Any) -> None:
    """Errors: WrongType for what is no dense tensor of PyTorch with elements of its own;
    Unsupported for a DTensor, and for other devices."""
    if not isinstance(x, Tensor):
        raise refuse(name, f"a {type(x).__name__}", "must be a tensor of PyTorch", WrongType)
    if is_causal_bias(x):
        raise refuse(name, "a CausalBias", "is not initialised: give causal='top_left' or "
                     "'bottom_right', or attn_mask of scaled_dot_product_attention", WrongType)
    if is_distributed(x):
        raise refuse(name, "a DTensor", f"is not supported: give {name}.to_local(), rows of a "
                     "sequence to regard.torch.distributed", Unsupported)
    if x.device.type not in ("cpu", "cuda", "meta"):
        raise refuse(name, f"a tensor on {x.device}", "must be on the CPU or a CUDA GPU",
                     Unsupported)
    if x.layout != torch.strided:
        raise refuse(name, f"a tensor of layout {x.layout}", "must be strided", WrongType)
    if x.is_nested:
        raise refuse(name, "a nested tensor", "must be dense: pack rows and give cu_seqlens_q",
                     WrongType)
    if x.is_quantized:
        raise refuse(name, "a quantised tensor", f"must hold numbers: {name}.dequantize()",
                     WrongType)
