"""Short sequences from bf16 or fp16: which kernel keeps K and V in shared memory, and whose numbers it computes.

Such a kernel is no variant. It computes what a variant with tiles of 128 keys computes from packed operands, which
therefore says what the numerics are, and is what the emulator runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..manifest import KEY_BLOCK, Manifest, Resident, Variant, load_manifest
from .problem import Problem

# By head_dim and mask, the most keys for which it was measured to be the fastest way, also of ragged batches
# (docs/lab/short.md).
MOST_KEYS = {(64, False): 512, (64, True): 1024, (128, False): 512, (128, True): 512}
# By the most keys of a kernel, the row tiles for each SM from which on it is: with fewer, a head is quantised by
# several CTAs, or an SM waits for one.
FEWEST_TILES = {64: 1, 128: 1, 256: 2, 512: 5, 1024: 10}
TILE_ROWS = 64
# By the most keys of a kernel, how many heads of K and V a ragged batch needs for each SM. It is the larger one of a
# number, and of a number for each query head that shares a head. With fewer, long sequences keep some SMs busy for too
# long. Where many share K and V, these cost little to quantise apart.
FEWEST_HEADS = {64: (0, 0.0), 128: (0, 0.0), 256: (2.5, 0.5), 512: (4, 2.0), 1024: (6, 2.0)}


def reference(manifest: Manifest, head_dim: int, source: str, *, causal: bool) -> Variant | None:
    """The variant whose numbers kernels for 16-bit operands of type ``source`` compute; None where there is none."""
    wanted = ("sm90a", "fwd", head_dim, KEY_BLOCK, "e4m3", source, "linear", "solo", causal)
    for v in manifest.variants:
        axes = (v.family, v.kind, v.head_dim, v.tile_n, v.dtype, v.out, v.softmax, v.cluster, v.causal)
        if axes == wanted and "block" in v.scalings and v.key_block == KEY_BLOCK and v.quantises_q:
            return v
    return None


def serving(manifest: Manifest, head_dim: int, source: str, keys: int) -> Resident | None:
    """The kernel of a head_dim and a type that takes so many keys with the least shared memory; None if there is none.
    ``head_dim`` is a kernel's."""
    fitting = (r for r in manifest.residents if (r.head_dim, r.source) == (head_dim, source) and keys <= r.keys)
    return min(fitting, key=lambda r: r.keys, default=None)


def chosen(manifest: Manifest, problem: Problem, source: str, table: Variant) -> tuple[Variant, Resident] | None:
    """The kernel that is faster than the table's choice for operands of type ``source``, and whose numbers it computes.
    None where that choice stays."""
    if problem.arch != "sm90a" or problem.special or problem.quantised or problem.scaling != "block":
        return None
    if table.softmax != "linear" or problem.out != source:
        return None
    if problem.seqlen_k > MOST_KEYS.get((table.head_dim, problem.causal), 0):
        return None
    kernel = serving(manifest, table.head_dim, source, problem.seqlen_k)
    tiles = problem.batch * problem.heads * -(-problem.seqlen_q // TILE_ROWS)
    if kernel is None or tiles < FEWEST_TILES[kernel.keys] * problem.sm_count:
        return None
    variant = reference(manifest, table.head_dim, source, causal=problem.causal)
    return None if variant is None else (variant, kernel)


@dataclass(frozen=True)
class OfLengths:
    """A kernel for ragged batches, the variant whose numbers it computes, and the numbers of both in an extension."""

    kernel: Resident
    number: int
    variant: Variant
    variant_number: int

    def serves(self, keys: int, sequences: int, heads: int, kv_heads: int, sm_count: int) -> bool:
        """Whether it is the fastest way for sequences of at most ``keys`` keys, all that the host knows of them."""
        fewest, by_group = FEWEST_HEADS[self.kernel.keys]
        return keys <= self.kernel.keys and sequences * kv_heads >= sm_count * max(fewest, by_group * heads / kv_heads)


@lru_cache(maxsize=64)
def for_lengths(directory: Path, arch: str, head_dim: int, source: str, *, causal: bool) -> tuple[OfLengths, ...]:
    """The kernels that ragged batches of type ``source`` may take, that for the fewest keys first."""
    manifest = load_manifest(directory)
    variant = reference(manifest, head_dim, source, causal=causal) if arch == "sm90a" else None
    if variant is None:
        return ()
    most = MOST_KEYS.get((head_dim, causal), 0)
    found = [
        OfLengths(r, number, variant, manifest.index[variant.id])
        for number, r in enumerate(manifest.residents)
        if (r.head_dim, r.source) == (head_dim, source) and r.keys <= most
    ]
    return tuple(sorted(found, key=lambda x: x.kernel.keys))
