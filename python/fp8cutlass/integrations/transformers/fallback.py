"""What runs when a call is not served: the attention of transformers that would have run."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ...errors import UnsupportedError
from .serve import Features


def fall_back(
    module: torch.nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    features: Features,
    scaling: float | None,
    is_causal: bool | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' own ``sdpa``; for softcap and sinks, which that does not know, the model's own eager code.

    ``mask`` is (B, 1 or H, Sq, Sk), bool or added to the scores. ``is_causal`` counts where there is none; None is
    what the module says.
    """
    dropout, rest = features.dropout, features.rest
    if features.softcap is None and features.sinks is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, q, k, v, mask, dropout=dropout, scaling=scaling, is_causal=is_causal,
            position_bias=features.position_bias, **rest,
        )  # fmt: skip
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None or features.position_bias is not None:
        raise UnsupportedError(
            f"{type(module).__name__} asks for softcap or sinks, which torch's attention does not have, and there is "
            "no eager code of its model that serves the call"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    rows = q.shape[2]
    if mask is None and causal and rows > 1:  # aligned with the first key, as torch has it
        mask = torch.ones(rows, k.shape[2], dtype=torch.bool, device=q.device).tril()[None, None]
    if mask is not None and mask.dtype == torch.bool:  # eager code adds it
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
    more: dict[str, Any] = {} if features.sinks is None else {"s_aux": features.sinks}
    if features.softcap is not None:
        more["softcap"] = features.softcap
    return eager(module, q, k, v, mask, dropout=dropout, scaling=scaling, **more, **rest)
