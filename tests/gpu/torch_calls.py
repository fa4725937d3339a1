"""The library on PyTorch tensors: no copies, PyTorch's current stream; and attention in float64.

Shared by smoke.py and test_torch.py. Tensors are (B, H, S, D) with any strides, as
views of (B, S, H, D) memory, or packed (total, H, D).
"""

from ctypes import byref, c_void_p, create_string_buffer

import torch

import regard_ctypes as regard

CODES = {torch.float64: regard.F64, torch.float32: regard.F32, torch.float16: regard.F16,
         torch.bfloat16: regard.BF16_CODE, torch.bool: regard.BOOL, torch.int32: regard.I32}
TYPES = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def tensor(x):
    result = regard.Tensor(x.data_ptr(), CODES[x.dtype], x.dim())
    result.sizes[: x.dim()] = list(x.shape)
    result.strides[: x.dim()] = list(x.stride())
    return result


def attention(**fields):
    """regard_ctypes.Attention of tensors and options; keeps the tensors alive."""
    result = regard.Attention(**{name: tensor(x) if isinstance(x, torch.Tensor) else x
                                 for name, x in fields.items()})
    result.tensors = [x for x in fields.values() if isinstance(x, torch.Tensor)]
    return result


def run_of(x, backend="", workspace=None, stream=None):
    """Where to run a call on x: its device, the current stream unless one is given."""
    if not x.is_cuda:
        return regard.Run(backend=backend)
    stream = torch.cuda.current_stream(x.device) if stream is None else stream
    run = regard.Run(backend=backend, device=1, device_index=x.device.index or 0,
                     stream=c_void_p(stream.cuda_stream))
    if workspace is not None:
        run.workspace = workspace.data_ptr()
        run.workspace_size = workspace.numel()
    return run


def workspace(attention, which, x, backend=""):
    """Memory of exactly the size that the library asks for."""
    size = regard.c_size_t()
    regard.check(regard.C.regard_workspace(byref(attention), regard.PASS[which],
                                           byref(run_of(x, backend)), byref(size)))
    return torch.empty(size.value, dtype=torch.uint8, device=x.device)


def explain(attention, which, x, backend=""):
    run, needed = run_of(x, backend), regard.c_size_t()
    arguments = byref(attention), regard.PASS[which], byref(run), None
    regard.check(regard.C.regard_explain(*arguments, None, 0, byref(needed)))
    text = create_string_buffer(needed.value)
    regard.check(regard.C.regard_explain(*arguments, text, needed.value, None))
    return text.value.decode()


def forward(attention, out, lse=None, **how):
    """Queues the pass; how: backend, workspace, stream."""
    prepared("forward", attention, forward_tensors(out, lse), run_of(out, **how))()


def backward(attention, out, lse, dout, gradients, dlse=None, accumulate=False, **how):
    tensors = backward_tensors(out, lse, dout, gradients, dlse, accumulate)
    prepared("backward", attention, tensors, run_of(out, **how))()


def prepared(which, attention, tensors, run):
    """The same call again and again, with next to nothing between Python and the library."""
    function = getattr(regard.C, "regard_" + which)
    arguments = byref(attention), byref(tensors), byref(run)

    def call():
        status = function(*arguments)
        if status:
            raise regard.RegardError(status)

    call.keep = attention, tensors, run
    return call


def forward_tensors(out, lse=None):
    return regard.ForwardTensors(out=tensor(out), lse=None if lse is None else tensor(lse))


def backward_tensors(out, lse, dout, gradients, dlse=None, accumulate=False):
    return regard.BackwardTensors(
        out=tensor(out), lse=tensor(lse), dout=tensor(dout), accumulate=accumulate,
        dlse=None if dlse is None else tensor(dlse),
        **{name: tensor(x) for name, x in gradients.items()})


def explained(attention, which, x, backend=""):
    """The numbers: .supported, .kernel, .workspace, .flops."""
    return regard.explain(attention, which, backend=backend,
                          **({"device": 1, "device_index": x.device.index or 0} if x.is_cuda
                             else {}))[1]


def dropout_mask(options, batch, heads, rows, columns, device):
    """The mask that docs/semantics.md defines, computed on the host."""
    keep = torch.zeros((batch, heads, rows, columns), dtype=torch.bool)
    shape = [torch.zeros((batch, heads, n, 1)) for n in (rows, columns, columns)]
    a = attention(q=shape[0], k=shape[1], v=shape[2], dropout=options["dropout"])
    regard.check(regard.C.regard_dropout_mask(byref(a), byref(tensor(keep))))
    return keep.to(device)


# ------------------------------------------------------------------------------- attention, exactly


def exact(q, k, v, *, bias=None, mask=None, alibi_slopes=None, sink=None, scale=None, softcap=0.0,
          causal="none", window=(-1, -1), keep=None, p=0.0, **_):
    """out and lse on whole matrices in the type of the tensors; made for autograd in float64.

    keep (B, Hq, Sq, Sk) is dropout's mask, p its realised probability. Rows that see nothing are
    not provided for.
    """
    rows, columns = q.shape[2], k.shape[2]
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, v))
    score = (q @ k.mT) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap > 0:
        score = softcap * torch.tanh(score / softcap)
    if bias is not None:
        score = score + bias
    i = torch.arange(rows, device=q.device)[:, None]
    j = torch.arange(columns, device=q.device)[None, :]
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(q.dtype)
        slopes = slopes[..., None, None] if slopes.dim() == 2 else slopes[:, None, None]
        score = score - slopes * (i + columns - rows - j).abs()
    diagonal = i if causal == "top_left" else i + columns - rows
    seen = torch.ones((rows, columns), dtype=torch.bool, device=q.device)
    if causal != "none":
        seen &= j <= diagonal
    if window[0] >= 0:
        seen &= j >= diagonal - window[0]
    if window[1] >= 0:
        seen &= j <= diagonal + window[1]
    if mask is not None:
        seen = seen & mask
    score = score.masked_fill(~seen, -torch.inf)
    logits = score
    if sink is not None:
        shape = (*score.shape[:3], 1)
        logits = torch.cat([score, sink[None, :, None, None].expand(shape)], dim=3)
    lse = logits.logsumexp(dim=3)
    weights = torch.exp(score - lse[..., None])
    if keep is not None:
        weights = weights * keep / (1 - p)
    return weights @ v, lse


def exact_gradients(q, k, v, dout, dlse=None, bias=None, sink=None, **options):
    """A dict of out, lse and every gradient in float64."""
    leaves = {name: x.detach().double().requires_grad_() for name, x in
              {"q": q, "k": k, "v": v, "bias": bias, "sink": sink}.items() if x is not None}
    out, lse = exact(**leaves, **options)
    outputs, arriving = [out], [dout.double()]
    if dlse is not None:
        outputs, arriving = [out, lse], [dout.double(), dlse.double()]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), arriving)
    return {"out": out.detach(), "lse": lse.detach()} | {
        "d" + name: gradient for name, gradient in zip(leaves, gradients)}
