"""From a request to a call and its tensors: every check, and defaults filled in."""

from __future__ import annotations

import math

import torch

from ..choose.dispatch import padded_head_dim
from ..choose.special import NEW_MASKS
from ..choose.target import granularities, has_f16_scores, head_dims, unserved
from ..dtypes import DTYPE_NAMES, OUT_NAMES, operand_name
from ..errors import NoKernelError
from ..manifest import INTEGER, KEY_BLOCK
from ..masks.block_mask import BlockMask
from ..quant.descale import all_canonical, to_canonical
from . import checks, masks
from .call import Call, Tensors, mask_of
from .enter import opened, reshaped
from .options import F16_SCORES, MERGE, Options, check_options, transformed, visible
from .request import Request


def settle(request: Request, *, shipped: bool = False, reshape: bool = True) -> tuple[Call, Tensors]:
    """Check a request; UnsupportedError says what is wrong with it or which kernel is missing.

    With ``shipped`` the shipped table answers even if nothing is built for the device. Without ``reshape`` tensors of
    another form than (B, H, S, D) are refused.
    """
    given = request = opened(request)
    entered = reshaped(request) if reshape else None
    if entered is not None:
        request, _ = entered
    options, packed = request.options, request.packed
    check_options(options)
    checks.check_shapes(request)
    checks.check_types(request)
    granularity = granularities(options.scaling)
    checks.check_descales(request, granularity)
    q, k, v = request.bhsd()
    half = q.dtype not in DTYPE_NAMES
    out_dtype = options.out_dtype or (q.dtype if half else torch.bfloat16)
    checks.check_out(given, out_dtype, given.query.shape if entered is None else entered[1].shape)
    checks.check_features(request)
    # FP8 operands may hold anything up to 448, which f16 scores do not: Q is lowered where no descale is finer than a
    # head's. Whoever pins a kernel for finer ones has seen to it.
    lowered = options.precision in F16_SCORES and _can_be_lowered(request, shipped)
    fits = half or lowered or options.kernel or options.precision not in F16_SCORES
    biased = masks.is_bias(request.attn_mask)
    capped = bool(options.softcap)
    if (biased or capped) and options.precision in INTEGER:  # whose scores are integers
        what = "attn_mask that is added to scores" if biased else "softcap"
        raise NoKernelError(f"{what} is not served with precision={options.precision!r}")
    if biased or (capped and not options.kernel):  # a bias is added to float32 scores, caps have exponentials alone
        fits = options.precision not in F16_SCORES
    precision = options.precision if fits else "accurate"
    lowered = lowered and precision in F16_SCORES
    # Descales that are no finer than heads stay so, as their blocks are the kernel's, not those of 128 keys.
    scaling = "head" if lowered and options.scaling == "block" else options.scaling
    if lowered:
        granularity = granularities(scaling)
    left, right = visible(options)
    masked = request.attn_mask is not None and not biased
    mask = "blocks" if masked else "bias" if biased else mask_of(left, right)
    _check_served(options, q, OUT_NAMES[out_dtype], mask, precision, shipped, "block" if lowered else scaling)
    call = Call(
        kind="packed" if packed is not None else "half" if half else "fp8",
        out_dtype=out_dtype,
        scale=1.0 / math.sqrt(q.shape[3]) if options.scale is None else float(options.scale),
        scaling=scaling,
        precision=precision,
        left=left,
        right=right,
        bottom_right=options.causal_alignment == "bottom_right",
        return_lse=bool(options.return_lse),
        merge_lse=options.return_lse == MERGE,
        return_amax=options.return_amax,
        kernel=options.kernel or "",
        smooth_k=half and transformed(options, "smooth_k"),
        hadamard=half and transformed(options, "hadamard"),
        masked=masked,
        whole=isinstance(request.attn_mask, BlockMask) and request.attn_mask.bits is None,
        biased=biased,
        key_block=KEY_BLOCK if packed is None else packed.key_block,
        amax=0.0 if packed is None else packed.amax,
        softcap=float(options.softcap),
        lowered=lowered,
    )
    out_descale = None
    if request.out_descale is not None:
        out_descale = to_canonical(request.out_descale, "tensor", (1, 1, 1, 1), q.device)
    more = masks.parts(request.attn_mask)
    more["sinks"] = None if request.sinks is None else request.sinks.float().contiguous()
    if packed is not None:
        held = (None, packed.k_descale, packed.v_descale, out_descale, packed.k_mean)
        return call, Tensors(q, packed.k, packed.v, *held, **more)
    if half:
        return call, Tensors(q, k, v, out_descale=out_descale, **more)
    descales = (request.q_descale, request.k_descale, request.v_descale)
    q_descale, k_descale, v_descale = all_canonical(descales, granularity, (q, k, v))
    return call, Tensors(q, k, v, q_descale, k_descale, v_descale, out_descale, **more)


def _can_be_lowered(request: Request, shipped: bool) -> bool:
    """Whether Q and K are e4m3 with descales of heads, or of more, and no pinned kernel stands against it."""
    q, kernel = request.query, request.options.kernel
    descales = (request.q_descale, request.k_descale, request.v_descale)
    coarse = all(not isinstance(d, torch.Tensor) or d.dim() < 3 for d in descales)
    if q.dtype != torch.float8_e4m3fn or request.options.scaling == "token" or not coarse:
        return False
    return not kernel or has_f16_scores(q.device.type, q.device.index, shipped, kernel)


def _check_served(
    options: Options, q: torch.Tensor, out: str, mask: str, precision: str, shipped: bool, scaling: str
) -> None:
    """NoKernelError where the device has no kernel for such a call, whatever its lengths."""
    device = (q.device.type, q.device.index, shipped)
    capped = 1 if options.softcap else 0  # a plain number where torch.compile traces
    dtype = operand_name(q.dtype, precision)
    available, refusals = head_dims(*device, dtype)
    if not refusals:
        head_dim = padded_head_dim(q.shape[3], available)
        if options.kernel is None or mask in NEW_MASKS:
            refusals = unserved(*device, head_dim, dtype, out, scaling, mask, precision, capped)
    if refusals:
        raise NoKernelError(*refusals)
