"""The decode kernels on the host, from the sources that nvcc compiles: against float64, with copies that arrive late or
at once and warps in any order, and with planted faults.

Instructions that a whole warp executes are meetings of its threads here. So a missing __syncwarp beside one is not
seen: only the memory model of a card asks for it.

Regressions these catch: a fragment that lies elsewhere, a missing wait or barrier, a key of another sequence, a share
of work that nobody takes or two take, parts that are added in the order of arrival, stale bytes that reach a result.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from decode_host import FAR, Batch, Kernel, batch, exact, wrong

KERNELS = ("decode_sm90a_d64_r8", "decode_sm89_d96_r32", "decode_sm90a_d128_r16", "decode_sm90a_d64_r64")
LENGTHS = (140, 0, 17, 330, 64)


@pytest.fixture(scope="module", params=KERNELS)
def kernel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    return Kernel(request.param, tmp_path_factory.mktemp("decode"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    return Kernel(KERNELS[0], tmp_path_factory.mktemp("decode"))


def _by_sequence(b: Batch, x: torch.Tensor) -> torch.Tensor:
    """The first page of each sequence, in their order."""
    return torch.stack([x[int(b.pages_of(s)[0])] for s in range(len(b.lengths))])


@cache
def cases(head_dim: int) -> dict[str, Batch]:
    """Of each kind of call one, with one to five queries a sequence."""
    one, some = [1] * 5, [1, 2, 0, 5, 3]

    def of(queries: list[int], page_size: int = 16, **rest: Any) -> Batch:
        return batch(LENGTHS, queries, (4, 2), head_dim, page_size, **rest)

    plain = of(one)
    pages = plain.k.shape[0]
    random = torch.Generator().manual_seed(9)
    hit = of(some, seed=3)
    page, token = divmod(LENGTHS[3] - 2, 16)
    # The last key but one of sequence 3, which the last two of its 5 queries see.
    hit.v[int(hit.table[3, page]), token, 0, 5] = 0x7F
    equal = of([3] * 5, seed=4)
    heads, far = torch.rand(2, generator=random) + 0.5, torch.full((5, 1), torch.inf)
    shared = batch(LENGTHS, one, (4, 2), head_dim, 352, seed=5)  # a page each
    return {
        "plain": plain,
        "as many queries each": replace(equal, cu_q=None),
        "a page each": replace(
            shared, table=None, cu_q=None, k=_by_sequence(shared, shared.k), v=_by_sequence(shared, shared.v)
        ),
        "descales of heads": replace(plain, k_descale=heads.expand(5, 2), v_descale=heads.flip(0).expand(5, 2)),
        "numbers as descales": replace(plain, k_descale=0.7, v_descale=1.3),
        "descales out of range": replace(
            plain, v=torch.full_like(plain.v, 0x20), k_descale=torch.full((5, 2), -1.0), v_descale=far.expand(5, 2)
        ),
        "sinks in bf16": of(some, sinks=torch.tensor([-1.0, 0.5, 3.0, 9.0]).bfloat16()),
        "sinks in fp16": of(some, sinks=torch.tensor([-1.0, 0.5, 3.0, 9.0]).half()),
        "queries": of(some),
        "pages of 64": of(some, 64),
        "pages of 1": batch((30, 0, 40), [1, 2, 1], (4, 2), head_dim, 1),
        "window": of(some, left=70),
        "two-sided window": of(some, left=40, right=1),
        "no mask": of(some, right=FAR),
        "softcap": of(one, softcap=2.0),
        "sinks": of(some, sinks=torch.tensor([-1.0, 0.5, 3.0, 9.0])),
        "fp16": of(one, dtype=torch.float16),
        "descales of tokens and pages": replace(
            of(some),
            k_token=torch.rand(pages, 16, 2, generator=random) + 0.5,
            v_page=2.0 ** torch.randint(-9, 12, (pages, 2), generator=random).float(),
        ),
        "many tiles": batch((1700, 40), [2, 1], (4, 2), head_dim),
        "a NaN that two queries see": hit,
        "a query of zeros": replace(
            zeros := of(some), q=zeros.q.index_fill(0, torch.tensor(4), 0.0), k_descale=2.0**-40
        ),
        "a NaN in a query": replace(nan := of(some), q=nan.q.index_fill(0, torch.tensor(4), torch.nan)),
    }


@pytest.mark.parametrize("name", cases(64))
def test_a_kernel_is_exact_but_for_rounding(kernel: Kernel, name: str) -> None:
    b = cases(kernel.spec.head_dim)[name]
    result = kernel.run(b, ctas=9)
    assert wrong(b, result) == ""
    if name == "a NaN that two queries see":
        assert result.out.isnan().sum() == 4  # of the two heads that share it


@pytest.mark.parametrize("seed", range(4))
def test_no_order_of_warps_and_no_arrival_of_copies_changes_a_bit(small: Kernel, seed: int) -> None:
    b = cases(64)["queries"]
    want = small.run(b, ctas=9)
    got = small.run(b, ctas=9, seed=seed + 1, late=seed % 2 == 0)
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)


@pytest.mark.parametrize("ctas", [1, 2, 3, 13, 60])
def test_any_number_of_ctas_takes_all_work_once(small: Kernel, ctas: int) -> None:
    b = cases(64)["queries"]
    assert wrong(b, small.run(b, ctas=ctas)) == ""


def test_shares_are_equal(small: Kernel) -> None:
    """Tiles of a CTA: within two of the mean, where one sequence has nearly all keys."""
    b = batch((3000, 40, 40, 40), [1] * 4, (2, 2), 64)
    cuts = small.run(b, ctas=12, overhead=1).cuts
    tile = small.spec.tile
    tiles = [-(-n // tile) for n in b.lengths.tolist()]
    line = []
    for sequence, unit, at, *_ in cuts.tolist():
        before = sum(2 * t for t in tiles[:sequence]) if sequence < 4 else sum(2 * t for t in tiles)
        line.append(before + (unit * tiles[sequence] + at if sequence < 4 else 0))
    shares = [b - a for a, b in zip(line, line[1:], strict=False)]
    assert sum(shares) == 2 * sum(tiles) and max(shares) <= sum(shares) / 12 + 2


def test_without_sharing_a_sequence_does_not_depend_on_the_others(small: Kernel) -> None:
    b = batch((300, 700, 90), [1] * 3, (4, 2), 64)
    alone = replace(
        b, q=b.q[1:2], table=b.table[1:2], lengths=b.lengths[1:2], cu_q=torch.tensor([0, 1], dtype=torch.int32),
        k_descale=b.k_descale[1:2], v_descale=b.v_descale[1:2],
    )  # fmt: skip
    together, single = small.run(b, ctas=20, whole=True), small.run(alone, ctas=3, whole=True)
    assert torch.equal(together.out[1:2], single.out)


def test_keys_past_the_end_and_lying_tables_reach_nothing(small: Kernel) -> None:
    b = batch((100, 37), [1, 1], (4, 2), 64)
    zeroed = replace(b, k=b.k.clone(), v=b.v.clone())
    for x in (zeroed.k, zeroed.v):
        x[x == 0x7F] = 0
    assert torch.equal(small.run(b).out, small.run(zeroed).out)
    lying = replace(b, lengths=torch.tensor([10**9, -4], dtype=torch.int32), table=b.table.clone().fill_(10**9))
    assert small.run(lying).out.shape == b.q.shape  # a copy from elsewhere raises


def test_sequences_of_another_kernel_are_left_alone(small: Kernel) -> None:
    """Neither are their rows written, nor does anybody wait for their share; others keep their bits. Without the word a
    negative length is 0."""
    plain = cases(64)["queries"]
    whole = small.run(plain, whole=True)
    for taken in ([1, 3], [0, 4], [0, 1, 2, 3, 4], [2]):
        lengths = plain.lengths.clone()
        lengths[taken] = -1
        result = small.run(replace(plain, lengths=lengths, routed=True), whole=True)
        theirs = torch.zeros(len(plain.q), dtype=torch.bool)
        for s in taken:
            theirs[int(plain.cu_q[s]) : int(plain.cu_q[s + 1])] = True
        assert result.out[theirs].isnan().all() and result.lse[:, theirs].isnan().all()
        assert torch.equal(result.out[~theirs], whole.out[~theirs])
        assert torch.equal(result.lse[:, ~theirs], whole.lse[:, ~theirs])
        dead = small.run(replace(plain, lengths=lengths), whole=True)
        assert (dead.out[theirs] == 0).all() and torch.equal(dead.out[~theirs], whole.out[~theirs])


def test_queries_of_no_sequence_are_zero(small: Kernel) -> None:
    b = batch((50, 60), [2, 1], (4, 2), 64)
    b = replace(b, q=torch.cat([b.q[:1], b.q, b.q[:2]]), cu_q=b.cu_q + 1)
    result = small.run(b)
    assert wrong(b, result) == "" and not result.out[0].any() and bool(result.lse[:, -2:].isinf().all())


def test_one_far_key_of_many_is_found(small: Kernel) -> None:
    """The row of a needle: its key outweighs thousands whose P is small, and those still count together."""
    b = batch((6000,), [1], (2, 1), 64, right=FAR)
    b.k.fill_(0)
    b.k[int(b.table[0, 200]), 3] = 0x50  # 8.0
    b.q.fill_(1.0)
    b.k_descale.fill_(0.16), b.v_descale.fill_(1.0)
    out, lse = exact(b)
    result = small.run(b, ctas=3)
    assert wrong(b, result) == "" and 1e-2 < 1 - torch.exp(torch.tensor(8 * 0.16 * 8.0) - lse[0, 0]) < 0.5


# The case that notices it, whether its copies arrive late, and the edit.
FAULTS = {
    "a slice is used before it arrives": (
        "plain", True, ("kernel.cu", "decode::wait<kStages - 2>()", "decode::wait<kStages - 1>()")),
    "a slice goes into a slot that is in use": (
        "plain", False,
        ("kernel.cu", "const int before = slot == 0 ? kStages - 1 : slot - 1",
         "const int before = slot == kStages - 1 ? 0 : slot + 1")),
    "Q is read before all of it is there": (
        "queries", True,
        ("kernel.cu", "queries[buffer]);\n    __syncthreads();\n    state", "queries[buffer]);\n    state")),
    "Q of the next unit is read before it arrives": (
        "plain", True, ("kernel.cu", "if (share.tiles < kStages) {", "if (share.tiles < kStages && false) {")),
    "Q of the next unit goes where this one's is": (
        "plain", False, ("kernel.cu", "ask_queries(p, next, shared.exchange.queries[buffer])",
         "ask_queries(p, next, shared.exchange.queries[buffer ^ 1])")),
    "pages are used before they arrive": (
        "queries", True, ("kernel.cu", "load(p, places[before],", "load(p, places[slot],")),
    "keys are looked up where those of the next load lie": (
        "plain", True, ("kernel.cu", "places[before == 0 ? kStages - 1 : before - 1]", "places[before]")),
    "lengths are used before they arrive": (
        "plain", True, ("stream.cuh", "bool there_ = false;", "bool there_ = true;")),
    "a window ends one key late": ("two-sided window", True, ("units.h", "own + b.right + 1", "own + b.right + 2")),
    "a window begins one key late": ("window", True, ("units.h", "own - b.left, 0", "own - b.left + 1, 0")),
    "a NaN of V reaches rows that do not see it": (
        "a NaN that two queries see", True, ("softmax.cuh", "if (edge && has_nan", "if (false && has_nan")),
    "keys past the end are seen": ("plain", True, ("units.h", "b.right >= kFar ? of.keys :", "true ? of.keys + 16 :")),
    "a page of another key": (
        "plain", True, ("fetch.cuh", "own = key + lane, entry", "own = key + lane + 1, entry")),
    "a tile is worked on twice": (
        "plain", True, ("stream.cuh", "max(tiles.first + share.tile,", "max(tiles.first + share.tile - 1,")),
    "a part is left out": (
        "plain", True,
        ("finish.cuh", "column(k), c + i <= last);", "column(k), c + i < last);")),
    "the counter of arrivals is left as it is": (
        "plain", True, ("finish.cuh", "if (last && lane == 0) *arrived = 0;", "")),
    "a warp's sum is left out": (
        "plain", True,
        ("finish.cuh", "for (int w = 0; w < kWarps; ++w) sum +=", "for (int w = 1; w < kWarps; ++w) sum +=")),
    "the sink of another head": ("sinks", True, ("finish.cuh", "at = head * p.sink_head", "at = 0 * p.sink_head")),
    "V's descale of a page is ignored": (
        "descales of tokens and pages", True, ("softmax.cuh", "slot.v_descale[16 * m + g + i / 2 * 8] * per", "per")),
    "V's descale of another warp": (
        "descales of tokens and pages", True, ("finish.cuh", "* exchange.v_descale[w];", "* exchange.v_descale[0];")),
    "O of another warp": ("plain", True, ("finish.cuh", "w = (set + kWarps - round) % kWarps", "w = set")),
    "K's descale of a token is that of another": (
        "descales of tokens and pages", True,
        ("softmax.cuh", "slot.k_descale[16 * m + g + i / 2 * 8]", "slot.k_descale[16 * m + g]")),
}  # fmt: skip


WIDE = "decode_sm90a_d64_r64"
WIDE_FAULTS = {
    "a tile is said to be there before its V is": (
        "many tiles", False,
        ("convert.cuh",
         "  held.to_panels(tile.v[0], place, held.v);\n  fence_products();\n  arrive(handoff.there[number % 2]);",
         "  arrive(handoff.there[number % 2]);\n  for (int i = 0; i < 99; ++i) __syncwarp();\n"
         "  held.to_panels(tile.v[0], place, held.v);")),
    "a tile is written while it is multiplied": (
        "no mask", True, ("convert.cuh", "  wait(handoff.free[number % 2], (number / 2 + 1) % 2);\n", "")),
    "keys go where those of another warp are": (
        "plain", True, ("convert.cuh", "held.place(row)", "held.place(row & ~16)")),
    "keys of a page that is not the lane's": (
        "pages of 1", True, ("convert.cuh", "__shfl_sync(~0u, page_, to.key(i))", "__shfl_sync(~0u, page_, 0)")),
    "products are used while they run": (
        "plain", True, ("wide.cuh", "  await_products(s);\n", "")),
    "a warpgroup's sums are left out": (
        "plain", True, ("wide.cuh", "round < kGroups;", "round < kGroups - 1;")),
    "a warp has a part in the rows of others": (
        "plain", True, ("wide.cuh", "if (row / 16 != warp % 4) exchange", "if (row / 16 == warp % 4) exchange")),
    "Q is multiplied before all of it is there": (
        "queries", True,
        ("kernel.cu", "decode::fence_products();\n    meet();", "decode::fence_products();")),
    "Q of another row": (
        "queries", True, ("query.cuh", "panel_offset(warp + r * kWarps,", "panel_offset(warp + r / 2 * kWarps,")),
    "a NaN of V reaches rows that do not see it": (
        "a NaN that two queries see", True, ("wide.cuh", "if (edge && has_nan(", "if (false && has_nan(")),
    "V's descale of a page is ignored": (
        "descales of tokens and pages", True, ("wide.cuh", "(i % 2 == 0 ? descale.x : descale.y) * per", "per")),
    "K's descale of a token is that of another": (
        "descales of tokens and pages", True, ("wide.cuh", "s[n][1] *= descale.y", "s[n][1] *= descale.x")),
    "a window ends one key late": ("two-sided window", True, ("units.h", "own + b.right + 1", "own + b.right + 2")),
    "a share is never found": (
        "queries", True, ("convert.cuh", "      if (finds()) ring_.find(p.batch, number_);\n", "")),
}  # fmt: skip


@pytest.mark.parametrize("fault", WIDE_FAULTS)
def test_a_fault_of_warpgroups_is_noticed(fault: str, tmp_path: Path) -> None:
    name, late, edit = WIDE_FAULTS[fault]
    _noticed(WIDE, name, late, edit, tmp_path)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault: str, tmp_path: Path) -> None:
    name, late, edit = FAULTS[fault]
    _noticed(KERNELS[0], name, late, edit, tmp_path)


def _noticed(kernel_id: str, name: str, late: bool, edit: tuple[str, str, str], folder: Path) -> None:
    b, kernel = cases(64)[name], Kernel(kernel_id, folder / "kernel", [edit])
    found = ""
    for ctas in (9, 2):  # units that CTAs share, and warps with more slices than slots
        try:
            found = found or wrong(b, kernel.run(b, ctas=ctas, late=late))
        except AssertionError as error:
            found = str(error)
    assert found


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    return Kernel(WIDE, tmp_path_factory.mktemp("decode"))


@pytest.mark.parametrize("seed", range(4))
def test_no_order_of_warps_changes_a_bit_of_warpgroups(wide: Kernel, seed: int) -> None:
    """Among them sequences without keys, whose shares have no tile."""
    lengths = (0, 0, 1, 0, 0, 0, 0, 700, 0, 0, 65)
    b = batch(lengths, [3] * len(lengths), (16, 2), 64, left=300, seed=6)
    want = wide.run(b, ctas=3)
    assert wrong(b, want) == ""
    got = wide.run(b, ctas=3, seed=seed + 1, late=seed % 2 == 0)
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)


@pytest.mark.parametrize("ctas", [1, 2, 3, 13, 60])
def test_any_number_of_ctas_takes_all_work_of_warpgroups(wide: Kernel, ctas: int) -> None:
    b = batch(LENGTHS, [9, 20, 0, 40, 3], (4, 2), 64, seed=8)
    assert wrong(b, wide.run(b, ctas=ctas)) == ""


@pytest.mark.parametrize(
    ("keys", "sequences", "ctas", "works"),
    [(3000, 8, 33, 32), (3000, 16, 33, 32), (3000, 7, 33, 33), (500, 8, 33, 16), (500, 2, 33, 8)],
)
def test_equal_units_are_whole_or_in_equal_parts(
    small: Kernel, keys: int, sequences: int, ctas: int, works: int
) -> None:
    """With two heads. ``works``: CTAs that have work. Few and short ones are cut into as many parts as they have tiles;
    seven sequences go round in no number of CTAs that leaves one in 16 without work."""
    b = batch((keys,) * sequences, [1] * sequences, (2, 2), 64)
    cuts = small.run(b, ctas=ctas).cuts.tolist()
    starts = [tuple(x[:3]) for x in cuts[:-1]]
    assert len({at for at in starts if at[0] < sequences}) == works
    whole = 2 * sequences % works == 0
    assert all(tile == 0 for _, _, tile in starts) == whole
    if works % (2 * sequences) == 0:
        tiles = -(-keys // small.spec.tile)
        each = works // (2 * sequences)
        assert sorted({tile for s, _, tile in starts if s < sequences}) == [tiles * i // each for i in range(each)]


@pytest.mark.parametrize(
    ("sequences", "queries", "ctas", "step"),
    [(8, 1, 8, 4), (8, 1, 16, 0), (9, 1, 9, 0), (6, 6, 12, 3), (33, 1, 2, 0), (32, 1, 2, 1)],
)
def test_ctas_with_whole_units_take_one_in_every_few_sequences(
    small: Kernel, sequences: int, queries: int, ctas: int, step: int
) -> None:
    """With two heads, and two row tiles where there are six queries. Not with a unit each (0), nor where a sequence's
    units would not begin a round of CTAs, nor for more sequences than a CTA keeps the lengths of, nor with short units.
    A sequence that has other units than the rest ends it."""
    keys = 4 * small.spec.tile + 1
    b = batch((keys,) * sequences, [queries] * sequences, (4, 2), 64)
    result = small.run(b, ctas=ctas)
    assert wrong(b, result) == "" and {x[10] for x in result.cuts.tolist() if x[0] < sequences} == {step}
    if step:
        uneven = batch((keys,) * sequences, [queries] * (sequences - 1) + [queries + 8], (4, 2), 64)
        result = small.run(uneven, ctas=ctas)
        assert wrong(uneven, result) == "" and not result.cuts[:, 10].any()
        short = batch((keys - 1,) * sequences, [queries] * sequences, (4, 2), 64)
        assert not small.run(short, ctas=ctas).cuts[:, 10].any()
