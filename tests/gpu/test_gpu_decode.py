"""The decode kernels on a card, against float64: what tests/native/test_decode_host.py shows of their sources on the
host. Besides: long caches, equal bits in many runs, graphs whose lengths change between replays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from decode_card import Launcher, launch, on_card
from decode_host import FAR, Batch, batch, exact, wrong
from gpu import built_decodes

from fp8cutlass.manifest import Decode

pytestmark = pytest.mark.gpu

LENGTHS, QUERIES = (300, 0, 17, 2000, 128), [1, 2, 0, 5, 3]
KERNELS = built_decodes()
every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda d: d.id)


def cases(head_dim: int) -> dict[str, Batch]:
    def of(**rest: Any) -> Batch:
        return batch(LENGTHS, QUERIES, (8, 2), head_dim, 16, **rest)

    plain = of()
    pages, random = plain.k.shape[0], torch.Generator().manual_seed(9)
    hit = of(seed=3)
    page, token = divmod(LENGTHS[3] - 2, 16)
    hit.v[int(hit.table[3, page]), token, 0, 5] = 0x7F
    return {
        "plain": plain,
        "window": of(left=70),
        "two-sided window": of(left=40, right=1),
        "no mask": of(right=FAR),
        "softcap": of(softcap=2.0),
        "sinks": of(sinks=torch.linspace(-1, 9, 8)),
        "fp16": of(dtype=torch.float16),
        "descales of tokens and pages": replace(
            plain,
            k_token=torch.rand(pages, 16, 2, generator=random) + 0.5,
            v_page=2.0 ** torch.randint(-9, 12, (pages, 2), generator=random).float(),
        ),
        "a NaN that two queries see": hit,
        "a NaN in a query": replace(plain, q=plain.q.index_fill(0, torch.tensor(4), torch.nan)),
    }


@every_kernel
@pytest.mark.parametrize("name", cases(64))
def test_every_kernel_is_exact_but_for_rounding(name: str, kernel: Decode) -> None:
    b = cases(kernel.head_dim)[name]
    assert wrong(b, launch(b, kernel)) == ""
    assert wrong(b, launch(b, kernel, sms=3)) == "", "few CTAs, each with many tiles"


@pytest.mark.parametrize("page_size", [1, 16, 48, 128])
def test_pages_of_any_size(page_size: int) -> None:
    b = batch(LENGTHS, QUERIES, (8, 2), KERNELS[0].head_dim, page_size)
    assert wrong(b, launch(b, KERNELS[0])) == ""


@pytest.mark.parametrize("lengths", [(40_000,), (20_000, 40, 40, 40), (1,) * 300, (700,) * 64], ids=str)
def test_work_is_shared_by_all_ctas(lengths: tuple[int, ...]) -> None:
    b = batch(lengths, [1] * len(lengths), (8, 2), KERNELS[0].head_dim, 64)
    assert wrong(b, launch(b, KERNELS[0])) == ""
    assert wrong(b, launch(b, KERNELS[0], share=False)) == ""


@every_kernel
def test_ctas_with_whole_units_take_one_in_every_few_sequences(kernel: Decode) -> None:
    b = batch((5 * kernel.tile,) * 8, [1] * 8, (8, 2), kernel.head_dim, 16)
    result = launch(b, kernel, sms=2)
    assert wrong(b, result) == "" and result.cuts[0, 10] == kernel.ctas_per_sm


@every_kernel
def test_a_thousand_runs_give_equal_bits(kernel: Decode) -> None:
    """Of fp16 and of the LSE, as bf16 hides the order of most sums."""
    b = batch((9000, 100, 3000), [1, 1, 1], (8, 2), kernel.head_dim, 16, dtype=torch.float16)
    launcher = Launcher(on_card(b), kernel)
    work = launcher.cut()
    first = launcher.attend(work)
    changed = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        for x, y in zip(launcher.attend(work), first, strict=True):
            assert x is not None and y is not None
            changed += (x != y).sum()
    assert int(changed) == 0


def test_a_graph_follows_lengths_that_change() -> None:
    host = batch((3000, 500, 64), [1, 1, 1], (8, 2), KERNELS[0].head_dim, 16)
    launcher = Launcher(on_card(host), KERNELS[0])

    def step() -> torch.Tensor:
        return launcher.attend(launcher.cut(), lse=False)[0]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for lengths in ((3000, 500, 64), (1, 0, 64), (2999, 17, 3)):
        launcher.batch.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        want, _ = exact(replace(host, lengths=torch.tensor(lengths, dtype=torch.int32)))
        assert (out.cpu().double() - want).abs().max() <= 2**-7 * want.abs().max()
