"""``use_fp8``: code that calls ``torch.nn.functional.scaled_dot_product_attention`` gets FP8 attention.

By default a mode of this thread sees the calls of Python code. With ``provider=True`` torch's flash attention itself is
exchanged (``provider.py``), for the whole process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..stats import Reason, count_fallback
from .dense import Accuracy, accuracy_of, attend

_sdpa = torch._C._nn.scaled_dot_product_attention  # `F` may hold what a program put into its place


class AttentionMode(TorchFunctionMode):
    """Serves the calls of ``F.scaled_dot_product_attention`` that come while it is entered, and counts all of them.

    ``door`` and ``owner`` are the names under which ``fp8cutlass.stats`` counts.
    """

    def __init__(self, door: str = "torch", owner: str = "", accuracy: Accuracy | None = None) -> None:
        super().__init__()
        self.door, self.owner, self.accuracy = door, owner, accuracy or {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _sdpa:
            return self.attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            if torch.compiler.is_compiling():  # its `unflatten` inside a mode would break the graph
                count_fallback(self.door, "MultiheadAttention", Reason.POLICY, "torch.compile", at=args[0])
            else:
                with self:  # torch calls it outside the mode; what it calls is to be seen
                    return _multi_head_attention(*args, **kwargs)
        return func(*args, **kwargs)

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
        """The arguments, the shapes and the errors of ``scaled_dot_product_attention``."""
        out: torch.Tensor | None = attend(
            self.door, self.owner, query, key, value,
            attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
            accuracy=self.accuracy,
        )  # fmt: skip
        if out is None:
            return _sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return out


def _unseen(function: Any) -> Any:
    """The same function, which does not hand itself to modes. What it calls still does."""
    names = {**function.__globals__, "has_torch_function": lambda tensors: False}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_multi_head_attention = _unseen(F.multi_head_attention_forward)


@contextmanager
def use_fp8(*, provider: bool = False, **accuracy: Any) -> Iterator[None]:
    """FP8 attention for what calls ``F.scaled_dot_product_attention`` inside the ``with`` block.

    Args:
        provider: exchange torch's flash attention instead of watching Python's calls. This is for the whole process,
            and torch's own conditions for flash attention come first: see :mod:`fp8cutlass.integrations.provider`.
        accuracy: ``scaling``, ``precision``, ``smooth_k``, ``hadamard`` of :func:`fp8cutlass.attention`.

    A call that is not served runs as if the block were not there, and is counted in ``fp8cutlass.stats`` under
    ``torch`` with the reason: a mask that is added, dropout, a gradient, float32, a head_dim without kernels.

    Raises:
        TypeError: an unknown argument. UnsupportedError: torch has no flash attention to be exchanged.
    """
    chosen = accuracy_of("use_fp8", accuracy)
    if provider:
        from .provider import provided

        with provided(**chosen):
            yield
    else:
        with AttentionMode(accuracy=chosen):
            yield
