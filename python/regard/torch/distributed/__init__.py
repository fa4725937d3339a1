"""Attention over a sequence whose rows are spread over several processes or GPUs.

    from regard.torch import distributed as rd
    plan = rd.plan(length, world_size=4, heads_q=32, heads_kv=8, head_size=128, causal=True)
    x = plan.shard(x, rank, dim=1)                  # this rank's rows of (B, S, width)
    out = rd.attention(q, k, v, plan)               # q, k, v of these rows, and so is out
    print(plan.explain())

`plan` says which rank has which rows and what they send each other; `attention` runs it over
torch.distributed, with gloo on CPUs and NCCL on GPUs. docs/distributed.md tells how to choose.
"""

import torch.distributed as _distributed

from ...errors import Unavailable as _Unavailable

if not _distributed.is_available():
    raise _Unavailable("regard.torch.distributed needs a PyTorch that has torch.distributed")

from .bandwidth import measure_bandwidth
from .costs import Bandwidth, Moved
from .plan_value import Plan, Sizes
from .planning import plan
from .surface import attention

__all__ = ["Bandwidth", "Moved", "Plan", "Sizes", "attention", "measure_bandwidth", "plan"]
