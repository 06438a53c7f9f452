"""The kernel that appends tokens to the pages of a cache: what it takes, and its launch. Nothing is waited for, and the
launch can be captured."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import extension

MOST_HEAD_DIM = 256  # kMostHeadDim of append/params.h
MOST_GROWN_PAGE = 8192  # tokens of a page whose descale of V grows: their numbers lie in shared memory
MOST_PAGE = 1 << 24  # tokens of any
MOST_SLOTS = 1 << 30  # of a cache, and of a row of the page table
ALIGNMENT = 16  # bytes at whose multiples rows begin
SOURCES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
ANGLES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Room:
    """Where K and V go, and their descales."""

    k: torch.Tensor  # (pages, page_size, Hkv, D) uint8, the bytes of e4m3, strides of whole 16 bytes
    v: torch.Tensor
    k_token: torch.Tensor | None  # (pages, page_size, Hkv) float32, any strides: found for each token and head
    v_page: torch.Tensor | None  # (pages, Hkv) float32, any strides
    k_descale: torch.Tensor | None  # (Hkv,) or (rows, Hkv) float32, where k_token is None; rows: tokens or sequences
    v_descale: torch.Tensor | None  # likewise; None: those in the pages grow by powers of two


@dataclass(frozen=True)
class Slots:
    """Token by token: (T,) int32 or int64, ``page * page_size + position``; what is out of range is not written."""

    slots: torch.Tensor
    positions: torch.Tensor | None = None  # (T,) in the sequences, for a turn


@dataclass(frozen=True)
class Table:
    """Behind the lengths of sequences, by a page table. Tokens without a page are not written."""

    cu: torch.Tensor  # (sequences + 1,) int32
    lengths: torch.Tensor  # (sequences,) int32
    page_table: torch.Tensor  # (sequences, entries) int32, one entry at least


@dataclass(frozen=True)
class Change:
    """What becomes of K before it is quantised."""

    turn: tuple[torch.Tensor, torch.Tensor, bool] | None  # cos, sin (S, R / 2), interleaved
    mean: torch.Tensor | None  # (Hkv, D) float32
    hadamard: bool


def takes(k: torch.Tensor, v: torch.Tensor, room: Room, columns: int = 1) -> bool:
    """Whether the kernel does it; torch operations do the rest. ``columns``: of the page table."""
    pages, page_size, _, head_dim = room.k.shape
    plain = all(type(x) is torch.Tensor for x in (k, v, room.k))  # no subclass, which may hold no memory
    grows = room.v_descale is None
    return (
        plain
        and k.dtype == v.dtype
        and k.dtype in SOURCES
        and head_dim <= MOST_HEAD_DIM
        and max(pages, columns) * page_size < MOST_SLOTS
        and page_size <= (MOST_GROWN_PAGE if grows else MOST_PAGE)
    )


def append(k: torch.Tensor, v: torch.Tensor, room: Room, at: Slots | Table, change: Change) -> torch.Tensor | None:
    """Launch the kernel for k and v (T, Hkv, D), T > 0, of one of ``SOURCES``. E4m3 is copied as it is, unchanged.

    Returns the lengths with the new tokens (sequences,) int32 for a ``Table``.

    A list of more than 4,096 slots takes a launch for each 4,096.
    """
    extension.load()
    slots = positions = cu = lengths = table = used = cos = sin = None
    interleaved = False
    if isinstance(at, Slots):
        slots, positions = at.slots.contiguous(), None if at.positions is None else at.positions.contiguous()
    else:
        cu, lengths = at.cu.contiguous(), at.lengths.contiguous()
        table = at.page_table if at.page_table.stride(1) == 1 else at.page_table.contiguous()
        used = torch.empty_like(lengths)
    if change.turn is not None:
        cos, sin, interleaved = change.turn
        if cos.dtype != sin.dtype or cos.dtype not in ANGLES:
            cos, sin = cos.float(), sin.float()
        cos, sin = _whole(cos), _whole(sin)
    mean = None if change.mean is None else _aligned(change.mean)
    extension.compiled().append(
        _bytes(_aligned(k)), _bytes(_aligned(v)), room.k, room.v, room.k_token, room.v_page, room.k_descale,
        room.v_descale, slots, positions, cu, lengths, table, used, cos, sin, interleaved, mean, change.hadamard,
    )  # fmt: skip
    return used


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def _whole(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, at a multiple of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Rows (..., D) that are contiguous and begin at multiples of 16 bytes."""
    return x if is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def is_aligned(x: torch.Tensor) -> bool:
    """Whether rows (..., D) are that by themselves."""
    steps = [step * x.element_size() for step, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
    return x.stride(-1) == 1 and not any(step % ALIGNMENT for step in (*steps, x.data_ptr()))
