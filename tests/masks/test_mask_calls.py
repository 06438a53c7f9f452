"""Calls with masks on a card, from their arguments to the operators, which the emulator stands in for; kernels for
lists of tiles on the CPU; and what has no kernel.

Regressions these catch: a mask that does not come to the operator, or not as it lies in memory there; a kernel of no
mask that is chosen for one; a refusal that does not say why.
"""

from __future__ import annotations

from typing import Any

import pytest
import stand_in
import torch

from fp8cutlass import BlockMask, UnsupportedError, attention, explain, pack_kv, quantize
from fp8cutlass.call import memo
from fp8cutlass.choose.dispatch import decide
from fp8cutlass.choose.problem import Problem
from fp8cutlass.errors import NoKernelError
from fp8cutlass.manifest import generated_dir, load_manifest

B, H, ROWS, KEYS, D = 2, 4, 150, 300, 64
LISTED = [v for v in load_manifest(generated_dir()).variants if v.kind == "blocks"]
FAST = next(v.id for v in LISTED if (v.head_dim, v.out, v.softmax) == (D, "bf16", "linear"))
SLOW = next(v.id for v in LISTED if (v.head_dim, v.out, v.softmax) == (D, "bf16", "exp2"))


def draw() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    sizes = (B, H, ROWS, D), (B, 2, KEYS, D), (B, 2, KEYS, D)
    return [torch.randn(*size, generator=generator).bfloat16() for size in sizes]


def masks() -> dict[str, Any]:
    seen = torch.rand(B, 1, ROWS, KEYS, generator=torch.Generator().manual_seed(1)) < 0.4
    seen[..., :128] = False
    return {
        "a tensor": seen,
        "one row": seen[:, :, :1],
        "one key": seen[0, 0, :, 200:201],
        "transposed": seen.mT.contiguous().mT,
        "packed": BlockMask.from_dense(seen),
        "an expanded view": BlockMask.from_dense(seen.expand(B, H, ROWS, KEYS)),
        "without bits": BlockMask.blocks(torch.ones(2, 3, dtype=torch.bool).triu(), ROWS, KEYS),
    }


@pytest.mark.parametrize("name", masks())
def test_a_call_on_a_card(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From bf16, FP8 and packed keys: the operator gets what the emulator is given otherwise."""
    tensors, mask = draw(), masks()[name]
    half: dict[str, Any] = {"enable_gqa": True, "kernel": FAST, "return_lse": True}
    fp8, descales = zip(*(quantize(x, granularity="head") for x in tensors), strict=True)
    named = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True)) | {"scaling": "head"}
    kept = pack_kv(*tensors[1:], key_block=128)
    calls = [
        (tensors, half),
        (tensors, half | {"sinks": torch.linspace(-1, 2, H)}),
        (list(fp8), named | half | {"kernel": SLOW}),
        ([tensors[0], kept, None], half),
    ]
    wanted = [attention(*x, mask, **options) for x, options in calls]
    memo.forget()
    asked = stand_in.card(monkeypatch)
    for _ in range(2):  # the second time the call is known, but for packed keys
        got = [attention(*x, mask, **options) for x, options in calls]
        for mine, other in zip(got, wanted, strict=True):
            assert all(map(torch.equal, mine, other))
        assert len(memo._known) == 3
    assert asked == ["attend", "attend", "attend_fp8", "attend_packed"] * 2
    memo.forget()


def test_a_known_call_reads_the_mask_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of other numbers is another mask; one of another form is another call."""
    tensors, seen = draw(), masks()["a tensor"]
    how: dict[str, Any] = {"enable_gqa": True, "kernel": FAST}
    forms = [
        seen,
        ~seen,
        seen[:1],
        BlockMask.from_dense(seen),
        BlockMask.from_dense(~seen),
        BlockMask.from_dense(seen[:1]),
    ]
    wanted = [attention(*tensors, mask, **how) for mask in forms]
    memo.forget()
    stand_in.card(monkeypatch)
    for _ in range(2):
        assert all(map(torch.equal, (attention(*tensors, mask, **how) for mask in forms), wanted))
    assert len(memo._known) == 4
    memo.forget()


def problem(**changes: Any) -> Problem:
    axes: dict[str, Any] = {"arch": "sm90a", "head_dim": D, "seqlen_q": 512, "seqlen_k": 512, "batch": 1, "heads": 16}
    axes |= {"dtype": "e4m3", "out": "bf16", "scaling": "block", "causal": False, "precision": "fast", "listed": True}
    return Problem(**axes | changes)


@pytest.mark.parametrize(
    ("asked", "head_dim", "softmax"),
    [
        ({}, 64, "linear"),
        ({"head_dim": 33}, 64, "linear"),
        ({"head_dim": 96}, 128, "linear"),
        ({"head_dim": 128, "precision": "balanced"}, 128, "exp2"),
        ({"head_dim": 128, "precision": "accurate", "out": "fp16"}, 128, "exp2"),
        ({"scaling": "tensor", "quantised": True}, 64, "linear"),
    ],
)
def test_which_kernel_serves(asked: dict[str, Any], head_dim: int, softmax: str) -> None:
    v = decide(generated_dir(), problem(**asked))[0]
    assert (v.kind, v.mask, v.head_dim, v.softmax) == ("blocks", "blocks", head_dim, softmax)


@pytest.mark.parametrize(
    "asked",
    [
        {"head_dim": 192}, {"arch": "sm89"}, {"scaling": "token"}, {"out": "e4m3"}, {"dtype": "e5m2"},
        {"precision": "high"}, {"capped": True},
    ],
    ids=str,
)  # fmt: skip
def test_what_has_no_kernel(asked: dict[str, Any]) -> None:
    with pytest.raises(NoKernelError, match="boolean masks and BlockMask"):
        decide(generated_dir(), problem(**asked))


def test_a_pinned_kernel_must_be_for_masks_where_its_call_has_one() -> None:
    tensors = draw()
    with pytest.raises(UnsupportedError, match="kind='blocks'"):
        attention(*tensors, enable_gqa=True, kernel=FAST)
    assert FAST in explain(*tensors, masks()["packed"], enable_gqa=True, kernel=FAST)
