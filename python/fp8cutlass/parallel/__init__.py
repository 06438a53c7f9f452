"""Attention of a sequence whose tokens are spread over several cards, with e4m3 keys and values on the wire.

    from fp8cutlass import parallel
    out = parallel.attention(q, k, v, group, method="gather", shards="zigzag", is_causal=True)

``attention`` takes a process group or a DeviceMesh of torch. ``contiguous`` and ``zigzag`` say which tokens each rank
has; ``Shards`` shards and unshards tensors by them. ``count_sent`` counts bytes.

docs/howto/parallel.md says which method is for what.
"""

from __future__ import annotations

import torch.distributed as _dist

if not _dist.is_available():
    raise ImportError("fp8cutlass.parallel needs torch.distributed, which this torch was built without")

from .attend import attention
from .exchange import Sent, count_sent
from .shards import Shards, contiguous, zigzag

__all__ = ["Sent", "Shards", "attention", "contiguous", "count_sent", "zigzag"]
