"""A call on a card up to its launches: here these run the kernels' sources on the host, with the same arguments.

Regressions these catch: an argument in another's place; descales of pages that are taken for those of sequences; a
kernel for too few rows; a mean that the LSE or a sink lacks; a launch for an empty batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import decode_host
import pytest
import torch
from compilers import ROOT
from decode_host import Kernel
from paged_cases import Batch, make, refusals
from test_kvcache import call_of

from fp8cutlass.call import kvcache, kvlaunch
from fp8cutlass.choose.target import Target
from fp8cutlass.manifest import generated_dir, load_manifest
from fp8cutlass.native import extension
from fp8cutlass.native.decode import FAR, work_bytes

LENGTHS, QUERIES = [140, 0, 17, 330, 64], [1, 2, 0, 5, 3]
AT = Target(generated_dir(), "sm90a", 3)


def names(operator: str) -> list[str]:
    """Of the arguments of an operator of the extension, from its schema."""
    text = (ROOT / "csrc" / "binding.cpp").read_text()
    schema = re.search(rf'"{operator}\((.*?)\) -> ', text, re.DOTALL)
    assert schema is not None
    plain = re.sub(r'"\s*"', "", schema[1])
    return [part.split()[-1].split("=")[0] for part in plain.split(",")]


FIELDS = tuple(re.findall(r"^X\(\w+, (\w+),", (ROOT / "csrc" / "decode.def").read_text(), flags=re.MULTILINE))


class OnHost:
    """``torch.ops.fp8cutlass_C`` of decode. ``cuts``: what each piece of memory was cut for; ``made``: launches."""

    looks_only = False

    def __init__(self, kernel: Callable[[str], Kernel]) -> None:
        self.kernel, self.ran = kernel, []  # type: ignore[var-annotated]
        self.cuts: dict[int, dict[str, Any]] = {}
        self.made: list[str] = []
        self.decode = SimpleNamespace(default=SimpleNamespace(_op=self.attend))

    def cut(self, *given: Any) -> None:
        c = dict(zip(names("cut"), given, strict=True))
        c["work"].fill_(255)
        self.cuts[c["work"].data_ptr()] = c | self.numbers(c)
        self.made.append("cut")

    def numbers(self, arguments: dict[str, Any]) -> dict[str, Any]:
        assert arguments["numbers"].dtype == torch.float64
        read = dict(zip(FIELDS, arguments["numbers"].tolist(), strict=True))
        return {name: x if name.endswith(("scale", "softcap")) else int(x) for name, x in read.items()}

    def attend(self, *given: Any) -> torch.Tensor:
        a = dict.fromkeys(names("decode")) | dict(zip(names("decode"), given, strict=False))
        self.given, n = a, self.numbers(a)
        self.numbers_given = n
        assert len(given) <= len(names("decode")) and n["left"] >= 0 and n["right"] >= 0 and n["overhead"] > 0
        q, k = a["q"].flatten(0, -3), a["k"].view(torch.uint8)
        spec = load_manifest(generated_dir()).decodes[n["decode"]]
        assert n["ctas"] == AT.sm_count * spec.ctas_per_sm
        columns = 1 if a["page_table"] is None else a["page_table"].shape[1]
        if a["work"] is None:
            self.made.append("cut")
        else:
            c = self.cuts[a["work"].data_ptr()]
            assert all(n[name] == c[name] for name in ("decode", "ctas", "share", "left", "right"))
            assert (c["total_q"], c["heads"], c["kv_heads"]) == (*q.shape[:2], k.shape[2])
            assert c["most_keys"] == columns * k.shape[1] and a["work"].numel() == work_bytes(spec, n["ctas"])
            for name in ("lengths", "cu_seqlens_q"):
                assert (a[name] is None) == (c[name] is None) and (a[name] is None or torch.equal(a[name], c[name]))
        self.made.append("decode")
        self.ran.append(spec)
        out = torch.empty(a["q"].shape, dtype=q.dtype) if a["out"] is None else a["out"]
        if self.looks_only:
            return out
        shape = (len(a["lengths"]), k.shape[2])
        static = [n[x] if a[x] is None else a[x].expand(shape) for x in ("k_descale", "v_descale")]
        sinks = a["sinks"]
        b = decode_host.Batch(
            q, k, a["v"].view(torch.uint8), a["page_table"], a["lengths"], a["cu_seqlens_q"], *static,
            a["k_token_descale"], a["v_page_descale"], sinks if sinks is None or sinks.dim() == 1 else None, n["left"],
            n["right"], n["softcap"], n["scale"], bool(n["routed"]),
        )  # fmt: skip
        assert sinks is b.sinks
        result = self.kernel(spec.id).run(b, ctas=n["ctas"], whole=not n["share"], overhead=n["overhead"])
        # What the kernel does not write is NaN there: rows of sequences that are another's.
        written = ~result.out.isnan().all(-1).all(-1) if n["routed"] else slice(None)
        out.view(result.out.shape)[written] = result.out[written]
        if a["lse"] is not None:
            a["lse"][:, written] = result.lse[:, written]
        return out


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Kernel]:
    folder = tmp_path_factory.mktemp("decode")
    return cache(lambda name: Kernel(name, folder / name))


@pytest.fixture
def host(kernel: Callable[[str], Kernel], monkeypatch: pytest.MonkeyPatch) -> OnHost:
    made = OnHost(kernel)
    monkeypatch.setattr(torch.ops, "fp8cutlass_C", made, raising=False)
    monkeypatch.setattr(extension, "load", lambda: None)
    monkeypatch.setattr(extension, "decode_fields", lambda: FIELDS)
    return made


def judge(batch: Batch, **changes: Any) -> None:
    """The outputs of the card's way by the gates of the CPU's."""
    options: dict[str, Any] = {"window_size": (changes.get("left", -1), changes.get("right", 0)), "causal": False}
    options |= {name: changes[name] for name in ("softcap", "sinks") if name in changes}
    out, lse = kvcache.on_card(call_of(batch, **changes), AT)
    assert refusals(out, lse, batch.references(**options), batch.rows) == []


@pytest.mark.parametrize("arguments", [{}, {"v_scale": "pow2", "page_size": 16}, {"format": "nhd"}], ids=str)
def test_outputs(host: OnHost, arguments: dict[str, Any]) -> None:
    batch = make(LENGTHS, QUERIES, (4, 2), 64, **arguments)
    judge(batch)
    judge(batch, splits=1)
    judge(batch, left=50, softcap=3.0, sinks=torch.tensor([-1.0, 0.5, 2.0, 4.0]))
    judge(batch, right=-1)
    out, lse = kvcache.on_card(call_of(batch, return_lse=False), AT)
    assert lse.shape == (0,) and out.any()
    assert {spec.id for spec in host.ran} == {"decode_sm90a_d64_r8"}


def test_a_tensor_that_lies_badly(host: OnHost) -> None:
    batch = make(LENGTHS, QUERIES, (4, 2), 64)
    room = torch.zeros(len(batch.q), 4, 65).half()
    room[..., 1:] = batch.q
    batch.q = room[..., 1:]
    judge(batch)
    flat = torch.zeros(batch.q.numel() + 1).half()[1:].view(batch.q.shape)
    batch.q = flat.copy_(batch.q)
    assert batch.q.data_ptr() % 8
    judge(batch)


def test_a_mean_reaches_the_lse_and_the_sinks(host: OnHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gets a sink for each row; the host's harness takes one a head, so the sinks are looked at here."""
    mean = 2 * torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    batch = make(LENGTHS, QUERIES, (4, 2), 64, k_mean=mean, hadamard=True, dtype=torch.bfloat16)
    changes: dict[str, Any] = {"mean": mean, "hadamard": True}
    (out, lse), (wanted, log_sum) = (
        kvcache.on_card(call_of(batch, **changes), AT),
        kvcache.run(call_of(batch, **changes)),
    )
    seen = ~log_sum.isinf()
    assert (lse - log_sum)[seen].abs().max() < 2e-3 and (out.float() - wanted.float()).norm() < 0.004 * wanted.norm()
    taken: dict[str, Any] = {}
    monkeypatch.setattr(kvcache, "launch", lambda *args, **rest: taken.update(sinks=args[8]) or (args[1], None))
    sinks = torch.tensor([-1.0, 0.5, 2.0, 4.0])
    kvcache.on_card(call_of(batch, sinks=sinks, return_lse=False, **changes), AT)
    shift = (batch.q.float() * mean.repeat_interleave(2, 0)).sum(-1) / 8
    assert torch.allclose(taken["sinks"], sinks[:, None] - shift.t(), atol=1e-5) and taken["sinks"].is_contiguous()


@pytest.mark.parametrize(
    ("tokens", "sequences", "group", "most", "rows"),
    [
        (4, 4, 4, None, 4),
        (4, 4, 8, 1, 8),
        (9, 4, 4, None, 12),
        (9, 4, 4, 6, 24),
        (64, 1, 4, None, 256),
        (3, 5, 4, 9, 12),
    ],
)
def test_rows_of_a_unit(tokens: int, sequences: int, group: int, most: int | None, rows: int) -> None:
    assert kvlaunch.rows_of(tokens, sequences, group, most) == rows


def test_the_kernel_is_of_the_rows(host: OnHost) -> None:
    batch = make([140, 64], [6, 1], (8, 2), 64)
    host.looks_only = True
    for most, wanted in ((None, 16), (6, 64), (1, 8)):
        kvcache.on_card(call_of(batch, most_q=most), AT)
        assert host.ran[-1].rows == wanted


@pytest.mark.parametrize(
    ("sequences", "queries", "rows"), [(200, 6, 64), (66, 6, 64), (65, 6, 16), (1, 6, 16), (1, 9, 64), (1, 4, 16)]
)
def test_half_empty_units_are_for_many_sequences(sequences: int, queries: int, rows: int) -> None:
    """With 8 heads on 2 and 132 SMs: 24 of 64 rows, where 16 rows twice keep more SMs busy."""
    kernel, _ = kvlaunch.kernel_of(replace(AT, sm_count=132), 64, 8, 2, sequences * queries, sequences, queries)
    assert kernel.rows == rows


def test_reasons_why_no_kernel_serves() -> None:
    assert kvlaunch.unserved("cpu", None, 80) == ()
    assert kvlaunch.unserved("meta", None, 64) == ("attention_with_kvcache has no kernel for meta",)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvlaunch, "target", lambda device: AT)
        assert kvlaunch.unserved("cuda", 0, 64) == ()
        assert "head_dim 64, 96, 128, 192, 256, got 80" in kvlaunch.unserved("cuda", 0, 80)[0]


def test_ends_of_windows(host: OnHost) -> None:
    batch = make([140, 64], [1, 1], (8, 2), 64)
    kvcache.on_card(call_of(batch, left=-1, right=2**31), AT)
    assert (host.numbers_given["left"], host.numbers_given["right"]) == (FAR, FAR)
