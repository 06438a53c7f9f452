"""The kernel that appends, on the host, from the source that nvcc compiles: bit for bit what torch operations write,
with CTAs and warps in any order, and with planted faults.

Regressions these catch: a token in another slot, head or page; a rounding that the specification does not have; a page
table that is trusted; of two tokens for a slot the first, or a mixture; a descale of V that is found from some of a
page's tokens; bytes that are nobody's and change.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from append_cases import Case, angles, cases, draw, new_cache, spread, table_of
from append_host import Kernel
from compilers import ROOT

from fp8cutlass import PagedKVCache, attention_with_kvcache
from fp8cutlass.cache import kernel as door
from fp8cutlass.native import append as native
from fp8cutlass.native import extension
from fp8cutlass.native.append import Slots, Table
from fp8cutlass.quant.rotate import SIGNS

CASES = cases()


class OnHost:
    """``torch.ops.fp8cutlass_C`` of append."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.options, self.launches = kernel, {}, 0  # type: ignore[var-annotated]

    def append(self, *given: Any) -> None:
        self.launches += self.kernel.run(*given, **self.options)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    return Kernel(tmp_path_factory.mktemp("append"))


@pytest.fixture
def host(built: Kernel, monkeypatch: pytest.MonkeyPatch) -> OnHost:
    return installed(built, monkeypatch)


def installed(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> OnHost:
    made = OnHost(kernel)
    monkeypatch.setattr(torch.ops, "fp8cutlass_C", made, raising=False)
    monkeypatch.setattr(extension, "load", lambda: None)
    monkeypatch.setattr(door, "_there", lambda device: True)
    return made


def launch(case: Case, cache: PagedKVCache) -> torch.Tensor | None:
    done = cache.launch(case.k, case.v, case.at, case.layer, case.given(), case.turn)
    assert done is not None
    return done.used


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_torch_operations(host: OnHost, name: str) -> None:
    case = CASES[name]
    assert case.found(launch) == case.wanted() and host.launches == 1


@pytest.mark.parametrize("name", ["native torch.bfloat16", "pow2 torch.float16", "table pow2", "all in a page"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_order_of_ctas_and_warps_changes_a_byte(host: OnHost, name: str, seed: int) -> None:
    host.options = {"seed": seed}
    assert CASES[name].found(launch) == CASES[name].wanted()


@pytest.mark.parametrize("name", ["native torch.bfloat16", "pow2 torch.bfloat16", "all in a page", "turned 16 True"])
def test_many_slots_take_launches_one_after_the_other(host: OnHost, name: str) -> None:
    host.options = {"chunk": 7}
    assert CASES[name].found(launch) == CASES[name].wanted() and host.launches > 5


def test_lengths_are_those_with_the_new_tokens(host: OnHost) -> None:
    case = CASES["table"]
    assert isinstance(case.at, Table)
    used = launch(case, new_cache(128, pages=20))
    assert used is not None and torch.equal(used, case.at.lengths + case.at.cu.diff())


@pytest.mark.parametrize("v_scale", ["static", "pow2"])
def test_of_tokens_for_a_slot_the_last_is_written(host: OnHost, v_scale: str) -> None:
    """All tokens of a batch of two for a slot, and sequences that share a page."""
    cache = new_cache(64, v_scale=v_scale)
    k, v = draw(64, 2, 64, torch.bfloat16, 1), draw(64, 2, 64, torch.bfloat16, 2)
    case = Case(cache, k, v, Slots(torch.arange(64).flip(0) // 2 * 3))
    assert case.found(launch) == case.wanted()
    shared = Table(torch.tensor([0, 20, 44, 64]).int(), torch.tensor([10, 0, 3]).int(),
                   torch.tensor([[1, 2], [2, 2], [1, 0]]).int())  # fmt: skip
    case = replace(case, at=shared)
    assert case.found(launch) == case.wanted()


def test_a_token_of_no_sequence_and_lengths_that_lie_write_nothing_else(host: OnHost) -> None:
    cache, tokens = new_cache(64, pages=20, v_scale="pow2"), 41
    k, v = draw(tokens, 2, 64, torch.float16, 1), draw(tokens, 2, 64, torch.float16, 2)
    at = table_of(20, 16)
    for lengths in ([2**31 - 1, -(2**31), -9, 60, 10**6], [-1, -30, 63, 64, 79]):
        for shift in (0, 2, -3):
            lying = Table(at.cu + shift, torch.tensor(lengths, dtype=torch.int32), at.page_table)
            case = Case(cache, k[: tokens + min(shift, 0)], v[: tokens + min(shift, 0)], lying)
            assert case.found(launch) == case.wanted()


def test_ends_that_fall_stay_inside(host: OnHost) -> None:
    """What is written then is not promised: only that nothing else is."""
    cache = new_cache(64, pages=20)
    wild = Table(torch.tensor([9, 2**31 - 1, -(2**31), 30, 4, 41]).int(), *_rest(table_of(20, 16)))
    k = draw(41, 2, 64, torch.float16, 1)
    before, own = cache.views(1).k.clone(), set(wild.page_table.flatten().tolist())
    launch(Case(cache, k, k, wild), cache)
    assert torch.equal(cache.views(1).k, before)  # the other layer
    others = [page for page in range(20) if page not in own]
    assert others and torch.equal(cache.views().k[others], new_cache(64, pages=20).views().k[others])


def _rest(table: Table) -> tuple[torch.Tensor, torch.Tensor]:
    return table.lengths, table.page_table


def test_rows_that_lie_badly_and_tables_of_two_dtypes(host: OnHost) -> None:
    case = CASES["turned 64 False"]
    assert case.turn is not None
    wide = torch.zeros(40, 2, 129, dtype=torch.float16)
    wide[..., 1:] = case.k
    cos, sin, interleaved = case.turn
    flat = torch.zeros(cos.numel() + 1)[1:].view(cos.shape).copy_(cos)
    assert flat.data_ptr() % 16
    other = replace(case, k=wide[..., 1:], turn=(flat, sin.double(), interleaved))
    assert other.found(launch) == case.wanted()


def test_descales_of_sequences(host: OnHost) -> None:
    case = CASES["table hnd"]
    descales = torch.rand(2, 5, 3, generator=torch.Generator().manual_seed(1)) + 0.01
    descales[0, 1, 2], descales[1, 0, 0] = 1e-40, torch.inf
    case = replace(case, descales=(descales[0], descales[1]))
    assert case.found(launch) == case.wanted()


def test_the_layouts_of_engines(host: OnHost) -> None:
    """K and V side by side, all layers in a block, and slots of pages of one token."""
    for shape, cut in (((5, 16, 2, 64), lambda x: x), ((5, 4, 16, 2, 64), lambda x: x[:, 2])):
        raw = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
        k, v = draw(30, 2, 32, torch.bfloat16, 1), draw(30, 2, 32, torch.bfloat16, 2)
        cache = PagedKVCache.from_tensor(cut(raw), k_descale=0.013, v_descale=0.02)
        case = Case(cache, k, v, Slots(spread(30, 80)))
        assert case.found(launch) == case.wanted()


def test_calls_take_the_kernel(host: OnHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """``append`` and ``attention_with_kvcache`` by their public doors, against the same calls by torch operations."""
    results = []
    for there in (True, False):
        monkeypatch.setattr(door, "_there", lambda device, there=there: there)
        cache, at = new_cache(64, pages=20, v_scale="pow2", hadamard=True), table_of(20, 16)
        table = at.page_table.clamp(0, 19)
        k, v = (draw(sum((3, 20, 0, 1, 17)), 2, 64, torch.bfloat16, s, strange=False) for s in (1, 2))
        cos, sin = angles(80, 16)
        cache.append(k[:7], v[:7], torch.arange(7) + 9 * 16, positions=torch.arange(7), rotary_cos=cos, rotary_sin=sin)
        q = draw(len(k), 4, 64, torch.bfloat16, 3, strange=False)
        out = attention_with_kvcache(
            q, cache, page_table=table, cache_seqlens=at.lengths * 0, cu_seqlens_q=at.cu, k=k, v=v, rotary_cos=cos,
            rotary_sin=sin, rotary_interleaved=False,
        )  # fmt: skip
        assert host.launches == 2
        results.append((cache.pages, out))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_what_the_kernel_does_not_take_is_left_to_torch_operations(host: OnHost) -> None:
    k = draw(3, 2, 64, torch.bfloat16, 1)
    slot = Slots(torch.arange(3))
    refused = [
        (new_cache(272), draw(3, 2, 272, torch.bfloat16, 1), None),
        (new_cache(64), k, k.half()),
        (new_cache(64), torch.nn.Parameter(k), None),
        (new_cache(64), k[:0], None),
    ]
    for cache, given, other in refused:
        done = cache.launch(
            given, given if other is None else other, slot, 0, (cache.k_descale[0], cache.v_descale[0]), None
        )
        assert done is None
    cache = new_cache(64)
    empty = Table(torch.tensor([0, 3]).int(), torch.tensor([0]).int(), torch.zeros(1, 0, dtype=torch.int32))
    assert cache.launch(k, k, empty, 0, (cache.k_descale[0], cache.v_descale[0]), None) is None
    assert host.launches == 0


def test_the_signs_are_those_of_the_specification() -> None:
    words = "0x" + ", 0x".join(f"{word:08x}" for word in SIGNS)
    text = " ".join((ROOT / "include" / "fp8cutlass" / "append" / "row.cuh").read_text().split())
    assert words in text
    assert f"kMostHeadDim = {native.MOST_HEAD_DIM};" in (ROOT / "include/fp8cutlass/append/params.h").read_text()


# The case that notices it, and the edit.
FAULTS: dict[str, tuple[str, tuple[str, str, str]]] = {
    "the slot past the end is written": (
        "native torch.bfloat16",
        ("place.cuh", "slot >= 0 && slot < int64_t{p.pages}", "slot >= 0 && slot <= int64_t{p.pages}")),
    "the first of two tokens": (
        "native torch.bfloat16", ("append.cuh", "run.token + within > first + i", "run.token + within < first + i")),
    "any of two tokens": ("native torch.bfloat16", ("append.cuh", "memory.lost[i] = 1;", ";")),
    "places are read before they are there": (
        "native torch.bfloat16",
        ("append.cuh", "  __syncthreads();\n  each_run(p, first + 1", "  each_run(p, first + 1")),
    "the head of another": ("native torch.bfloat16", ("append.cuh", "part - p.heads : part", "part - p.heads : 0")),
    "a descale goes astray": (
        "native torch.bfloat16", ("append.cuh", "p.k_token, at.page, at.offset, head", "p.k_token, at.page, 0, head")),
    "an infinity counts": ("native torch.float16", ("row.cuh", "finite(y[j]) ? fabsf(y[j]) : 0.f", "fabsf(y[j])")),
    "an infinity saturates": (
        "native torch.float16", ("row.cuh", "finite(x) ? __fmul_rn(x, inverse) : __uint_as_float(0x7fffffff)",
                                 "__fmul_rn(x, inverse)")),
    "a stage of the rotation is left out": (
        "rotated 128", ("row.cuh", "kColumns * step < columns", "2 * kColumns * step < columns")),
    "a difference has the other sign": ("rotated 64", ("row.cuh", "__fsub_rn(other, y[j])", "__fsub_rn(y[j], other)")),
    "zeros keep their sign": (
        "zeros", ("row.cuh", "__fmul_rn(__fadd_rn(y[j], 0.f), scale)", "__fmul_rn(y[j], scale)")),
    "the mean comes after the rotation": (
        "rotated 64 less a mean", ("append.cuh", "if (p.mean != nullptr) subtract", "if (false) subtract")),
    "the turn is not rounded": ("turned 48 True", ("row.cuh", "  round_to(y, p.type);\n", "")),
    "halves of another": ("turned 48 False", ("row.cuh", "second ? 0 : p.half", "second ? 8 : p.half")),
    "a position past the table": (
        "turned 16 True", ("place.cuh", "int64_t{p.table_rows - 1}", "int64_t{p.table_rows - 2}")),
    "columns that do not turn do": ("turned 16 False", ("append.cuh", "column < 2 * p.half", "p.half > 0")),
    "a descale beyond range": ("descale", ("row.cuh", "fminf(fmaxf(descale, 0x1p-126f), 0x1p126f)", "descale")),
    "a page that begins anew keeps its descale": (
        "pow2 torch.bfloat16", ("append.cuh", "memory.owner[0] >= 0 ? 0.f : memory.old", "memory.old")),
    "older tokens keep their bytes": ("pow2 torch.bfloat16", ("append.cuh", "factor != 1.f", "false")),
    "a NaN loses its sign": ("pow2 torch.bfloat16", ("append.cuh", "nan |= 0xffu << 8 * j", "nan |= 0")),
    "a page is not its first token's": (
        "all in a page", ("append.cuh", "if (memory.first != token)", "if (memory.first != token - 1)")),
    "the maximum of one warp": (
        "pow2 torch.float32",
        ("append.cuh", "atomicMax(&memory.most,", "if (thread < 32) atomicMax(&memory.most,")),
    "448 becomes 512": ("needs", ("append.cuh", "> 0x600000", ">= 0x600000")),
    "a token behind the last sequence": (
        "outside", ("place.cuh", "token < p.cu[s + 1]", "token <= p.cu[s + 1]")),
    "a run is a token short": (
        "table pow2",
        ("place.cuh", "min(stop, base + p.page_size) - at}", "min(stop, base + p.page_size) - at - 1}")),
    "the page past the end": (
        "outside", ("place.cuh", "page >= p.pages) return at;", "page > p.pages) return at;")),
}  # fmt: skip


def extra() -> dict[str, Case]:
    """For faults that the cases of calls do not meet."""
    hnd = CASES["table hnd"]
    low = torch.full((5, 3), 1e-40)
    k, v = (torch.full((2, 2, 64), x, dtype=torch.bfloat16) for x in (1.0, 448.0))
    needs = Case(new_cache(64, v_scale="pow2"), k, v, Slots(torch.tensor([0, 16])))
    signs = torch.tensor([SIGNS[d // 32] >> d % 32 & 1 for d in range(64)]) == 0
    zeros = torch.where(signs, -0.0, 0.0).bfloat16().expand(3, 2, 64).contiguous()  # their sum is -0
    at = table_of(19, 16)
    at.page_table[4, 4], at.page_table[0, 2] = 9, 20
    outside = Table(at.cu - 1, at.lengths, at.page_table)
    k, v = draw(41, 2, 64, torch.float16, 1), draw(41, 2, 64, torch.float16, 2)
    return {
        "descale": replace(hnd, descales=(low, low)),
        "needs": needs,
        "zeros": Case(new_cache(64, hadamard=True), zeros, zeros, Slots(torch.arange(3))),
        "outside": Case(new_cache(64, pages=20), k, v, outside),
    }


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, edit = FAULTS[fault]
    case = (CASES | extra())[name]
    host = installed(Kernel(tmp_path / "kernel", [edit]), monkeypatch)
    noticed = False
    for seed in (0, 1, 2, 3):
        host.options = {"seed": seed}
        try:
            noticed = noticed or case.found(launch) != case.wanted()
        except (AssertionError, RuntimeError):
            noticed = True
    assert noticed


@pytest.mark.parametrize("name", ["descale", "needs", "outside", "zeros"])
def test_cases_of_faults(host: OnHost, name: str) -> None:
    case = extra()[name]
    assert case.found(launch) == case.wanted()
