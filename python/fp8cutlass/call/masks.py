"""``attn_mask`` of a call: what it accepts, its form beside other forms of operands, and what the emulator reads."""

from __future__ import annotations

from typing import Any

import torch

from ..emulator.visible import Mask
from ..masks.bits import WORDS, tiles_of, unexpanded
from ..masks.block_mask import BlockMask
from ..memory import broadcasts
from .options import Options, visible
from .reasons import no_derivatives

BIASES = (torch.float32, torch.bfloat16, torch.float16)
Parts = dict[str, torch.Tensor | None]


def is_bias(mask: Any) -> bool:
    """Whether a mask is added to the scores."""
    return isinstance(mask, torch.Tensor) and mask.dtype != torch.bool


def refused(mask: Any, options: Options, q: torch.Tensor, k: torch.Tensor) -> list[str]:
    """What is wrong with a mask for q (B, H, Sq, D) and k (B, Hkv, Sk, D); nothing of None."""
    if mask is None:
        return []
    if isinstance(mask, torch.Tensor):
        if mask.is_nested or mask.layout != torch.strided:
            kind = "nested" if mask.is_nested else str(mask.layout)
            return [f"attn_mask must be a dense tensor, got a {kind} one"]
    elif not isinstance(mask, BlockMask):
        return [f"attn_mask must be a torch.Tensor, a BlockMask or None, got {type(mask).__name__}"]
    wrong, whole = [], (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if isinstance(mask, torch.Tensor) and mask.dtype not in (torch.bool, *BIASES):
        wrong.append(f"attn_mask has dtype {mask.dtype}; accepted are torch.bool, {', '.join(map(str, BIASES))}")
    shape = tuple(mask.shape)
    fits = broadcasts(shape, whole)
    if isinstance(mask, BlockMask) and mask.keys != k.shape[2]:  # of which there is no broadcast
        fits = False
    if not fits:
        wrong.append(f"attn_mask has shape {shape}, which does not broadcast to (batch, heads, rows, keys) {whole}")
    if mask.device != q.device:
        wrong.append(f"attn_mask is on {mask.device}, query is on {q.device}")
    if not is_bias(mask) and visible(options) != (None, None):
        wrong.append(
            "attn_mask excludes is_causal=True and a window_size, unless it is additive: join it with "
            "BlockMask.window(rows, keys, left, right)"
        )
    return wrong


def wants_gradient(mask: Any) -> list[str]:
    """Why there is no result for a bias that wants a gradient."""
    return no_derivatives([("attn_mask", mask)]) if is_bias(mask) else []


def flattened(mask: Any, lead: tuple[int, ...]) -> Any:
    """A mask for operands with the batch dimensions ``lead``, for operands whose batches have become one; as it is
    where it has none, or others, which a check refuses. A copy where some batches share a mask and others do not."""
    if not isinstance(mask, torch.Tensor) or len(lead) == 1 or mask.dim() <= 3:
        return mask
    given = mask.shape[:-3]
    if all(size == 1 for size in given):
        return mask.reshape(1, *mask.shape[-3:])
    if not broadcasts(given, lead):
        return mask
    return mask.expand(*lead, *mask.shape[-3:]).flatten(0, len(lead) - 1)


def for_sdpa(mask: Any, q: torch.Tensor) -> torch.Tensor | None:
    """A mask as torch's attention takes it beside queries q; None where there is none."""
    if isinstance(mask, BlockMask):
        seen = mask.dense()
        while seen.dim() > max(q.dim(), 2) and seen.shape[0] == 1:
            seen = seen[0]
        return seen
    return mask.to(q.dtype) if is_bias(mask) else mask


def parts(mask: Any) -> Parts:
    """The tensors of a checked mask, by their names in ``Tensors``."""
    if mask is None:
        return {}
    if isinstance(mask, BlockMask):
        return {"tiles": mask.tiles, "counts": mask.counts, "bits": mask.bits}
    wide = mask.reshape(*(1,) * (4 - mask.dim()), *mask.shape)
    return {"bias": wide} if is_bias(mask) else {"seen": unexpanded(wide)}


def wrong_parts(given: Parts, sizes: tuple[int, int, int, int], device: torch.device) -> list[str]:
    """What is wrong with such tensors in a direct call of the operator, for (B, H, Sq, Sk)."""
    batch, heads, rows, keys = sizes
    lists = (batch, heads, tiles_of(rows))
    int32 = (torch.int32,)
    wanted: dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]] = {
        "seen": (sizes, (torch.bool,)),
        "bias": (sizes, BIASES),
        "tiles": ((*lists, tiles_of(keys)), int32),
        "counts": (lists, int32),
        "bits": ((*lists, tiles_of(keys), WORDS), int32),
    }
    wrong = []
    for name, (shape, dtypes) in wanted.items():
        x = given[name]
        if x is None:
            continue
        free = {"tiles": 3, "bits": 4}.get(name, len(shape))  # the sizes before may be 1
        fits = x.dim() == len(shape) and all(
            n == full or (n == 1 and i < free) for i, (n, full) in enumerate(zip(x.shape, shape, strict=True))
        )
        if not fits or x.dtype not in dtypes or x.device != device:
            wrong.append(
                f"{name} must be {' or '.join(map(str, dtypes))} that broadcasts to {shape} on {device}, "
                f"got {x.dtype}, {tuple(x.shape)} on {x.device}"
            )
    if (given["tiles"] is None) != (given["counts"] is None) or (given["bits"] is not None and given["tiles"] is None):
        wrong.append("tiles, counts and bits are one mask: tiles go with counts, bits with both")
    if given["seen"] is not None and given["tiles"] is not None:
        wrong.append("seen and tiles exclude each other")
    return wrong


def packed(seen: torch.Tensor | None, parts: Parts, rows: int, keys: int) -> BlockMask | None:
    """The mask of a call's tensors, packed; None where there is none."""
    if seen is not None:
        return BlockMask.from_dense(seen, keys)
    tiles, counts = parts["tiles"], parts["counts"]
    if tiles is None or counts is None:
        return None
    extent = tiles.new_empty((rows if tiles.shape[2] == tiles_of(rows) else 1, keys, 0))
    return BlockMask(tiles, counts, parts["bits"], extent)


def for_emulator(mask: BlockMask | None) -> Mask | None:
    """What the emulator reads of a mask."""
    return None if mask is None else Mask(mask.dense(), mask.visited())
