"""The ranks of a process group, and what they send each other: rows, as bytes.

Every function is a collective: all ranks call it in the same order. Rows are moved as bytes, so
that each element type works with each backend of torch.distributed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Union

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ...checks import shown
from ...errors import WrongType, refuse

# PyTorch 2.13 has renamed it.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_NOT_A_MEMBER = dist.GroupMember.NON_GROUP_MEMBER  # new_group returns it to other processes


class _Gathering:
    """What is made of all-gathers, whether a group has one level or two."""

    group: ProcessGroup | None

    @property
    def process_group(self) -> Any:
        """The group itself, where None stands for the default one."""
        return dist.group.WORLD if self.group is None else self.group

    def all_gather(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def sum_in_order(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in the order of ranks: the same bits on each of them."""
        parts = self.all_gather(x[None])
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def told(self, said: bytes, device: Any) -> list[bytes]:
        """What each rank says, in as many bytes. device: that of the tensors that move."""
        own = torch.tensor([*said], dtype=torch.uint8, device=device)
        return [bytes(row) for row in self.all_gather(own[None]).tolist()]


class Ranks(_Gathering):
    """This process's place in a group. A plan for one rank, without a group, needs no
    torch.distributed.

    size: of the plan, or None where it is not known. The group may have another one; `require_size`
    refuses that, once the ranks can hear of it.

    Raises:
        WrongType: group is no ProcessGroup.
        InvalidArgument: torch.distributed is not initialised, or this process is not of the group.
    """

    def __init__(self, group: ProcessGroup | None, size: int | None) -> None:
        self.group, self.size, self.rank = group, 1, 0
        if size == 1 and group is None:
            return
        if not (group is None or isinstance(group, ProcessGroup) or group == _NOT_A_MEMBER):
            advice = "; give its get_group(...)" if hasattr(group, "get_group") else ""
            raise refuse("group", f"a {type(group).__name__}", "must be a ProcessGroup of "
                         f"torch.distributed{advice}", WrongType)
        if not dist.is_initialized():
            if group is None and size is None:
                return
            raise refuse("group", group, "torch.distributed has not been initialised; "
                         "init_process_group comes first")
        self.size = dist.get_world_size(group)
        if self.size < 0:
            raise refuse("group", group, "this process does not belong to it")
        self.rank = dist.get_rank(group)

    def require_size(self, size: int) -> None:
        """Errors: InvalidArgument for a group of another size."""
        if self.size != size:
            raise refuse("group", f"a group of {self.size} ranks", f"the plan is for {size}")

    def devices(self) -> list[str]:
        """The kinds of devices whose tensors the group can move: "cpu", "cuda"."""
        if self.size == 1:
            return ["cpu", "cuda"]
        config = str(dist.get_backend_config(self.group))
        return [part.partition(":")[0] for part in config.split(",")]

    def all_gather(self, x: Tensor) -> Tensor:
        """(size n, ...) of (n, ...) from each rank, in the order of ranks. n is equal on all."""
        return self.begin_all_gather(x)()

    def begin_all_gather(self, x: Tensor) -> Callable[[], Tensor]:
        """The same, begun; the result waits for it."""
        if self.size == 1:
            return lambda: x
        sent = _bytes_of_rows(x)
        came = sent.new_empty((self.size * sent.shape[0], sent.shape[1]))
        work = _all_gather_single(came, sent, group=self.group, async_op=True)
        return _waiting([work], [sent], came, x.dtype, x.shape[1:])

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Rows from all ranks: sent[r] of x's rows, in this order, go to rank r, and received[r]
        come from it."""
        return self.begin_all_to_all(x, sent, received)()

    def begin_all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]
                         ) -> Callable[[], Tensor]:
        """The same, begun; the result waits for it."""
        if self.size == 1:
            return lambda: x
        out = _bytes_of_rows(x)
        came = out.new_empty((sum(received), out.shape[1]))
        work = dist.all_to_all_single(came, out, list(received), list(sent), group=self.group,
                                      async_op=True)
        return _waiting([work], [out], came, x.dtype, x.shape[1:])

    def begin_pass(self, x: Tensor, rows: int) -> Callable[[], Tensor]:
        """Sends x to the next rank. The result waits for `rows` rows of the previous rank."""
        if self.size == 1:
            return lambda: x
        out = _bytes_of_rows(x)
        came = out.new_empty((rows, out.shape[1]))
        steps = [(dist.isend, out, 1), (dist.irecv, came, -1)]
        operations = [dist.P2POp(operation, part, self._peer(step), self.group)
                      for operation, part, step in steps if part.numel()]
        works = dist.batch_isend_irecv(operations) if operations else []
        return _waiting(works, operations, came, x.dtype, x.shape[1:])

    def _peer(self, step: int) -> int:
        peer = (self.rank + step) % self.size
        return peer if self.group is None else dist.get_global_rank(self.group, peer)


class NodeRanks(_Gathering):
    """The ranks of several nodes: those `within` this node, and `among` the nodes those that have
    this rank's place in theirs. rank: of all ranks, node by node."""

    def __init__(self, among: Ranks, within: Ranks) -> None:
        self.among, self.within = among, within
        self.size = among.size * within.size
        self.rank = among.rank * within.size + within.rank
        self.group = within.group or among.group

    def require_size(self, size: int) -> None:
        if self.size != size:
            raise refuse("group", f"{self.among.size} nodes of {self.within.size} ranks",
                         f"the plan is for {size} ranks")

    def devices(self) -> list[str]:
        return [kind for kind in self.within.devices() if kind in self.among.devices()]

    def begin_all_gather(self, x: Tensor) -> Callable[[], Tensor]:
        """As Ranks does, in the order of all ranks."""
        return lambda: self.all_gather(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return self.among.all_gather(self.within.all_gather(x))


Group = Union[ProcessGroup, tuple[ProcessGroup, ProcessGroup], None]
AnyRanks = Union[Ranks, NodeRanks]


def ranks_of(group: Any, size: int | None, ranks_per_node: int | None = None) -> AnyRanks:
    """group: one, or with ranks_per_node (among nodes, within a node). Errors: those of Ranks;
    InvalidArgument for one group where a plan needs two, and the other way round."""
    if ranks_per_node is None:
        if isinstance(group, (tuple, list)):
            raise refuse("group", f"{len(group)} groups", "the plan has one level, and takes one")
        return Ranks(group, size)
    if not isinstance(group, (tuple, list)) or len(group) != 2:
        raise refuse("group", shown(group), "must be two groups, (among nodes, within a node): the "
                     "plan has two levels")
    found = NodeRanks(Ranks(group[0], None), Ranks(group[1], None))
    if found.within.size != ranks_per_node:
        raise refuse("group", f"a group of {found.within.size} ranks within a node",
                     f"the plan is for {ranks_per_node}")
    return found


def _waiting(works: Sequence[Any], sent: list[Any], came: Tensor, dtype: torch.dtype,
             row_shape: torch.Size) -> Callable[[], Tensor]:
    """Waits for the works, and returns what came. What is sent has to live until then."""
    def wait() -> Tensor:
        for work in works:
            work.wait()
        sent.clear()
        return _rows_of_bytes(came, dtype, row_shape)

    return wait


@contextmanager
def completing(comings: Iterable[Callable[[], Any]]) -> Iterator[None]:
    """Where the block raises, what is then on its way is waited for: ranks that all raise can use the
    group afterwards, and nothing is written to memory that has been freed."""
    try:
        yield
    except Exception:
        for coming in comings:
            with suppress(Exception):  # the first one is raised
                coming()
        raise


def _bytes_of_rows(x: Tensor) -> Tensor:
    """(n, bytes of a row) uint8 of (n, ...)."""
    row_bytes = math.prod(x.shape[1:]) * x.element_size()
    dense = x.contiguous().as_strided((x.numel(),), (1,))  # axes of one element have any strides
    return dense.view(torch.uint8).view(x.shape[0], row_bytes)


def _rows_of_bytes(x: Tensor, dtype: torch.dtype, row_shape: torch.Size) -> Tensor:
    """(n, *row_shape)"""
    shape = x.shape[0], *row_shape
    return x.view(dtype).reshape(shape) if x.numel() else x.new_empty(shape, dtype=dtype)
