"""``fallback="sdpa"``: torch's own attention for calls that no kernel serves, with a warning. Under ``torch.compile``
the warning comes once, while it traces."""

from __future__ import annotations

import warnings

import torch

from ..choose.target import granularities
from ..dtypes import DTYPE_NAMES
from ..errors import UnsupportedError
from ..quant.descale import to_canonical
from ..quant.quantize import dequantize
from ..tracing import constant
from . import masks
from .enter import opened
from .options import visible
from .request import Request

_sdpa = torch._C._nn.scaled_dot_product_attention  # torch.nn.functional's may have been replaced by `attention`
_warned: set[str] = set()


def sdpa(request: Request, cause: UnsupportedError) -> torch.Tensor:
    """Run ``torch.nn.functional.scaled_dot_product_attention`` on the (dequantised) operands, in the precision of the
    output. Raises UnsupportedError for what SDPA cannot return either: LSE, amax, an FP8 output."""
    request = opened(request)
    options = request.options
    beyond = [name for name in ("return_lse", "return_amax") if getattr(request.options, name)]
    if options.out_dtype == torch.float8_e4m3fn:
        beyond.append("out_dtype=torch.float8_e4m3fn")
    if options.softcap:
        beyond.append(f"softcap={options.softcap}")
    if request.sinks is not None:
        beyond.append("sinks")
    if request.packed is not None:
        beyond.append("a PackedKV, which does not hold key and value any more")
    if beyond:
        raise UnsupportedError(*cause.reasons, f"fallback='sdpa' cannot serve {', '.join(beyond)}") from cause
    _warn(str(cause))
    q, k, v = request.bhsd()
    fp8 = q.dtype in DTYPE_NAMES
    out_dtype = options.out_dtype or (torch.bfloat16 if fp8 else q.dtype)
    if fp8:
        q, k, v = (
            dequantize(x, to_canonical(descale, shared_by, x.shape, x.device), shared_by).to(out_dtype)
            for x, descale, shared_by in zip(
                (q, k, v),
                (request.q_descale, request.k_descale, request.v_descale),
                granularities(options.scaling),
                strict=True,
            )
        )
    mask, causal = masks.for_sdpa(request.attn_mask, q), options.is_causal
    left, right = visible(options)
    rows, keys = q.shape[-2], k.shape[-2]
    shift = keys - rows if options.causal_alignment == "bottom_right" else 0
    if left is not None or right is not None and (right + shift or not causal or mask is not None):
        if q.is_nested:
            raise UnsupportedError(*cause.reasons, "torch's attention has no such mask of nested tensors") from cause
        band = torch.ones(rows, keys, dtype=torch.bool, device=q.device)
        band = band if right is None else band.tril(shift + right)
        band = band if left is None else band.triu(shift - left)
        mask = band if mask is None else mask.masked_fill(~band, -torch.inf)  # a bias: others exclude a band
        causal = False
    try:
        out = _sdpa(q, k, v, mask, options.dropout_p, causal, scale=options.scale, enable_gqa=options.enable_gqa)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        said = str(error).partition("\n")[0]
        raise UnsupportedError(*cause.reasons, f"torch's attention does not serve it either: {said}") from error
    out = out.to(out_dtype)
    return out if options.layout == "bhsd" or out.dim() == 2 else out.transpose(-3, -2)


@constant
def _warn(text: str) -> None:
    """Once for each set of reasons in a process; the warning filters of the program apply."""
    if text in _warned:
        return
    _warned.add(text)
    warnings.warn(f"fp8cutlass.attention falls back to torch's attention: {text}", UserWarning, stacklevel=4)
