"""Attention over 2 and 4 processes: the bits of one process, or within 0.5% of it, and half the bytes of bf16.

Regressions these catch: keys in another order than rows, an offset of a shard that is wrong by one, a head that goes to
another rank, a kernel that depends on how many ranks there are, bf16 keys on the wire, a partial result that is lost.
"""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
import torch.nn.functional as F
from parallel_cases import GATHERED, WIDE, Case, expected, run_cases
from reference import relative_l2

METHODS = ("gather", "ulysses", "ring")
TWO = [
    *(Case(m, 256, causal=causal, kv_heads=2) for m in METHODS for causal in (False, True)),
    *(Case(m, 256, "zigzag", causal=True, kv_heads=2, batch=2, layout="bshd") for m in METHODS),
    *(Case(m, (300, 211), causal=causal) for m in METHODS for causal in (False, True)),
    *(Case(m, 250, "zigzag", causal=True, dtype=torch.float16, options={"hadamard": True}) for m in METHODS),
    *(Case(m, (70, 60), keys=(129, 71), options={"precision": "accurate"}) for m in METHODS),
    *(Case(m, 256, "zigzag", causal=True, dtensor=True) for m in METHODS),
    Case("ring", 300, options={"smooth_k": True, "scaling": "token"}),
    *(Case("ring", 256, shards, causal=True, kv_heads=2, lse=False) for shards in ("contiguous", "zigzag")),
    *(Case("ring", (300, 211), lse=False, options={"precision": p}) for p in ("fast", "accurate")),
    Case("gather", 256, kv_heads=1, options={"head_groups": 7}),
    Case("gather", 256, "zigzag", causal=True, kv_heads=2, options={"head_groups": 2}),
    Case("gather", (300, 211), heads=6, kv_heads=3, options={"head_groups": 2}),
    Case("gather", (1500, 1), heads=1, kv_heads=1, head_dim=128, options={"kernel": WIDE}),
]
FOUR = [
    *(Case(m, 512, shards, causal=True, heads=8) for m in METHODS for shards in ("contiguous", "zigzag")),
    *(Case(m, (130, 0, 1, 300), causal=causal) for m in METHODS for causal in (False, True)),
    *(Case("ring", 512, shards, causal=True, heads=8, lse=False) for shards in ("contiguous", "zigzag")),
    Case("ring", (130, 0, 1, 300), lse=False),
    *(
        Case(m, 512, shards, causal=True, kv_heads=2, outer=2)
        for m in ("gather", "ring")
        for shards in ("contiguous", "zigzag")
    ),
]
LISTS = {2: TWO, 4: FOUR}
CASES = [(count, case) for count, cases in LISTS.items() for case in cases]


pytestmark = pytest.mark.xdist_group("ranks")  # one process starts them


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """Of each number of ranks what each rank found; all cases in one start of the processes."""
    return {
        count: ranks.run(count, run_cases, tmp_path_factory.mktemp("ranks"), cases) for count, cases in LISTS.items()
    }


def found_by(outcomes: dict[int, list[dict[str, Any]]], count: int, case: Case) -> list[dict[str, Any]]:
    assert all(isinstance(of_rank, dict) for of_rank in outcomes[count]), outcomes[count]
    return [of_rank[case.name] for of_rank in outcomes[count]]


@pytest.mark.parametrize(("count", "case"), CASES, ids=lambda x: getattr(x, "name", str(x)))
def test_the_result_of_one_process(outcomes: Any, count: int, case: Case) -> None:
    found = found_by(outcomes, count, case)
    assert len({of_rank["kernel"] for of_rank in found}) == 1
    rows = case.of_rows(count)
    out = rows.unshard([of_rank["out"] for of_rank in found])
    want, want_lse = expected(case, found[0]["kernel"])
    assert out.dtype == want.dtype
    if not case.lse:
        assert relative_l2(out, want.double()) < 0.005
        return
    lse = rows.unshard([of_rank["lse"] for of_rank in found])
    if case.method in GATHERED:
        assert torch.equal(out, want) and torch.equal(lse.isinf(), want_lse.isinf())
        assert float((lse - want_lse).abs().max()) < 1e-5  # a sum of exponentials in another order
    elif "smooth_k" in case.options:  # each shard has a mean and descales of its own
        exact = F.scaled_dot_product_attention(*(x.double() for x in case.operands()))
        assert relative_l2(out, exact) < 1.05 * relative_l2(want, exact)
        q, k, _ = (x.double() for x in case.operands())
        exact_lse = (q @ k.mT / case.head_dim**0.5).logsumexp(-1)
        assert relative_l2(lse, exact_lse) < 1.05 * relative_l2(want_lse, exact_lse)
    else:
        assert relative_l2(out, want.double()) < 0.005 and float((lse - want_lse).abs().max()) < 1e-4


@pytest.mark.parametrize(("count", "case"), CASES, ids=lambda x: getattr(x, "name", str(x)))
def test_bytes_are_counted_as_they_are_sent(outcomes: Any, count: int, case: Case) -> None:
    for of_rank in found_by(outcomes, count, case):
        assert of_rank["sent"] == of_rank["seen"] and of_rank["dtypes"] <= {"torch.uint8"}


@pytest.mark.parametrize(("count", "tokens", "heads", "kv_heads"), [(2, 256, 4, 2), (4, 512, 8, 4)])
@pytest.mark.parametrize("method", ["gather", "ring"])
def test_half_the_bytes_of_bf16(outcomes: Any, method: str, count: int, tokens: int, heads: int, kv_heads: int) -> None:
    """K and V are a byte an element, and 128 keys of a head have two descales: 50.1% of bf16 at head_dim 32. The buffer
    has each tensor at a multiple of 128 bytes."""
    case = Case(method, tokens, causal=True, heads=heads, kv_heads=kv_heads)
    mine = tokens // count
    bf16 = (count - 1) * 4 * kv_heads * mine * case.head_dim
    descales = 2 * 128  # of a few blocks, in 128 bytes each
    for of_rank in found_by(outcomes, count, case):
        assert of_rank["sent"] == bf16 // 2 + (count - 1) * descales


def test_heads_are_cut_by_what_an_exchange_and_products_take() -> None:
    """An exchange that takes as long as a group's launches is not cut. The first of more groups hides the exchange of
    the others, or has its even share where products are too short for that."""
    from fp8cutlass.parallel.gather import LAUNCHES, LINK, PRODUCTS, fitting

    def ends(heads: int, launches: float, products: float) -> list[int]:
        received = launches * LAUNCHES * LINK
        return fitting(heads, round(received), products * received / LINK * PRODUCTS)

    assert [len(ends(40, n, 20)) - 1 for n in (0, 1, 2, 4, 16, 100)] == [1, 1, 1, 2, 4, 10]
    assert ends(40, 4, 20) == [0, 2, 40] and ends(40, 16, 20) == [0, 2, 14, 27, 40]
    assert ends(8, 4, 100) == [0, 1, 8] and ends(8, 4, 0) == [0, 4, 8]
    assert ends(1, 16, 20) == [0, 1] and ends(3, 100, 20) == [0, 1, 2, 3]
    for heads in range(1, 50):
        for launches in (0, 3, 10, 50):
            for products in (0.0, 0.7, 5, 200):
                found = ends(heads, launches, products)
                assert found[0] == 0 and found[-1] == heads and found == sorted(set(found))
