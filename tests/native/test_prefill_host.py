"""The kernels that choose sequences with many queries and copy their keys, on the host, against the specification.

Regressions these catch: a sequence that two kernels have, or none; keys of another sequence, page, head or token; a
descale of another page; a page too many; bytes behind a sequence's end that reach a block; V in another order; a NaN
of V that is left to a kernel which spreads it; keys that a window shows but that are not copied; a barrier that is
missing.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_cases import Batch, make
from prefill_host import BLOCK, Kernels, Made
from test_kvcache import call_of

from fp8cutlass.call.kvcache import KVCall, gathered
from fp8cutlass.call.kvprefill import Copied, members, operands
from fp8cutlass.quant.v_layout import pack_v

FAR = 1 << 30
E4M3 = torch.float8_e4m3fn
HEADS, SIZE = (4, 2), 64


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("prefill")
    return cache(lambda head_dim: Kernels(head_dim, folder / str(head_dim)))


def arguments(call: KVCall, *, least: int = 30, most: int = 9, capacity: int = 4096) -> dict[str, Any]:
    """Of the operator, for a call."""
    inline = call.inline
    static = (None, None) if inline else (call.k_descale, call.v_descale)
    return {
        "q": call.q, "k": call.k, "v": call.v, "k_token_descale": call.k_descale if inline else None,
        "v_page_descale": call.v_descale if inline else None, "k_descale": static[0], "v_descale": static[1],
        "k_value": 1.0, "v_value": 1.0, "page_table": call.page_table, "lengths": call.used, "cu_seqlens_q": call.cu_q,
        "rest": torch.full_like(call.used, -99), "left": FAR if call.left < 0 else call.left,
        "right": FAR if call.right < 0 else call.right, "least": least, "most": min(most, len(call.used)),
        "capacity": capacity,
    }  # fmt: skip


def copied(call: KVCall, s: int, first: int = 0) -> Copied:
    keys = gathered(call, s, call.page_table[s], int(call.used[s]))  # type: ignore[index]
    return operands(keys.k.to(E4M3), keys.v.to(E4M3), keys.k_descale, keys.v_descale, first)


def first_seen(call: KVCall, s: int) -> int:
    rows = int(call.cu_q[s + 1] - call.cu_q[s])
    return 0 if call.left < 0 else max(0, int(call.used[s]) - rows - call.left)


def wrong(call: KVCall, a: dict[str, Any], made: Made) -> list[str]:
    """Everything in which what was made is not what the specification makes."""
    lengths, ends = (
        a["lengths"].clamp(0, a["page_table"].shape[1] * a["k"].shape[1]).tolist(),
        a["cu_seqlens_q"].tolist(),
    )
    chosen = members(lengths, ends, a["least"], a["most"], a["capacity"])
    tables = {name: x.tolist() for name, x in made.tables.items()}
    found = [] if tables["count"] == [len(chosen)] else [f"{tables['count']} members, wanted {chosen}"]
    if tables["sequence"] != chosen + [-1] * (a["most"] - len(chosen)):
        return [*found, f"members {tables['sequence']}, wanted {chosen}"]
    keys, rest = 0, list(lengths)
    for i, s in enumerate(chosen):
        of, rows, begin = copied(call, s, first_seen(call, s)), ends[s + 1] - ends[s], (keys // BLOCK + i) * BLOCK
        rest[s] = lengths[s] if of.refused else -1
        table = (tables["cu_q"][i], tables["used_q"][i], tables["cu_k"][i], tables["first"][i])
        if table != (ends[s], 0 if of.refused else rows, keys, first_seen(call, s)):
            found.append(f"tables of member {i}: {table}")
        whole = -(-lengths[s] // BLOCK) * BLOCK
        skipped = first_seen(call, s) // BLOCK
        pieces = {"k": (made.k[:, begin : begin + whole], of.k), "v": (made.v[:, :, begin : begin + whole], of.v)}
        for name, (got, wanted) in pieces.items():
            full = torch.zeros(wanted.shape[0], whole, wanted.shape[2], dtype=torch.uint8)
            full[:, : lengths[s]] = wanted.view(torch.uint8)
            full = torch.where((full & 0x7F) == 0x7F, 0x7F, full)  # any NaN is one
            got = torch.where((got & 0x7F) == 0x7F, 0x7F, got)
            got = got if name == "k" else got.transpose(1, 2)
            full = full if name == "k" else pack_v(full[None])[0].transpose(1, 2)
            if not torch.equal(got[:, skipped * BLOCK :], full[:, skipped * BLOCK :]):
                found.append(f"{name} of member {i}")
            scales = (made.k_scales if name == "k" else made.v_scales)[:, begin // BLOCK :][:, : whole // BLOCK]
            descale = of.k_descale if name == "k" else of.v_descale
            if not torch.equal(scales[:, skipped:].nan_to_num(7.0), descale[:, skipped:].nan_to_num(7.0)):
                found.append(f"descales of {name} of member {i}")
        keys += lengths[s]
    if a["rest"].tolist() != rest:
        found.append(f"lengths of the others are {a['rest'].tolist()}, wanted {rest}")
    behind = tables["cu_q"][len(chosen) :] + tables["cu_k"][len(chosen) :] + tables["used_q"][len(chosen) :]
    none = a["most"] - len(chosen)
    if behind != [a["q"].shape[0]] * (none + 1) + [keys] * (none + 1) + [0] * none:
        found.append(f"what lies behind the members: {behind}")
    return found


def batch_of(head_dim: int, **rest: Any) -> Batch:
    return make([300, 7, 129, 0, 640, 40], [40, 1, 30, 50, 31, 29], HEADS, head_dim, **rest)


CASES: dict[str, dict[str, Any]] = {
    "native": {},
    "native, V grows": {"v_scale": "pow2", "page_size": 16},
    "nhd": {"format": "nhd", "page_size": 32},
    "hnd, pages of 48": {"format": "hnd", "page_size": 48},
    "pages of one token": {"format": "nhd", "page_size": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_copied_is_what_the_specification_copies(kernels: Any, case: str) -> None:
    call = call_of(batch_of(SIZE, **CASES[case]))
    for left, seed in ((-1, 1), (100, 2), (0, 3)):
        of = call if left < 0 else call_of(batch_of(SIZE, **CASES[case]), left=left)
        a = arguments(of)
        assert wrong(of, a, kernels(SIZE).run(a, seed=seed)) == [], left


@pytest.mark.parametrize("head_dim", [96, 128, 192, 256])
def test_other_head_dims(kernels: Any, head_dim: int) -> None:
    call = call_of(batch_of(head_dim, v_scale="pow2"))
    a = arguments(call)
    assert wrong(call, a, kernels(head_dim).run(a, seed=head_dim)) == []


def test_who_is_chosen(kernels: Any) -> None:
    """Those with queries and keys enough, as long as there is room; none where ends fall."""
    call = call_of(batch_of(SIZE))
    counts = []
    for limits in (
        {},
        {"most": 2},
        {"capacity": 430},
        {"capacity": 428},
        {"capacity": 20},
        {"least": 32},
        {"least": 99},
    ):
        a = arguments(call, **limits)
        made = kernels(SIZE).run(a)
        assert wrong(call, a, made) == [], limits
        counts.append(made.count)
    assert counts == [3, 2, 2, 1, 0, 1, 0]
    a = arguments(call)
    a["cu_seqlens_q"] = torch.tensor([0, 60, 40, 80, 120, 150, 181], dtype=torch.int32)
    assert wrong(call, a, kernels(SIZE).run(a)) == []
    assert int(a["rest"].min()) == 0


def test_numbers_that_lie(kernels: Any) -> None:
    """Lengths beyond the table and below 0, pages out of range: nothing outside the tensors is read or written."""
    call = call_of(batch_of(SIZE))
    for wild in (2**31 - 1, -(2**31)):
        a = arguments(call)
        a["lengths"] = a["lengths"].clone()
        a["lengths"][2], a["page_table"] = wild, torch.full_like(a["page_table"], wild)
        made = kernels(SIZE).run(a)
        assert made.count == (3 if wild > 0 else 2) and a["rest"].tolist()[3] == 0


def test_more_sequences_than_threads(kernels: Any) -> None:
    n = 1100
    rows, keys = [30 if s % 7 == 0 else 1 for s in range(n)], [1 + s % 5 for s in range(n)]
    call = call_of(make(keys, rows, HEADS, SIZE, page_size=16))
    a = arguments(call, most=200)
    assert wrong(call, a, kernels(SIZE).run(a)) == []


@pytest.mark.parametrize("case", ["native", "nhd"])
def test_a_nan_of_v_is_left_to_those_who_know_who_sees_it(kernels: Any, case: str) -> None:
    """One in K is not; nor one in V that a window hides."""
    for s, token, which, left in ((4, 500, "v", -1), (4, 500, "k", -1), (0, 0, "v", -1), (4, 3, "v", 100)):
        batch = batch_of(SIZE, **CASES[case])
        call = call_of(batch, left=left)
        page, within = divmod(token, batch.cache.page_size)
        getattr(call, which)[batch.table[s, page], within, 1, 9] = 0x7F
        a = arguments(call)
        assert wrong(call, a, kernels(SIZE).run(a)) == []
        assert (a["rest"][s] == batch.keys[s]) == (which == "v" and left < 0)


def test_descales_that_are_no_numbers(kernels: Any) -> None:
    batch = batch_of(SIZE, v_scale="pow2", page_size=16)
    call = call_of(batch)
    call.k_descale[batch.table[0, 2], 5, 1] = torch.inf  # its key becomes NaN
    call.k_descale[batch.table[4, 0]] = 0.0
    call.v_descale[batch.table[2, 1], 0] = torch.nan
    a = arguments(call)
    assert wrong(call, a, kernels(SIZE).run(a)) == []
    assert a["rest"].tolist()[2] == 129 and a["rest"].tolist()[0] == -1


def test_without_a_table_and_ends_and_tensors_of_descales(kernels: Any) -> None:
    """Page s is all of sequence s, all have as many queries, and numbers are limited as in decode."""
    batch = make([300, 40, 129], [40, 40, 40], HEADS, SIZE, format="nhd", page_size=304, spare=0)
    order = batch.table[:, 0].long()
    call = call_of(batch)
    a = arguments(call) | {"k": call.k[order], "v": call.v[order], "page_table": None, "cu_seqlens_q": None}
    made = kernels(SIZE).run(a)
    assert wrong(call, a | {"page_table": call.page_table, "cu_seqlens_q": call.cu_q}, made) == []
    for value, limited in ((0.3, 0.3), (1e-45, 2.0**-126), (3e38, 2.0**126)):
        made = kernels(SIZE).run(a | {"k_descale": None, "v_descale": None, "k_value": value, "v_value": 1.0})
        assert torch.equal(made.k_scales[:, :3], torch.full((2, 3), limited))
    made = kernels(SIZE).run(a | {"k_descale": torch.full((1,), torch.nan)})
    assert torch.equal(made.k_scales[:, :3], torch.full((2, 3), 2.0**-126))


MUTANTS = {
    "a page too many": ("gather", "table[min(entry, ", "table[min(entry + 1, "),
    "a descale of another page": ("gather", "steps(page, token_descale.page)", "steps(0, token_descale.page)"),
    "a descale of another head": ("gather", "source.head * head_descale.head]", "0]"),
    "keys behind the end": ("gather", "if (key >= source.keys) continue;", "if (key >= source.keys + 1) continue;"),
    "a block of another member": ("gather", "block_at(key, i, kBlock)) *", "block_at(key, 0, kBlock)) *"),
    "bytes are kept": ("gather", "if (factor == 1.f) continue;", "continue;"),
    "a NaN of V stays": ("gather", "if (nan != 0) p.lengths", "if (false) p.lengths"),
    "a window's first block is skipped": ("gather", "begin + kBlock > m.first[i]", "begin > m.first[i]"),
    "no barrier before columns": ("gather", "(stage, x);\n      __syncthreads();", "(stage, x);"),
    "no barrier after columns": ("gather", "      __syncthreads();  // before the next block's rows\n", ""),
    "a query too few": ("route", "of.queries >= p.least", "of.queries >= p.least - 1"),
    "more keys than there is room": ("route", "begin + of.keys <= p.capacity", "begin <= p.capacity"),
    "both have a sequence": ("route", "fits ? -1 : of.keys", "of.keys"),
    "ends may fall": ("route", "const bool rises = taken[2] == 0;", "const bool rises = true;"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_noticed(name: str, tmp_path: Path) -> None:
    file, old, new = MUTANTS[name]
    broken = Kernels(SIZE, tmp_path, [(f"prefill/{file}.cuh", old, new)])
    with pytest.raises(AssertionError):
        test_who_is_chosen(lambda _: broken)
        for case in ("native, V grows", "nhd"):
            test_what_is_copied_is_what_the_specification_copies(lambda _: broken, case)
        test_a_nan_of_v_is_left_to_those_who_know_who_sees_it(lambda _: broken, "native")
