"""Which masks on a GPU keep their tile maps, and what the binding needs of PyTorch or CuPy for that.

Calls find the maps by the addresses of a mask's arrays, so that operators of compiled programs and
backward passes, which are given arrays alone, find them as well. PyTorch's maps live as long as the
first array of the mask does, of which autograd keeps a reference for the backward pass; CuPy's as
long as the Mask.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from . import _core

if TYPE_CHECKING:
    from .mask_value import Mask

_of_masks: WeakKeyDictionary[Mask, _core.KeptMaps] = WeakKeyDictionary()
_of_tensors: Any = None  # a dictionary that holds PyTorch's tensors weakly, once it is needed


def keep_maps(mask: Mask) -> None:
    """From now on calls with the mask keep its maps; nothing for a mask that is not on a GPU."""
    arrays = mask.arrays()
    torch = sys.modules.get("torch")
    if not arrays:
        return
    if torch is not None and all(type(x) is torch.Tensor for x in arrays.values()):
        keep_maps_of_tensors(**arrays)
    elif all(type(x).__module__ == "cupy" for x in arrays.values()) and "dense" not in arrays:
        _of_masks[mask] = _kept(arrays, _of_cupy([*arrays.values()]),
                                {name: x.data.ptr for name, x in arrays.items()})


def keep_maps_of_tensors(**arrays: Any) -> None:
    """As keep_maps; plain tensors by name: row_spans, key_spans, dense."""
    global _of_tensors
    if sys.modules["torch"].compiler.is_compiling():
        return
    tensors = [*arrays.values()]
    device = tensors[0].device
    if device.type != "cuda" or any(x.device != device for x in tensors):
        return
    if "dense" in arrays and arrays["dense"].is_inference():
        return  # a caller's memory whose changes nobody counts
    if _of_tensors is None:
        from torch.utils.weak import WeakIdKeyDictionary

        _of_tensors = WeakIdKeyDictionary()
    _of_tensors[tensors[0]] = _kept(arrays, _of_torch(tensors, device.index),
                                    {name: x.data_ptr() for name, x in arrays.items()})


def _kept(arrays: dict[str, Any], framework: dict[str, Any], addresses: dict[str, int]
          ) -> _core.KeptMaps:
    at = {name: addresses.get(name, 0) for name in ("dense", "row_spans", "key_spans")}
    return _core.KeptMaps.of(at["dense"], at["row_spans"], at["key_spans"], framework)


def _of_torch(tensors: list[Any], index: int) -> dict[str, Any]:
    torch = sys.modules["torch"]
    aliases = [x.detach() for x in tensors]  # they hold the memory, and count with its versions
    counted = [x for x in aliases if not x.is_inference()]

    def may_keep() -> bool:
        return (torch.cuda.current_device() == index
                and not torch.cuda.is_current_stream_capturing()
                and not _is_in_a_graphs_pool(torch, index))

    def allocate(size: int) -> tuple[int, Any]:
        memory = torch.empty(size, dtype=torch.uint8, device=aliases[0].device)
        return memory.data_ptr(), memory

    return {"version": lambda: tuple(x._version for x in counted), "may_keep": may_keep,
            "allocate": allocate}


def _is_in_a_graphs_pool(torch: Any, index: int) -> bool:
    """Whether torch.compile runs a program on the stream whose memory belongs to its graphs: before
    it captures one, it runs it once, and no tensor may be left of that."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return False
    try:
        manager = trees.get_manager(index, create_if_none_exists=False)
    except AssertionError:  # a thread that compiled programs have not run in
        return False
    return manager is not None and bool(manager.stream == torch.cuda.current_stream(index))


def _of_cupy(arrays: list[Any]) -> dict[str, Any]:
    cupy = sys.modules["cupy"]
    index = arrays[0].device.id
    held = [x.view() for x in arrays]

    def may_keep() -> bool:
        runtime, stream = cupy.cuda.runtime, cupy.cuda.get_current_stream()
        return runtime.getDevice() == index and not runtime.streamIsCapturing(stream.ptr)

    def allocate(size: int) -> tuple[int, Any]:
        with held[0].device:
            memory = cupy.empty(size, "uint8")
        # With the stream, so that no other one gets its address while calls look for it.
        return memory.data.ptr, (memory, cupy.cuda.get_current_stream())

    return {"version": lambda: None, "may_keep": may_keep, "allocate": allocate}
