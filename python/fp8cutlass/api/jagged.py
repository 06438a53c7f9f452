"""``attention`` of nested tensors: those of layout ``torch.jagged`` are ragged batches."""

from __future__ import annotations

from typing import Any

import torch

from ..call.call import Outputs
from ..call.options import check_options
from ..call.reasons import differing
from ..call.request import DEFAULTS, Request
from ..errors import NoKernelError, UnsupportedError
from . import varlen

ONLY = (
    "scaling",
    "smooth_k",
    "hadamard",
    "return_amax",
    "backward",
    "causal_offset",
)  # options that ragged batches have one value of


def is_jagged(x: Any) -> bool:
    """Whether it is a nested tensor of layout ``torch.jagged``."""
    return type(x) is not torch.Tensor and isinstance(x, torch.Tensor) and x.is_nested and x.layout == torch.jagged


def attention(request: Request) -> Outputs:
    """Of query (B, H, j, D), key and value (B, Hkv, j, D), or (B, j, H, D) in layout "bshd"; results are jagged alike.

    UnsupportedError for arguments that fit no nested tensors, NoKernelError for what ragged batches do not have.
    """
    found = varlen.attention_varlen(**arguments(request))
    out, lse = found if isinstance(found, tuple) else (found, None)
    query: Any = request.query
    bshd = request.options.layout == "bshd"

    def nested(x: torch.Tensor) -> torch.Tensor:
        made = torch.nested.nested_tensor_from_jagged(x, query.offsets(), query.lengths(), jagged_dim=1)
        return made if bshd and x.dim() == 3 else made.transpose(1, 2)

    return Outputs(nested(out), None if lse is None else nested(lse.transpose(0, 1)))


def served(request: Request) -> tuple[bool, str]:
    """Whether a kernel serves it, and which or why not."""
    try:
        return True, varlen.kernel_of(**arguments(request))
    except UnsupportedError as error:
        return False, str(error)


def arguments(request: Request) -> dict[str, Any]:
    """Those of ``attention_varlen``, which checks what is not checked here."""
    options = request.options
    check_options(options)
    named = {"query": request.query, "key": request.key, "value": request.value}
    wrong = [
        f"{name} must be a nested tensor of layout torch.jagged, as query is, got {_kind(x)}"
        for name, x in named.items()
        if not is_jagged(x)
    ]
    ragged, order = (1, "(B, j, H, D)") if options.layout == "bshd" else (2, "(B, H, j, D)")
    wrong += [
        f"{name} must be {order} in layout {options.layout}, with the tokens of each sequence in dimension {ragged}"
        for name, x in named.items()
        if is_jagged(x) and (x.dim() != 4 or x._ragged_idx != ragged)
    ]
    if wrong:
        raise UnsupportedError(*wrong)
    q, k, v = (x if ragged == 1 else x.transpose(1, 2) for x in named.values())  # (B, j, H, D)
    wrong += differing("query", "key", [("batch size", q.shape[0], k.shape[0])])
    if q.shape[2] != k.shape[2] and not options.enable_gqa:
        wrong.append(
            f"query has {q.shape[2]} heads and key has {k.shape[2]}: pass enable_gqa=True to share key and value heads"
        )
    if wrong:
        raise UnsupportedError(*wrong)
    beyond = [
        f"{name}={getattr(options, name)!r} is not served for nested tensors, {name}={getattr(DEFAULTS, name)!r} is"
        for name in ONLY
        if (getattr(options, name) or None) != (getattr(DEFAULTS, name) or None)
    ]
    if options.return_lse not in (True, False):
        beyond.append(f"return_lse={options.return_lse!r} is not served for nested tensors, True and False are")
    if options.dropout_p != 0.0:
        beyond.append(f"dropout_p is not supported; accepted is 0.0, got {options.dropout_p}")
    beyond += [
        f"{name} is not served for nested tensors"
        for name in ("attn_mask", "out", "out_descale")
        if getattr(request, name) is not None
    ]
    if k.shape[1] != v.shape[1]:
        beyond.append("key and value are served where they have the same offsets, as one tensor of lengths")
    if beyond:
        raise NoKernelError(*beyond)
    lengths = [None if x.lengths() is None else x.lengths().to(torch.int32) for x in (q, k)]
    most_keys = request.key._maybe_max_seqlen or k.values().shape[0]  # nobody waits for the lengths
    q_offsets, k_offsets = (x.offsets().to(torch.int32) for x in (q, k))
    q, k, v = (x.values() for x in (q, k, v))
    return {
        "q": q,
        "k": k,
        "v": v,
        "cu_seqlens_q": q_offsets,
        "cu_seqlens_k": k_offsets,
        "max_seqlen_q": q.shape[0],
        "max_seqlen_k": most_keys,
        "seqused_q": lengths[0],
        "seqused_k": lengths[1],
        "softmax_scale": options.scale,
        "causal": options.is_causal,
        "window_size": tuple(options.window_size),
        "causal_alignment": options.causal_alignment,
        "softcap": options.softcap,
        "sinks": request.sinks,
        **{name: getattr(request, name) for name in ("q_descale", "k_descale", "v_descale")},
        "precision": options.precision,
        "out_dtype": options.out_dtype,
        "return_lse": bool(options.return_lse),
        "kernel": options.kernel,
    }


def _kind(x: Any) -> str:
    if not isinstance(x, torch.Tensor):
        return type(x).__name__
    return "a nested one of strided layout" if x.is_nested else f"shape {tuple(x.shape)}"
