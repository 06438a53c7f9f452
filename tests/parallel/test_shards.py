"""Who has which tokens, and which calls a shard of rows and a shard of keys make.

Regressions these catch: a pair of a row and a key that no call has, or two; an end that lies between blocks; rows that
come back in another order.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8cutlass import UnsupportedError
from fp8cutlass.parallel import Shards, contiguous, zigzag
from fp8cutlass.parallel.pieces import pieces


@st.composite
def shards(draw: st.DrawFn) -> Shards:
    tokens, ranks = draw(st.integers(1, 24)), draw(st.integers(1, 3))
    ends = [0, *sorted(draw(st.sets(st.integers(1, 23)))), tokens]
    owners = [draw(st.integers(0, ranks - 1)) for _ in ends]
    found: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for owner, start, stop in zip(owners, ends, ends[1:], strict=False):
        if start < min(stop, tokens):
            found[owner].append((start, min(stop, tokens)))
    return Shards(tuple(map(tuple, found)))


@settings(max_examples=200, deadline=None)
@given(shards(), shards(), st.booleans())
def test_each_pair_that_the_mask_leaves_is_in_one_call(rows: Shards, keys: Shards, causal: bool) -> None:
    for of_rows in rows.segments:
        for of_keys in keys.segments:
            row_tokens, key_tokens = ([t for a, b in x for t in range(a, b)] for x in (of_rows, of_keys))
            found = Counter(
                (i, j)
                for (top, bottom), (first, last), offset in pieces(of_rows, of_keys, causal)
                for i in range(top, bottom)
                for j in range(first, last)
                if offset is None or j - first <= i - top + offset
            )
            want = [(i, j) for i, r in enumerate(row_tokens) for j, k in enumerate(key_tokens) if not causal or k <= r]
            assert found == Counter(want)


@settings(max_examples=100, deadline=None)
@given(shards(), st.integers(1, 7))
def test_tensors_come_back(given_shards: Shards, multiple: int) -> None:
    for some in (given_shards, given_shards.snapped(multiple), given_shards.split(2)):
        x = torch.arange(some.tokens * 2).view(1, some.tokens, 2)
        parts = [some.shard(x, r, 1) for r in range(some.ranks)]
        assert [part.shape[1] for part in parts] == list(some.lengths)
        assert torch.equal(some.unshard(parts, 1), x)
    assert (
        given_shards.snapped(multiple).fits(multiple) and given_shards.snapped(multiple).tokens == given_shards.tokens
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("tokens", [0, 1, 64, 1000, 1024])
def test_zigzag_and_contiguous(ranks: int, tokens: int) -> None:
    """Zig-zag is the order of torch's head-tail load balancer, and as many pairs on each rank."""
    for multiple in (1, 128):
        for made in (zigzag(tokens, ranks, multiple=multiple), contiguous(tokens, ranks, multiple=multiple)):
            assert made.ranks == ranks and sum(made.lengths) == tokens and made.fits(multiple)
    if tokens == 1024 and 1024 % (2 * ranks) == 0:
        from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer

        order = _HeadTailLoadBalancer(tokens, ranks, torch.device("cpu"))._generate_indices().flatten()
        made = zigzag(tokens, ranks)
        assert torch.equal(order, torch.cat([made.shard(torch.arange(tokens), r, 0) for r in range(ranks)]))
        pairs = {sum(t + 1 for a, b in mine for t in range(a, b)) for mine in made.segments}
        assert len(pairs) == 1
        calls = [len(pieces(made.segments[r], made.segments[s], True)) for r in range(ranks) for s in range(ranks)]
        assert set(calls) == {1}  # each step of a ring is one call


def test_what_is_refused() -> None:
    for wrong in ((((0, 3),), ((4, 5),)), (((0, 3),), ((2, 5),)), (((3, 5), (0, 3)),), ()):
        with pytest.raises(UnsupportedError, match="segments must cover"):
            Shards(wrong)
    some = contiguous([3, 4])
    with pytest.raises(UnsupportedError, match="x has 8 tokens"):
        some.shard(torch.zeros(8), 0, 0)
    with pytest.raises(UnsupportedError, match="part 0 has 4 tokens"):
        some.unshard([torch.zeros(4), torch.zeros(4)], 0)
    with pytest.raises(UnsupportedError, match="ranks must be given"):
        contiguous(7)
