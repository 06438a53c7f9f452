"""Descales: the float32 factors that multiply back, ``real = fp8 * descale``, and their shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real  # what numpy's numbers are, float32 too

import torch

from ..manifest import GROUPS, KEY_BLOCK

FLOAT32_MAX = torch.finfo(torch.float32).max
SCALE_MAX = FLOAT32_MAX * math.log(2)  # of softmax; kernels multiply it by log2 e in float32
SMALLEST = 2.0**-126  # normal float32; anything less may become zero on the way


def canonical_shape(granularity: str, shape: Sequence[int], block: int = KEY_BLOCK) -> tuple[int, ...]:
    """The shape that the kernels read for an operand of shape (B, H, S, D); ``block`` tokens are a block."""
    batch, heads, tokens, head_dim = shape
    if granularity == "tensor":
        return (1,)
    if granularity == "head":
        return (batch, heads)
    if granularity == "block":
        return (batch, heads, -(-tokens // block))
    if granularity == "group":
        return (batch, heads, GROUPS * -(-tokens // block))
    return (batch, heads, tokens if granularity == "token" else head_dim)


def accepted_shapes(granularity: str, shape: Sequence[int], block: int = KEY_BLOCK) -> list[tuple[int, ...]]:
    """The canonical shape last, before it every coarser one."""
    canonical = canonical_shape(granularity, shape, block)
    coarser: list[tuple[int, ...]] = [(), (1,)]
    if granularity != "tensor":
        coarser += [(shape[1],), (shape[0], shape[1])]
    return [candidate for candidate in coarser if candidate != canonical] + [canonical]


def refuse_host(name: str, value: object) -> str | None:
    """Say why a Python number is no descale, or None. The values of tensors are not looked at: that would wait for
    the device; a kernel clamps what it multiplies up to the smallest normal number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return f"{name} must be a float or a float32 tensor, got {type(value).__name__}"
    value = float(value)
    if name in ("out_descale", "descale"):  # of what is quantised: it is multiplied by the inverse
        if not SMALLEST <= value <= 1 / SMALLEST:
            return f"{name} must lie in [2^-126, 2^126], where it and its inverse are normal float32, got {value}"
    elif not SMALLEST <= value <= FLOAT32_MAX:
        return f"{name} must be finite in float32 and >= 2^-126, its smallest normal number, got {value}"
    return None


def refuse(
    name: str,
    value: object,
    granularity: str,
    shape: Sequence[int],
    device: torch.device,
    block: int = KEY_BLOCK,
    operand: str = "query",
) -> list[str]:
    """Say everything that is wrong with a descale for an operand of shape (B, H, S, D) on ``device``, that of
    ``operand``."""
    if not isinstance(value, torch.Tensor):
        refusal = refuse_host(name, value)
        return [] if refusal is None else [refusal]
    wrong = []
    accepted = accepted_shapes(granularity, shape, block)
    if tuple(value.shape) not in accepted:
        wrong.append(
            f"{name} has shape {tuple(value.shape)}; one descale per {granularity} means {accepted[-1]}, "
            f"and {', '.join(map(str, accepted[:-1]))} are broadcast to it"
        )
    if value.dtype != torch.float32:
        wrong.append(f"{name} must be float32, got {value.dtype}")
    if value.device != device:
        wrong.append(f"{name} is on {value.device}, {operand} is on {device}")
    return wrong


def to_canonical(
    value: object, granularity: str, shape: Sequence[int], device: torch.device, block: int = KEY_BLOCK
) -> torch.Tensor:
    """Spread an accepted descale over the canonical shape, float32 and contiguous."""
    canonical = canonical_shape(granularity, shape, block)
    if not isinstance(value, torch.Tensor):
        return torch.full(canonical, float(value), dtype=torch.float32, device=device)  # type: ignore[arg-type]
    if tuple(value.shape) == canonical:
        return value.contiguous()
    if value.dim() == 2:
        value = value[:, :, None]
    elif value.dim() == 1 and len(canonical) == 3:
        value = value[:, None]
    return value.expand(canonical).contiguous()


def all_canonical(
    given: Sequence[object], granularity: Sequence[str], operands: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """:func:`to_canonical` of the descales of Q, K and V, (B, H, S, D)."""
    each = zip(given, granularity, operands, strict=True)
    return [to_canonical(descale, shared_by, x.shape, x.device) for descale, shared_by, x in each]
