"""bf16, fp16 and fp32 to 8 bits with a real-valued descale: ``real = x8 * descale``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..manifest import GROUP_STEP, GROUPS, KEY_BLOCK
from .descale import SMALLEST, refuse, to_canonical

FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
LIMITS = {**FP8_MAX, torch.int8: 127.0}  # -128 has no negative
GRANULARITIES = ("tensor", "head", "block", "token", "channel", "group")  # in the order of Granularity in params.h
SOURCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# A power of two: a constant V becomes V8 = 256 everywhere, so the products P V8 lose to truncation in the accumulator
# what the sum of P loses, and their quotient is exact (but for what tiles of many keys give back, see
# docs/design/kernels.md).
V_AMAX = 256.0


def quantize(
    x: torch.Tensor,
    *,
    granularity: str = "tensor",
    dtype: torch.dtype = torch.float8_e4m3fn,
    amax: float | None = None,
    block: int = KEY_BLOCK,
    descale: torch.Tensor | float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``x`` so that the largest finite magnitude of each group becomes ``amax``, or by a ``descale`` that is
    known already.

    ``attention(..., scaling=mode)`` takes FP8 operands of these granularities:

    | mode | query | key | value |
    |---|---|---|---|
    | tensor | tensor | tensor | tensor |
    | head | head | head | head |
    | block | token | block | block |
    | token | token | token | channel |

    ``precision="int8"`` makes int8 of query by ``token`` and of key by ``group``.

    Args:
        x: (B, H, S, D), bf16, fp16 or fp32, any strides, CPU or CUDA.
        granularity: what shares one descale: the ``tensor``, a ``head``, a ``block`` of tokens of one head, a
            ``token`` of one head, a ``channel`` of one head, a ``group`` of tokens of a block: of each 8 the tokens 2 g
            and 2 g + 1, for g from 0 to 3.
        dtype: float8_e4m3fn, float8_e5m2 or int8.
        amax: the value that a group's maximum is mapped to; 1 to the largest of ``dtype`` (448, 57344, 127): default.
            14 keeps Q K^T inside f16 up to head_dim 256, which the linear-code kernels need.
        block: tokens in a block, of ``group`` a multiple of 8; ``attention`` takes blocks of 128.
        descale: instead of one that is found in ``x``: a float in [2^-126, 2^126], or a float32 tensor of the shape
            below or a coarser one, (), (1,), (H,), (B, H), on the device of ``x``. Elements then saturate at ``amax``.
            Values of a tensor are not checked: they are clamped to that interval, so that neither they nor their
            inverse vanish, and a NaN makes its group NaN.

    Returns:
        ``x_fp8`` of the shape and memory order of ``x``, and the float32 contiguous ``descale`` of shape (1,), (B, H),
        (B, H, ceil(S / block)), (B, H, S), (B, H, D) or (B, H, 4 ceil(S / block)).

    A group of zeros gets descale 1. A group whose maximum is below ``amax * 2^-126`` gets 2^-126, so that neither the
    descale nor its inverse overflows or vanishes in float32. Finite values saturate. NaN stays NaN; an infinity becomes
    NaN in e4m3, which has none, and stays one in e5m2; neither enters a descale, so the other values of a group keep
    theirs. int8 has no NaN: a group with a NaN or an infinity has the descale NaN and zeros. Nothing waits for the
    device. CPU and CUDA give the same bits in eager mode; a compiler may round a division otherwise.

    Raises:
        ValueError: an argument outside the above; TypeError where ``x`` is no tensor.
    """
    limit = _check(x, granularity, dtype, amax, block)
    integer = dtype == torch.int8
    wrong = group_amax((~x.isfinite()).float(), granularity, block) > 0 if integer else None
    if descale is None:
        group = group_amax(x, granularity, block)
        group = torch.where(group > 0, group.clamp_min(limit * 2.0**-126), limit)
        # A reciprocal on purpose: CUDA divides by a scalar that way, the CPU does not, and both must give the same
        # bits. By a tensor both divide in two roundings: its reciprocal, then a product.
        descale, inverse = group * (1.0 / limit), limit / group
    else:
        descale = _given(descale, granularity, x, block)
        inverse = descale.reciprocal()
        inverse = inverse.reshape(()) if granularity == "tensor" else inverse
    if wrong is not None:
        wrong = wrong.reshape(descale.shape)
        descale, inverse = descale.masked_fill(wrong, torch.nan), inverse.masked_fill(wrong.reshape(inverse.shape), 0.0)
    scaled = x.float() * _spread(inverse, granularity, x.shape[2], block)
    if integer:
        whole = scaled.nan_to_num(nan=0.0).round().clamp(-limit, limit).to(dtype)
        return whole, descale.reshape(1) if granularity == "tensor" else descale
    scaled = torch.where(scaled.isnan(), torch.nan, scaled)  # the sign of a NaN is not the same on all devices
    beyond = scaled if dtype == torch.float8_e5m2 else torch.full_like(scaled, torch.nan)
    x_fp8 = torch.where(x.isfinite(), scaled.clamp(-limit, limit), beyond).to(dtype)
    return x_fp8, descale.reshape(1) if granularity == "tensor" else descale


def _given(descale: torch.Tensor | float, granularity: str, x: torch.Tensor, block: int) -> torch.Tensor:
    """A caller's descale in its canonical shape, clamped to what has a normal inverse; ValueError for a wrong one."""
    wrong = refuse("descale", descale, granularity, x.shape, x.device, block, operand="x")
    if wrong:
        raise ValueError("; ".join(wrong))
    canonical = to_canonical(descale, granularity, x.shape, x.device, block)
    return canonical.clamp(SMALLEST, 1 / SMALLEST)


def _check(x: torch.Tensor, granularity: str, dtype: torch.dtype, amax: float | None, block: int) -> float:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if x.dim() != 4:
        raise ValueError(f"x must be (batch, heads, tokens, head_dim), got shape {tuple(x.shape)}")
    if x.dtype not in SOURCE_DTYPES:
        raise ValueError(f"x must be one of {', '.join(map(str, SOURCE_DTYPES))}, got {x.dtype}")
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity must be one of {', '.join(GRANULARITIES)}, got {granularity!r}")
    if dtype not in LIMITS:
        raise ValueError(f"dtype must be one of {', '.join(map(str, LIMITS))}, got {dtype}")
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise ValueError(f"block must be an integer, at least 1, got {block!r}")
    if granularity == "group" and block % GROUP_STEP:
        raise ValueError(f"block must be a multiple of {GROUP_STEP} for granularity='group', got {block}")
    limit = LIMITS[dtype] if amax is None else float(amax)
    if not 1 <= limit <= LIMITS[dtype]:  # below 1 the smallest group, limit * 2^-126, is no normal number
        raise ValueError(f"amax must lie in [1, {LIMITS[dtype]:g}] for {dtype}, got {amax}")
    return limit


def group_amax(x: torch.Tensor, granularity: str, block: int = KEY_BLOCK) -> torch.Tensor:
    """Largest finite |x| of each group in float32: (), (B, H), (B, H, ceil(S / block)), (B, H, S), (B, H, D) or
    (B, H, 4 ceil(S / block))."""
    batch, heads, tokens, head_dim = x.shape
    if x.numel() == 0:  # a maximum over nothing is an error in torch; here it is an all-zero group
        blocks = -(-tokens // block)
        tails = {"tensor": (), "head": (batch, heads), "block": (batch, heads, blocks)}
        tails |= {"token": (batch, heads, tokens), "channel": (batch, heads, head_dim)}
        tails |= {"group": (batch, heads, GROUPS * blocks)}
        return torch.zeros(tails[granularity], dtype=torch.float32, device=x.device)
    magnitude = x.abs().nan_to_num(nan=0.0, posinf=0.0).float()
    if granularity == "tensor":
        return magnitude.amax()
    if granularity == "head":
        return magnitude.amax((2, 3))
    if granularity == "channel":
        return magnitude.amax(2)
    per_token = magnitude.amax(3)
    if granularity == "token":
        return per_token.contiguous()
    padded = F.pad(per_token, (0, -tokens % block))
    if granularity == "group":  # (B, H, blocks, block / 8, 4, 2)
        return padded.unflatten(2, (-1, block // GROUP_STEP, GROUPS, 2)).amax((3, 5)).flatten(2)
    return padded.unflatten(2, (-1, block)).amax(3)


def _spread(group: torch.Tensor, granularity: str, tokens: int, block: int) -> torch.Tensor:
    """View a value per group as something that broadcasts over (B, H, S, D)."""
    if granularity == "tensor":
        return group
    if granularity == "head":
        return group[:, :, None, None]
    if granularity == "channel":
        return group[:, :, None, :]
    if granularity == "token":
        return group[..., None]
    if granularity == "group":
        blocks = group.unflatten(2, (-1, 1, GROUPS, 1)).expand(-1, -1, -1, block // GROUP_STEP, -1, 2)
        return blocks.flatten(2)[:, :, :tokens, None]
    return group.repeat_interleave(block, 2)[:, :, :tokens, None]


def dequantize(x: torch.Tensor, descale: torch.Tensor, granularity: str, block: int = KEY_BLOCK) -> torch.Tensor:
    """Return ``x * descale`` in float32 for a (B, H, S, D) FP8 tensor and the descale that ``quantize`` returned."""
    per_group = descale.reshape(()) if granularity == "tensor" else descale
    return x.float() * _spread(per_group, granularity, x.shape[2], block)
