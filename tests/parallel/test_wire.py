"""Bytes between ranks without ranks: keys that are joined from buffers, rows that move, launches beside one another.

Regressions these catch: a segment that is read from another one's place, rows in another order, a descale of another
block, a result that is put elsewhere.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8cutlass import PackedKV, merge_attention, pack_kv
from fp8cutlass.memory import in_one, taken
from fp8cutlass.parallel import Shards, contiguous, gather, moves, ring, zigzag
from fp8cutlass.parallel.abreast import abreast
from fp8cutlass.parallel.pieces import Piece
from fp8cutlass.parallel.wire import from_wire, in_order, size, to_wire

CUTS = {
    "contiguous": contiguous(1100, 3, multiple=128),
    "zigzag": zigzag(1100, 2, multiple=128),
    "one": contiguous(300, 1),
    "uneven": Shards((((0, 128), (640, 1000)), (), ((128, 640),))),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("padded", [False, True])
def test_keys_are_joined_as_packed_ones_are(cut: str, batch: int, padded: bool) -> None:
    """Buffers one after the other, of one length or each of its own, in a storage that begins earlier."""
    shards = CUTS[cut]
    k, v = torch.randn(2, batch, 3, shards.tokens, 64).bfloat16()
    ranks = range(shards.ranks)
    packed = [
        pack_kv(shards.shard(k, r), shards.shard(v, r), key_block=128) if shards.lengths[r] else None for r in ranks
    ]
    like = next(x for x in packed if x is not None)
    sizes = [size(like, max(shards.lengths) if padded else n) for n in shards.lengths]
    begins = [sum(sizes[:r]) for r in ranks]
    storage = torch.randint(256, (128 + sum(sizes),), dtype=torch.uint8)
    buffer = storage[128:]
    for x, begin, room in zip(packed, begins, sizes, strict=True):
        if x is not None:
            to_wire(x, buffer[begin : begin + room])
            same(from_wire(like, buffer[begin : begin + room], x.shape[2]), x)
    parts = [packed[r].narrow(at, stop - start) for start, stop, r, at in shards.in_order()]  # type: ignore[union-attr]
    same(in_order(like, buffer, shards, begins), PackedKV.joined(parts))


def same(got: PackedKV, want: PackedKV) -> None:
    assert got.metadata == want.metadata
    for name, x in want.tensors().items():
        assert torch.equal(got.tensors()[name], x), name


class Group:
    """Stands for rank ``me`` of so many."""

    def __init__(self, me: int, ranks: int) -> None:
        self.me, self.ranks = me, ranks

    def rank(self) -> int:
        return self.me

    def size(self) -> int:
        return self.ranks


ROUTES = [
    (zigzag(1000, 2), zigzag(1000, 2, multiple=128)),
    (contiguous([100, 0, 900]), contiguous([0, 256, 744])),
    (zigzag(999, 3), contiguous(999, 3)),
    (contiguous(999, 3), Shards((((900, 999),), ((0, 100), (300, 900)), ((100, 300),)))),
    (zigzag(64, 4), zigzag(64, 4)),
]


@pytest.mark.parametrize("source, target", ROUTES)
def test_rows_move_to_their_rank(source: Shards, target: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    """K and V of other numbers of heads; what is sent is what the others get, and only rows that change their rank."""
    whole = [torch.randn(1, 2, source.tokens, 16).bfloat16(), torch.randn(1, 3, source.tokens, 8).bfloat16()]
    mine = [[source.shard(x, r) for x in whole] for r in range(source.ranks)]
    sent: dict[int, Any] = {}

    def remember(parts: torch.Tensor, sizes: list[int], received: list[int], group: Any) -> Any:
        sent[group.rank()] = parts.split(sizes)
        raise InterruptedError

    monkeypatch.setattr(moves, "all_to_all", remember)
    for r in range(source.ranks):
        try:
            assert moves.moved(mine[r], source, target, Group(r, source.ranks)) == mine[r]  # type: ignore[arg-type]
            assert source == target
        except InterruptedError:
            pass
    if source == target:
        return

    def deliver(parts: torch.Tensor, sizes: list[int], received: list[int], group: Any) -> Any:
        got = [sent[r][group.rank()] for r in range(source.ranks)]
        assert [len(x) for x in got] == received and sizes[group.rank()] == 0
        return gather.Pending([], torch.cat(got))

    monkeypatch.setattr(moves, "all_to_all", deliver)
    for r in range(source.ranks):
        found = moves.moved(mine[r], source, target, Group(r, source.ranks))  # type: ignore[arg-type]
        for x, full in zip(found, whole, strict=True):
            assert torch.equal(x, target.shard(full, r))


def test_calls_keep_their_order() -> None:
    made: list[int] = []
    abreast([lambda i=i: made.append(i) for i in range(3)], torch.device("cpu"))
    assert made == [0, 1, 2]


def test_partial_results_are_merged_where_there_are_some() -> None:
    """Rows that nothing was added to, once, and again, in parts that overlap; the bits of merging into zeros."""
    generator = torch.Generator().manual_seed(5)
    q = torch.zeros(1, 2, 12, 8).bfloat16()
    pieces = [(2, 5), (4, 9), (2, 5), (8, 9)]
    found, want = ring._Merged(q, True), torch.zeros(1, 2, 12, 8)
    want_lse = torch.full((1, 2, 12), -torch.inf)
    for rows in pieces:
        out = torch.randn(1, 2, rows[1] - rows[0], 8, generator=generator).bfloat16()
        lse = torch.randn(1, 2, rows[1] - rows[0], generator=generator)
        found.add(Piece(rows, (0, 1), None), [out, lse])
        merge_attention(want[:, :, slice(*rows)], want_lse[:, :, slice(*rows)], out, lse, inplace=True)
    out, lse = found.result(torch.float32)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    none, lse = ring._Merged(q, True).result(None)
    assert not none.any() and bool((lse == -torch.inf).all()) and none.dtype == q.dtype


def test_results_of_odd_sizes_are_taken_as_they_were_put() -> None:
    """A float32 LSE behind 16-bit rows that end between its elements."""
    rows, lse = torch.randn(1, 1, 33, 33).bfloat16(), torch.randn(1, 1, 33, 1)
    buffer = in_one([rows, lse, rows])
    at = rows.numel() * 2
    assert torch.equal(taken(buffer, 0, rows), rows) and torch.equal(taken(buffer, at, lse), lse)
    assert torch.equal(taken(buffer, at + 4 * 33, rows), rows)
