"""``fallback="sdpa"``: torch's own attention for what no kernel serves, never without a warning. ``torch.compile``
warns once, while it traces: the graph holds no warning."""

from __future__ import annotations

import math
import warnings

import torch
import torch.nn.functional as F

from ..choose.target import granularities
from ..errors import UnsupportedError
from ..quant.descale import to_canonical
from ..quant.quantize import dequantize
from .operators import DTYPE_NAMES
from .request import Request

_warned: set[str] = set()


def sdpa(request: Request, cause: UnsupportedError) -> torch.Tensor:
    """Run ``torch.nn.functional.scaled_dot_product_attention`` on the (dequantised) operands, in the precision of the
    output. Raises UnsupportedError for what SDPA cannot return either: LSE, amax, an FP8 output."""
    beyond = [name for name in ("return_lse", "return_amax") if getattr(request, name)]
    if request.out_dtype == torch.float8_e4m3fn:
        beyond.append("out_dtype=torch.float8_e4m3fn")
    if request.packed is not None:
        beyond.append("a PackedKV, which does not hold key and value any more")
    if beyond:
        raise UnsupportedError(*cause.reasons, f"fallback='sdpa' cannot serve {', '.join(beyond)}") from cause
    _warn(str(cause))
    q, k, v = request.bhsd()
    fp8 = q.dtype in DTYPE_NAMES
    out_dtype = request.out_dtype or (torch.bfloat16 if fp8 else q.dtype)
    if fp8:
        q, k, v = (
            dequantize(x, to_canonical(descale, shared_by, x.shape, x.device), shared_by).to(out_dtype)
            for x, descale, shared_by in zip(
                (q, k, v),
                (request.q_descale, request.k_descale, request.v_descale),
                granularities(request.scaling),
                strict=True,
            )
        )
    mask, causal = request.attn_mask, request.is_causal
    if causal and request.causal_alignment == "bottom_right" and q.shape[2] != k.shape[2]:
        if mask is not None:
            raise UnsupportedError(*cause.reasons, "attn_mask and is_causal=True exclude each other") from cause
        rows, keys = q.shape[2], k.shape[2]
        mask = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows)
        causal = False
    scale = 1.0 / math.sqrt(q.shape[3]) if request.scale is None else request.scale
    out = F.scaled_dot_product_attention(
        q, k, v, mask, request.dropout_p, causal, scale=scale, enable_gqa=request.enable_gqa
    ).to(out_dtype)
    return out if request.layout == "bhsd" else out.transpose(1, 2)


@torch.compiler.assume_constant_result
def _warn(text: str) -> None:
    """Once for each set of reasons in a process; the warning filters of the program apply."""
    if text in _warned:
        return
    _warned.add(text)
    warnings.warn(f"fp8cutlass.attention falls back to torch's attention: {text}", UserWarning, stacklevel=4)
