"""Where `out` may lie: which tensors share an element, exactly.

Regressions these catch: an `out` that is overwritten while it is still read, or that overwrites itself; one that is
refused although it only lies between the rows of another tensor.
"""

from __future__ import annotations

import random

import torch

from fp8cutlass import attention
from fp8cutlass.call.checks import _overlap, _overlaps_itself


def test_out_may_lie_between_the_rows_of_query() -> None:
    """Q, K, V and the result in one buffer (B, S, 4, H, D), no element shared: served, and nothing else is written."""
    packed = torch.randn(2, 40, 4, 3, 64).bfloat16()
    q, k, v, out = (packed[:, :, i].transpose(1, 2) for i in range(4))
    before = packed.clone()
    want = attention(q.clone(), k.clone(), v.clone())
    assert attention(q, k, v, out=out) is out and torch.equal(out, want)
    assert torch.equal(packed[:, :, :3], before[:, :, :3])


def shared_bytes(x: torch.Tensor) -> list[int]:
    """The address of every byte of every element."""
    at = torch.tensor(x.data_ptr())
    for size, stride in zip(x.shape, x.stride(), strict=True):
        at = at[..., None] + torch.arange(size) * stride * x.element_size()
    return (at.flatten()[:, None] + torch.arange(x.element_size())).flatten().tolist()


def test_overlap_is_exact() -> None:
    """Of random views of one buffer, against the set of their bytes."""
    draw = random.Random(1)
    buffer = torch.zeros(1024, dtype=torch.uint8)

    def view() -> torch.Tensor:
        of = buffer.view(draw.choice([torch.uint8, torch.bfloat16, torch.float32]))
        rank = draw.randint(1, 4)
        shape, steps = ([draw.choice(of_what) for _ in range(rank)] for of_what in ((1, 2, 3), (1, 2, 3, 4, 6, 9, 20)))
        return of.as_strided(shape, steps, draw.randint(0, 100))

    found = set()
    for _ in range(2000):
        x, y = view(), view()
        of_x, of_y = shared_bytes(x), shared_bytes(y)
        itself, each_other = len(set(of_x)) < len(of_x), bool(set(of_x) & set(of_y))
        assert (_overlaps_itself(x), _overlap(x, y)) == (itself, each_other), (x.shape, x.stride(), y.shape, y.stride())
        found.add((itself, each_other))
    assert len(found) == 4


def test_a_search_without_an_end_says_that_memory_is_shared() -> None:
    """Strides that follow from no sizes; only what is certain is let through."""
    buffer = torch.zeros(1 << 20)
    x = buffer.as_strided((60, 60, 60, 60), (997, 991, 983, 977))
    assert _overlaps_itself(x) and _overlap(x, buffer.as_strided((60, 60, 60, 60), (953, 947, 941, 937), 1))
