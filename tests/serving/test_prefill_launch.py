"""A call with long chunks on a card, up to its launches: here these run the kernels' sources on the host, but for
attention over the copied keys, which the emulator does.

Regressions these catch: rows that two kernels write, or none; keys that are copied for one call and read for another; a
mean, a sign or a rotation that one of the kernels does not see; a call that is routed where no kernel serves it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from decode_host import Kernel
from paged_cases import Batch, make
from prefill_host import BLOCK, Kernels
from test_kvcache import call_of
from test_kvcache_launch import AT, FIELDS, OnHost, names

from fp8cutlass.call import kvcache, kvprefill
from fp8cutlass.call.kvprefill import Chunks, Copied, emulate_chunk, members, operands, prefill_for
from fp8cutlass.call.launch import score_amax
from fp8cutlass.choose.target import Target
from fp8cutlass.manifest import generated_dir, load_manifest
from fp8cutlass.native import extension
from fp8cutlass.native.decode import FAR
from fp8cutlass.quant.v_layout import unpack_v

E4M3 = torch.float8_e4m3fn
KEYS, ROWS = [300, 140, 0, 17, 520, 64], [160, 1, 2, 0, 130, 3]  # the first and the fifth are long chunks
# Relative L2 against float64: Q and P are rounded to e4m3, and K where its descales differ (numerics.md).
LIMIT = 0.05


class Both(OnHost):
    """``torch.ops.fp8cutlass_C`` of decode and of long chunks."""

    def __init__(self, decode: Callable[[str], Kernel], kernels: Callable[[int], Kernels]) -> None:
        super().__init__(decode)
        self.kernels, self.taken = kernels, []  # type: ignore[var-annotated]

    def prefill(self, *given: Any) -> None:
        a = dict(zip(names("prefill"), given, strict=True))
        n = self.numbers(a)
        a |= {name: n[name] for name in ("left", "right", "scale")}
        a |= {"k_value": n["k_descale"], "v_value": n["v_descale"]}
        self.made.append("prefill")
        variant = load_manifest(generated_dir()).variants[a["variant"]]
        assert a["score_amax"] == score_amax(variant) and a["left"] >= 0 and a["right"] >= 0
        made = self.kernels(variant.head_dim).run(a)
        tables = {name: x.tolist() for name, x in made.tables.items()}
        self.taken.append([])
        for i in range(made.count):
            rows, keys = tables["used_q"][i], tables["cu_k"][i + 1] - tables["cu_k"][i]
            if not rows:
                continue
            self.taken[-1].append(tables["sequence"][i])
            begin, of = (tables["cu_k"][i] // BLOCK + i) * BLOCK, slice(tables["cu_q"][i], tables["cu_q"][i] + rows)
            v = unpack_v(made.v[None], made.v.shape[2])[0][:, begin : begin + keys]
            blocks = slice(begin // BLOCK, begin // BLOCK + -(-keys // BLOCK))
            copied = Copied(
                made.k[:, begin : begin + keys].view(E4M3), v.view(E4M3), made.k_scales[:, blocks],
                made.v_scales[:, blocks],
            )  # fmt: skip
            left, right = (-1 if end >= FAR else end for end in (a["left"], a["right"]))
            out, lse = emulate_chunk(a["q"][of], copied, variant, scale=a["scale"], left=left, right=right)
            a["out"][of] = out
            if a["lse"] is not None:
                a["lse"][:, of] = lse


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp("both")
    return cache(lambda name: Kernel(name, folder / name)), cache(lambda d: Kernels(d, folder / str(d)))


@pytest.fixture
def host(built: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> Both:
    made = Both(*built)
    monkeypatch.setattr(torch.ops, "fp8cutlass_C", made, raising=False)
    monkeypatch.setattr(extension, "load", lambda: None)
    monkeypatch.setattr(extension, "decode_fields", lambda: FIELDS)
    return made


def far(out: torch.Tensor, lse: torch.Tensor, batch: Batch, references: Any) -> list[float]:
    """Relative L2 of each sequence that has rows and keys, against float64."""
    found, begin = [], 0
    for reference, count in zip(references, batch.rows, strict=True):
        one, log_sum = out[begin : begin + count].transpose(0, 1)[None].double(), lse[None, :, begin : begin + count]
        begin += count
        dead = reference.lse.isneginf()
        assert torch.equal(log_sum.isneginf(), dead) and bool((one[dead] == 0).all())
        found.append(float((one - reference.out).norm() / reference.out.norm().clamp_min(1e-9)) if count else 0.0)
        off = (log_sum - reference.lse)[~dead].abs()
        assert not off.numel() or off.max() < 0.05
    return found


CASES: list[tuple[dict[str, Any], tuple[int, int]]] = [
    ({}, (-1, 0)),
    ({"v_scale": "pow2", "page_size": 16}, (150, 3)),
    ({"format": "nhd"}, (-1, -1)),
    ({"format": "hnd", "page_size": 48}, (-1, 0)),
]


@pytest.mark.parametrize(("arguments", "window"), CASES, ids=str)
def test_outputs(host: Both, arguments: dict[str, Any], window: tuple[int, int]) -> None:
    """Long chunks by e4m3, all others as before, in one call."""
    batch = make(KEYS, ROWS, (4, 2), 64, **arguments)
    call = call_of(batch, left=window[0], right=window[1])
    out, lse = kvcache.on_card(call, AT)
    assert host.taken == [[0, 4]] and host.numbers_given["routed"]
    errors = far(out, lse, batch, batch.references(window_size=window, causal=False))
    assert all(error <= (LIMIT if s in (0, 4) else 6e-4) for s, error in enumerate(errors)), errors
    assert errors[0] > 2e-3 and errors[4] > 2e-3  # what only e4m3 does
    plain, _ = kvcache.on_card(replace(call, splits=1), AT)
    assert len(host.taken) == 1 and not host.numbers_given["routed"]
    assert torch.equal(plain[161:163], out[161:163])  # of no key


def test_a_mean_a_rotation_and_a_sign(host: Both) -> None:
    mean = 0.3 * torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    batch = make(KEYS, ROWS, (4, 2), 64, k_mean=mean, hadamard=True, dtype=torch.bfloat16)
    changes: dict[str, Any] = {"mean": mean, "hadamard": True, "scale": -0.125}
    call = call_of(batch, **changes)
    (out, lse), (wanted, log_sum) = kvcache.on_card(call, AT), kvcache.run(call)
    assert host.taken == [[0, 4]]
    seen = ~log_sum.isinf()
    assert (lse - log_sum)[seen].abs().max() < 0.05 and (out.float() - wanted.float()).norm() < LIMIT * wanted.norm()


def test_a_nan_of_v_reaches_its_column_of_the_rows_that_see_it(host: Both) -> None:
    batch = make(KEYS, ROWS, (4, 2), 64)
    call = call_of(batch)
    page, token = divmod(250, batch.cache.page_size)
    call.v[batch.table[0, page], token, 1, 9] = 0x7F
    out, _ = kvcache.on_card(call, AT)
    assert host.taken == [[4]]
    broken = out.isnan()
    first = 250 - (KEYS[0] - ROWS[0])  # the row that stands at the key
    wanted = torch.zeros_like(broken)
    wanted[first : ROWS[0], 2:, 9] = True
    assert torch.equal(broken, wanted)


def test_which_calls_are_routed() -> None:
    given = Chunks(4096, 8, None, 2048, 8, 128, "bf16", -1, 0, False, False, 0)
    part, why = prefill_for(AT, given)
    assert part is not None and not why and (part.most, part.capacity) == (8, 8 * 2048)
    assert part.kernel.softmax == "exp2" and part.kernel.mask == "causal" and part.kernel.key_block == BLOCK
    assert load_manifest(AT.directory).variants[part.number] is part.kernel
    few = prefill_for(AT, replace(given, tokens=300))[0]
    assert few is not None and few.most == 300 // kvprefill.LEAST
    large = prefill_for(AT, replace(given, most_keys=1 << 24))[0]
    assert large is not None and 2 * 8 * 128 * large.capacity == kvprefill.MOST_BYTES
    for changes, word in (
        ({"tokens": 127}, "no sequence has 128"), ({"most_q": 127}, "no sequence has 128"),
        ({"softcap": True}, "softcap"), ({"sinks": True}, "sinks"), ({"splits": 1}, "num_splits=1"),
        ({"head_dim": 80}, "head_dim 80"),
    ):  # fmt: skip
        part, why = prefill_for(AT, replace(given, **changes))
        assert part is None and word in why
    ada = Target(generated_dir(), "sm89", 3)
    part, why = prefill_for(ada, given)
    assert part is not None and not why and part.kernel.family == "sm89"
    assert "sm89 has no kernel for ragged batches of head_dim 192" in prefill_for(ada, replace(given, head_dim=192))[1]


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("mask", [(-1, 0), (-1, -1), (40, 0)])
@pytest.mark.parametrize("out", ["bf16", "fp16"])
def test_every_class_has_a_kernel(head_dim: int, mask: tuple[int, int], out: str) -> None:
    chunks = Chunks(4096, 8, None, 2048, 8, head_dim, out, *mask, False, False, 0)
    assert prefill_for(AT, chunks)[0] is not None


def test_members() -> None:
    lengths, ends = [300, 0, 50, 700, 20], [0, 200, 400, 401, 700, 900]
    assert members(lengths, ends, 128, 9, 5000) == [0, 3, 4]
    assert members(lengths, ends, 128, 2, 5000) == [0, 3]
    assert members(lengths, ends, 128, 9, 999) == [0]
    assert members(lengths, [0, 200, 100, 401, 700, 900], 128, 9, 5000) == []


def test_descales_that_are_powers_of_two_lose_nothing() -> None:
    """But the smallest numbers; and those that all keys share keep every byte."""
    random = torch.Generator().manual_seed(2)
    x = torch.randn(2, 300, 64, generator=random).to(E4M3)
    powers = torch.exp2(torch.randint(-3, 1, (2, 300), generator=random).float())
    of = operands(x, x, powers, torch.full((2, 1), 0.3))
    real = of.k.float() * of.k_descale.repeat_interleave(BLOCK, 1)[:, :300, None]
    normal = x.float().abs() >= 2.0**-3
    assert torch.equal(real[normal], (x.float() * powers[..., None])[normal])
    assert torch.equal(of.v.view(torch.uint8), x.view(torch.uint8)) and torch.equal(
        of.v_descale, torch.full((2, 3), 0.3)
    )
    exact = operands(x, x, torch.full((2, 300), 0.7), torch.ones(2, 1))
    assert torch.equal(exact.k.view(torch.uint8), x.view(torch.uint8))
