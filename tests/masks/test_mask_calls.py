"""Calls with masks on a card, from their arguments to the operators, which the emulator stands in for; kernels for
lists of tiles on the CPU; and what has no kernel.

Regressions these catch: a mask that does not come to the operator, or not as it lies in memory there; a bias that is
copied or cast on its way, or comes with lists of tiles; a gradient that a known call of a bias drops; a kernel of no
mask that is chosen for one; a refusal that does not say why.
"""

from __future__ import annotations

from operator import attrgetter
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
VARIANTS = load_manifest(generated_dir()).variants
LISTED = [v for v in VARIANTS if v.kind == "blocks"]
FAST = next(v.id for v in LISTED if (v.head_dim, v.out, v.softmax) == (D, "bf16", "linear"))
SLOW = next(v.id for v in LISTED if (v.head_dim, v.out, v.softmax) == (D, "bf16", "exp2"))
BIASED = next(v for v in VARIANTS if (v.kind, v.head_dim, v.out, v.softmax) == ("biased", D, "bf16", "exp2"))


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


def plain(mask: str) -> str:
    """A kernel of the band alone that computes as BIASED does: the emulator adds a bias to its scores."""
    alike = attrgetter("family", "head_dim", "tile_m", "tile_n", "scaling", "dtype", "out", "softmax", "key_block")
    kind = "window" if mask == "window" else "fwd"
    return next(v.id for v in VARIANTS if (v.kind, v.mask) == (kind, mask) and alike(v) == alike(BIASED))


def biases() -> dict[str, torch.Tensor]:
    full = 3 * torch.randn(B, H, ROWS, KEYS + 1, generator=torch.Generator().manual_seed(2))
    full[:, :, 7] = -torch.inf
    return {
        "a tensor": full[..., :KEYS].contiguous(),
        "of 16 bits": full[..., :KEYS].bfloat16(),
        "from an odd key on": full.half()[..., 1:],
        "of all batches": full[0, ..., :KEYS].clone(),
        "one row": full[:, :1, :1, :KEYS],
        "one key": full[0, 0, :, 5:6],
        "transposed": full[..., :KEYS].mT.contiguous().mT,
        "an expanded view": full[:1, :1, :, :KEYS].expand(B, H, ROWS, KEYS),
    }


def card_that_tells(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[dict[str, Any]]]:
    """The operators that are called from now on, and the parts of a mask that each was given by name."""
    given: list[dict[str, Any]] = []

    def telling(run: stand_in.Operator) -> stand_in.Operator:
        def operator(*arguments: Any, **parts: Any) -> torch.Tensor:
            given.append(parts)
            return run(*arguments, **parts)

        return operator

    return stand_in.card(monkeypatch, {name: telling(run) for name, run in stand_in.OPERATORS.items()}), given


@pytest.mark.parametrize("name", biases())
def test_a_call_with_a_bias_on_a_card(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator gets the bias itself, as it lies, and nothing else of a mask: the first time, and when the call is
    known."""
    tensors, bias = draw(), biases()[name]
    half: dict[str, Any] = {"enable_gqa": True, "precision": "accurate", "return_lse": True}
    fp8, descales = zip(*(quantize(x, granularity="head") for x in tensors), strict=True)
    named = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True)) | {"scaling": "head"}
    kept = pack_kv(*tensors[1:], key_block=128, precision="accurate")
    calls: list[tuple[list[Any], dict[str, Any], str]] = [
        (tensors, half, "full"),
        (tensors, half | {"sinks": torch.linspace(-1, 2, H)}, "full"),
        (tensors, half | {"is_causal": True, "causal_alignment": "bottom_right"}, "causal"),
        (tensors, half | {"window_size": (-1, 40)}, "causal"),
        (tensors, half | {"window_size": (64, 37)}, "window"),
        (list(fp8), named | half, "full"),
        ([tensors[0], kept, None], half, "full"),
    ]
    wanted = [attention(*x, bias, **options, kernel=plain(mask)) for x, options, mask in calls]
    memo.forget()
    asked, given = card_that_tells(monkeypatch)
    for _ in range(2):  # the second time the call is known, but for packed keys
        got = [attention(*x, bias, **options, kernel=BIASED.id) for x, options, _ in calls]
        for mine, other in zip(got, wanted, strict=True):
            assert all(map(torch.equal, mine, other))
        assert len(memo._known) == 6
    assert asked == [*["attend"] * 5, "attend_fp8", "attend_packed"] * 2
    assert len(given) == len(asked)
    for parts in given:
        came = parts.pop("bias")
        assert parts == {"tiles": None, "counts": None, "bits": None}
        assert came.data_ptr() == bias.data_ptr() and came.dtype == bias.dtype
        assert came.shape == (*[1] * (4 - bias.dim()), *bias.shape)
        strides = zip(came.shape[::-1], came.stride()[::-1], bias.stride()[::-1], strict=False)
        assert all(mine == given for size, mine, given in strides if size > 1)
    memo.forget()


def test_a_known_call_adds_the_bias_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of other numbers is another bias; one of another form or dtype is another call, as is one without a bias."""
    tensors, bias = draw(), biases()["a tensor"]
    how: dict[str, Any] = {"enable_gqa": True, "precision": "accurate"}
    forms = [bias, bias.flip(3), bias[:1], bias.bfloat16(), bias.flip(3).bfloat16()]
    wanted = [attention(*tensors, x, **how, kernel=plain("full")) for x in forms]
    none = attention(*tensors, **how, kernel=plain("full"))
    memo.forget()
    stand_in.card(monkeypatch)
    for _ in range(2):
        got = [attention(*tensors, x, **how, kernel=BIASED.id) for x in forms]
        assert all(map(torch.equal, got, wanted))
        assert torch.equal(attention(*tensors, **how, kernel=plain("full")), none)
    assert len(memo._known) == 4
    memo.forget()


def test_a_bias_that_requires_grad_is_never_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it wants a gradient it is refused, also after a call that differs in nothing else."""
    tensors, bias = draw(), biases()["a tensor"]
    how: dict[str, Any] = {"enable_gqa": True, "precision": "accurate", "kernel": BIASED.id}
    memo.forget()
    asked = stand_in.card(monkeypatch)
    leaf = bias.clone().requires_grad_()
    with torch.no_grad():
        first = [attention(*tensors, leaf, **how) for _ in range(2)]
    assert len(memo._known) == 0 and asked == ["attend"] * 2
    assert all(torch.equal(attention(*tensors, bias, **how), x) for x in first)
    assert len(memo._known) == 1 and asked == ["attend"] * 4
    with pytest.raises(UnsupportedError, match="attn_mask has requires_grad=True and there is no backward"):
        attention(*tensors, leaf, **how)
    assert len(memo._known) == 1 and asked == ["attend"] * 4
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
        ({"arch": "sm89"}, 64, "linear"),
        ({"arch": "sm89", "head_dim": 96, "out": "fp16"}, 128, "linear"),
        ({"arch": "sm89", "precision": "accurate"}, 64, "exp2"),
    ],
)
def test_which_kernel_serves(asked: dict[str, Any], head_dim: int, softmax: str) -> None:
    v = decide(generated_dir(), problem(**asked))[0]
    assert (v.kind, v.mask, v.head_dim, v.softmax) == ("blocks", "blocks", head_dim, softmax)


@pytest.mark.parametrize(
    "asked",
    [
        {"head_dim": 192}, {"scaling": "token"}, {"out": "e4m3"}, {"dtype": "e5m2"},
        {"precision": "high"}, {"capped": True}, {"arch": "sm89", "head_dim": 192},
    ],
    ids=str,
)  # fmt: skip
def test_what_has_no_kernel(asked: dict[str, Any]) -> None:
    with pytest.raises(NoKernelError, match="boolean masks and BlockMask"):
        decide(generated_dir(), problem(**asked))


@pytest.mark.parametrize(
    ("asked", "head_dim", "softmax"),
    [
        ({}, 64, "exp2"),
        ({"causal": True}, 64, "exp2"),
        ({"window": True, "precision": "balanced"}, 64, "exp2"),
        ({"head_dim": 33, "precision": "high"}, 64, "exp2x2"),
        ({"head_dim": 96, "out": "fp16"}, 96, "exp2"),
        ({"head_dim": 128, "precision": "accurate"}, 128, "exp2"),
        ({"scaling": "tensor", "quantised": True, "precision": "accurate"}, 64, "exp2"),
        ({"arch": "sm89", "head_dim": 128}, 128, "exp2"),
        ({"arch": "sm89", "head_dim": 33, "precision": "high"}, 64, "exp2x2"),
    ],
)
def test_which_kernel_adds_a_bias(asked: dict[str, Any], head_dim: int, softmax: str) -> None:
    """One for every band: that of a window, whose ends may be far away."""
    v, _, decision = decide(generated_dir(), problem(listed=False, biased=True, **asked))
    assert (v.kind, v.mask, v.head_dim, v.softmax) == ("biased", "window", head_dim, softmax)
    assert decision.criterion == "the kernel for biases of its class"


@pytest.mark.parametrize(
    "asked",
    [
        {"head_dim": 192}, {"arch": "sm89", "head_dim": 256}, {"scaling": "token"}, {"out": "e4m3"}, {"dtype": "e5m2"},
        {"capped": True}, {"capped": True, "window": True},
    ],
    ids=str,
)  # fmt: skip
def test_what_has_no_kernel_for_a_bias(asked: dict[str, Any]) -> None:
    with pytest.raises(NoKernelError, match="an attn_mask that is added to scores"):
        decide(generated_dir(), problem(listed=False, biased=True, **asked))


def test_a_pinned_kernel_must_be_for_masks_where_its_call_has_one() -> None:
    tensors = draw()
    with pytest.raises(UnsupportedError, match="kind='blocks'"):
        attention(*tensors, enable_gqa=True, kernel=FAST)
    assert FAST in explain(*tensors, masks()["packed"], enable_gqa=True, kernel=FAST)
