"""FP8 attention inside torch's ``context_parallel``: keys and values travel packed, not in bf16.

    from fp8cutlass.integrations.context_parallel import use_fp8_context_parallel

    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]), use_fp8_context_parallel():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)

torch's context manager shards the buffers and makes DTensors of the operands of each call. This one takes such calls
before torch's own ring does. torch's API is experimental.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from .. import parallel
from ..errors import NoKernelError, UnsupportedError
from ..stats import Reason, count_fallback, count_served
from .dense import Accuracy, accuracy_of, effort, refusal
from .sdpa import AttentionMode, _sdpa

DOOR = "torch"
OWNER = "context_parallel"
TOKENS = 2  # the dimension that torch's context_parallel shards


@contextmanager
def use_fp8_context_parallel(
    *, method: str = "gather", shards: str | parallel.Shards | None = None, **accuracy: Any
) -> Iterator[None]:
    """FP8 attention for calls of ``F.scaled_dot_product_attention`` in the ``with`` block whose operands are DTensors
    sharded along their tokens; for all others what ``use_fp8`` does.

    Args:
        method: of ``fp8cutlass.parallel.attention``: ``gather``, ``ulysses`` or ``ring``.
        shards: which tokens each rank has. By default what torch's context_parallel does: zig-zag where its load
            balancing is on and twice the ranks divide the tokens, else contiguous.
        accuracy: ``scaling``, ``precision``, ``smooth_k``, ``hadamard`` of :func:`fp8cutlass.attention`.

    A call that is not served runs as torch runs it, and is counted with the reason.

    Raises:
        TypeError: an unknown argument.
    """
    with _Mode(method, shards, accuracy_of("use_fp8_context_parallel", accuracy)):
        yield


class _Mode(AttentionMode):
    def __init__(self, method: str, shards: str | parallel.Shards | None, accuracy: Accuracy) -> None:
        super().__init__(DOOR, OWNER, accuracy)
        self.method, self.shards = method, shards

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """The arguments and the result of ``scaled_dot_product_attention``."""
        if not (isinstance(query, DTensor) and all(map(_sharded, (query, key, value)))):
            return super().attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        work, reason, text = effort(query, key, value, is_causal), refusal(query, key, value, attn_mask, dropout_p), ""
        if reason is None:
            shards = self.shards or _shards_of_torch(query)
            try:
                out = parallel.attention(
                    query, key, value, method=self.method, shards=shards, is_causal=is_causal, scale=scale,
                    enable_gqa=enable_gqa, **self.accuracy,
                )  # fmt: skip
            except NoKernelError as error:
                reason, text = Reason.NO_KERNEL, str(error)
            except UnsupportedError as error:
                reason, text = Reason.LAYOUT, str(error)
            else:
                count_served(self.door, self.owner, work=work, at=query)
                return out  # type: ignore[return-value]  # no LSE was asked for
        count_fallback(self.door, self.owner, reason, text, work=work, at=query)
        return _sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _sharded(x: torch.Tensor) -> bool:
    return isinstance(x, DTensor) and x.dim() == 4 and all(placement == Shard(TOKENS) for placement in x.placements)


def _shards_of_torch(query: DTensor) -> str:
    """What ``context_parallel`` has done with the buffers."""
    from torch.distributed.tensor.experimental import _attention

    options = getattr(_attention, "_cp_options", None)
    balanced = getattr(options, "enable_load_balance", True)
    return "zigzag" if balanced and query.shape[TOKENS] % (2 * query.device_mesh.size()) == 0 else "contiguous"
