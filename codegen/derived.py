"""What every family derives from the axes of a variant."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Unrolled:
    """A form of a kernel for KV lengths from `least_keys` to `most_keys`, in which the tiles of an item are unrolled.

    tiles: of an item. last_keys: of the last one that are multiplied. products: matrix instructions that a warpgroup
    issues for an item. plain: for calls without LSE, sinks and amax alone.
    """

    least_keys: int
    most_keys: int
    tiles: int
    last_keys: int
    products: int
    plain: bool


@dataclass(frozen=True, kw_only=True)
class Derived:
    """registers: an estimate of what a thread of the main loop needs; register_limit: what it may have; spilled: how
    many more it may keep in local memory; quantises_q: takes Q in 16 bits as well; unrolled: what forms it has beside
    the one for any length; plain: whether there is one for calls of any length without LSE, sinks and amax; halves:
    slots of shared memory that a tile of K, or of V, takes; parts: products that share the columns of P V."""

    threads: int
    rows_per_warp: int
    smem_parts: tuple[tuple[str, int], ...]
    smem_bytes: int
    registers: int
    register_limit: int
    ctas_per_sm: int
    ctas_limit: str
    mma_per_tile: int  # matrix instructions a warp (sm90a: a warpgroup) issues for one KV tile
    mma_in_loop: int  # of which so many stand in the main loop's code; fewer where the k steps of Q K^T are a loop
    integer_in_loop: int = 0  # of these, products of integers
    spilled: int = 0
    quantises_q: bool = False
    unrolled: tuple[Unrolled, ...] = ()
    plain: bool = False
    halves: int = 1
    parts: int = 1

    @property
    def smem_sum(self) -> str:
        return " + ".join(f"{name} {size:,}" for name, size in self.smem_parts) + f" = {self.smem_bytes:,}"
