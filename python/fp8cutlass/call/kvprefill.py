"""Long chunks of queries over a paged cache, by the kernels of ragged batches: of which calls, and what is computed.

On a card a kernel chooses the sequences with many queries, ``LEAST`` and more, and another copies their keys from pages
to blocks. Then the attention kernel of a ragged batch takes these sequences, those of decode all others. The host reads
no length: it knows only whether there may be such sequences, and for how many keys there is room.

``operands`` is the specification of the copied bytes, ``emulate_chunk`` that of the results.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from ..choose.target import Target
from ..emulator.emulate import emulate
from ..emulator.prefill import requantised
from ..manifest import KEY_BLOCK, Variant, load_manifest
from ..quant.quantize import quantize
from .call import FAR
from .launch import score_amax
from .ragged_call import mask_of

# Queries of a sequence from which the kernels of ragged batches take it. A unit of decode reads all keys for its rows.
# A tile of 128 rows costs as much as some 50 rows of 4 heads in units of 32, and as 100 of one head; the copy of the
# keys costs half as much again (docs/lab/decode.md). So the limit is one whole tile. Units of 64 rows may raise it.
LEAST = 128
MOST_BYTES = 1 << 29  # of copied K and V: what does not fit is left to the kernels of decode


@dataclass(frozen=True)
class Chunks:
    """What of a call decides."""

    tokens: int  # of q
    sequences: int
    most_q: int | None  # an upper bound of the tokens of a sequence
    most_keys: int | None  # that a row of the page table has room for; None: any number
    kv_heads: int
    head_dim: int
    out: str  # the dtype of q, as the manifest has it
    left: int
    right: int
    softcap: bool
    sinks: bool
    splits: int


@dataclass(frozen=True)
class Prefill:
    """The attention kernel and its number; ``most`` sequences of ``capacity`` keys in all are copied at most."""

    kernel: Variant
    number: int
    most: int
    capacity: int


def may_be_kept(most_q: int | None, tokens: int) -> bool:
    """Whether no sequence of a call can be long, so that its launch is known by its form."""
    return min(tokens, tokens if most_q is None else most_q) < LEAST


@lru_cache(maxsize=256)
def _kernel(directory: Path, arch: str, head_dim: int, mask: str, out: str) -> tuple[Variant, int] | None:
    wanted = ("ragged", head_dim, mask, out, "exp2", KEY_BLOCK)
    for number, v in enumerate(load_manifest(directory).variants):
        if (v.kind, v.head_dim, v.mask, v.out, v.softmax, v.key_block) == wanted and arch in v.targets:
            return v, number
    return None


def prefill_for(at: Target, c: Chunks) -> tuple[Prefill | None, str]:
    """How a call's long chunks are served; or None, and why the kernels of decode have them."""
    bound = c.tokens if c.most_q is None else min(c.most_q, c.tokens)
    if bound < LEAST:
        return None, f"no sequence has {LEAST} queries"
    for given, what in ((c.softcap, "softcap"), (c.sinks, "sinks"), (c.splits == 1, "num_splits=1")):
        if given:
            return None, f"{what} goes with the kernels of decode alone"
    mask = mask_of(c.left, c.right)
    found = _kernel(at.directory, at.arch, c.head_dim, mask, c.out)
    if found is None:
        return None, f"{at.arch} has no kernel for ragged batches of head_dim {c.head_dim}, mask {mask}, {c.out}, exp2"
    most = min(c.sequences, c.tokens // LEAST)
    capacity = MOST_BYTES // (2 * c.kv_heads * c.head_dim)
    if c.most_keys is not None:
        capacity = min(capacity, most * c.most_keys)
    return Prefill(*found, most, capacity), ""


def members(lengths: list[int], ends: list[int], least: int, most: int, capacity: int) -> list[int]:
    """The sequences that are chosen: in their order those with keys and ``least`` queries, as long as there are no more
    than ``most``, nor more keys than ``capacity``; none where ``ends`` fall."""
    found: list[int] = []
    keys = 0
    if ends != sorted(ends):
        return found
    for s, length in enumerate(lengths):
        if length > 0 and ends[s + 1] - ends[s] >= least:
            keys += length
            if len(found) >= most or keys > capacity:
                break
            found.append(s)
    return found


@dataclass(frozen=True)
class Copied:
    """K and V of a sequence as they are copied, e4m3 (Hkv, N, D), and descales of blocks, (Hkv, blocks)."""

    k: torch.Tensor
    v: torch.Tensor
    k_descale: torch.Tensor
    v_descale: torch.Tensor

    @property
    def refused(self) -> bool:
        """Whether the kernels of decode have to take the sequence: a NaN in V would reach rows that do not see it."""
        return bool(self.v.float().isnan().any())


def operands(
    k: torch.Tensor, v: torch.Tensor, k_descale: torch.Tensor, v_descale: torch.Tensor, first: int = 0
) -> Copied:
    """Of e4m3 keys (Hkv, N, D) and descales (Hkv, N), or (Hkv, 1) where all share one, which is then kept.

    Blocks before key ``first`` are seen by nobody: they are zeros here, and are not copied by the kernel.
    """
    made = []
    skipped = first // KEY_BLOCK * KEY_BLOCK
    for x, d in ((k, k_descale), (v, v_descale)):
        if d.shape[1] == 1:
            y, block = x, d.expand(-1, -(-x.shape[1] // KEY_BLOCK))
        else:
            y, block = requantised(x, d, KEY_BLOCK)
        y, block = y.clone(), block.clone()
        y.view(torch.uint8)[:, :skipped] = 0
        block[:, : skipped // KEY_BLOCK] = 0.0
        made.append((y, block))
    return Copied(made[0][0], made[1][0], made[0][1], made[1][1])


def emulate_chunk(
    q: torch.Tensor, copied: Copied, variant: Variant, *, scale: float, left: int, right: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The T query tokens of one sequence, (T, H, D) bf16 or fp16, over its copied keys: out (T, H, D) and LSE (H, T).
    The last token stands at the last key; ``left`` and ``right`` as in ``attention_with_kvcache``."""
    rows, keys = q.shape[0], copied.k.shape[1]
    offset = keys - rows
    q8, q_descale = quantize(q.transpose(0, 1)[None], granularity="token", amax=score_amax(variant))
    if scale < 0:
        q8 = (q8.view(torch.uint8) ^ 0x80).view(q8.dtype)
    window = variant.mask == "window"
    result = emulate(
        q8, copied.k[None], copied.v[None], q_descale, copied.k_descale[None].contiguous(),
        copied.v_descale[None].contiguous(), variant=variant, scale=abs(scale), scaling="block",
        causal_offset=offset + (FAR if right < 0 else right),
        window_offset=offset - (FAR if left < 0 else left) if window else None,
    )  # fmt: skip
    return result.out[0].transpose(0, 1), result.lse[0]
