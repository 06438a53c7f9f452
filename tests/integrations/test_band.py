"""What a band of keys beside the diagonal is, cut, padded and served: against masks that are written out."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import tiny
import torch
from torch.nn.functional import scaled_dot_product_attention
from where import CPU, DEVICE, ON_CARD, moved, randn

from fp8cutlass import integrations, pack_kv
from fp8cutlass.integrations.refusal import Refusal
from fp8cutlass.integrations.transformers import band as bands
from fp8cutlass.integrations.transformers import route
from fp8cutlass.integrations.transformers import serve as serving
from fp8cutlass.integrations.transformers.band import Band
from fp8cutlass.integrations.transformers.serve import Features, note_packed, refusal, serve
from fp8cutlass.stats import Reason

SHAPES = [(7, 7), (3, 9), (1, 9), (9, 4)]
SIDES = [(-1, -1), (-1, 0), (2, 0), (3, 3), (-1, 2), (1, -1)]


def written(band: Band, rows: int, keys: int) -> torch.Tensor:
    """The same mask, row by row."""
    mask = torch.zeros(rows, keys, dtype=torch.bool)
    for i in range(rows):
        for j in range(keys):
            below = band.left < 0 or j >= i + band.shift - band.left
            mask[i, j] = below and (band.right < 0 or j <= i + band.shift + band.right)
    return mask


@pytest.mark.parametrize(("rows", "keys"), SHAPES)
@pytest.mark.parametrize(("left", "right"), SIDES)
@pytest.mark.parametrize("end", [False, True])
def test_dense_and_cut(rows: int, keys: int, left: int, right: int, end: bool) -> None:
    """What is cut off is seen by no row; what is left is the same band, aligned as kernels have it."""
    whole = Band(left, right, keys - rows if end else 0)
    mask = whole.dense(2, rows, keys, DEVICE)
    assert mask.shape == (2, 1, rows, keys) and torch.equal(mask[1, 0], written(whole, rows, keys))
    found = bands.cut(whole, rows, keys)
    assert found is not None
    band, first, after = found
    assert band.shift in (0, after - first - rows) or not band.limited
    assert torch.equal(band.dense(1, rows, after - first, DEVICE)[0, 0], mask[0, 0, :, first:after])
    assert not mask[..., :first].any() and not mask[..., after:].any()


def test_a_long_cache_is_cut_on_both_sides() -> None:
    assert bands.cut(Band(7, 0, 50), 2, 64) == (Band(7, 0, 7), 43, 52)
    assert bands.cut(Band(-1, 0, 10), 4, 64) == (Band(-1, 0, 10), 0, 14)
    assert bands.cut(Band(-1, 3, 1), 4, 64) is None


VALID = torch.ones(3, 9, dtype=torch.bool)
VALID[0, :4] = False
VALID[1, 6:] = False


@pytest.mark.parametrize("rows", [9, 3, 1])
@pytest.mark.parametrize(("left", "right"), [(-1, -1), (-1, 0), (2, 0)])
def test_padding(rows: int, left: int, right: int) -> None:
    """Rows of tokens that count see what the written mask says; rows of padding, none."""
    plain = Band(left, right, 9 - rows if right == 0 else 0)
    band = bands.padded(plain, VALID, rows, 9)
    assert band is not None and band.ragged
    want = plain.dense(3, rows, 9, DEVICE) & VALID[:, None, None, :]
    counts = VALID[:, 9 - rows :] if plain.limited else torch.ones(3, rows, dtype=torch.bool)
    want &= counts[:, None, :, None]
    assert torch.equal(band.dense(3, rows, 9, DEVICE), want)


def test_no_padding_and_holes() -> None:
    plain = Band(right=0)
    assert bands.padded(plain, torch.ones(2, 5, dtype=torch.bool), 5, 5) is plain
    hole = VALID.clone()
    hole[2, 3] = False
    assert bands.padded(plain, hole, 9, 9) is None
    nothing = VALID.clone()
    nothing[2] = False
    band = bands.padded(plain, nothing, 9, 9)
    assert band is not None and not band.dense(3, 9, 9, DEVICE)[2].any()


def test_sequences_in_a_row() -> None:
    index = torch.tensor([[0, 0, 0, 1, 1], [4, 4, 2, 2, 2]])
    band = bands.of_sequences(Band(1, 0), index)
    assert band.ends_q is not None and band.ends_q.tolist() == [0, 3, 5, 7, 10]
    same = index[:, None, :, None] == index[:, None, None, :]
    assert torch.equal(band.dense(2, 5, 5, DEVICE), same & Band(1, 0).dense(2, 5, 5, DEVICE))


def test_a_note_on_a_mask_ends_when_the_mask_is_written_to_or_copied() -> None:
    mask = bands.tag(torch.ones(1, 1, 4, 4, dtype=torch.bool), Band(right=0))
    assert bands.tagged(mask) == Band(right=0)
    assert bands.tagged(mask[:, :, 1:]) is None and bands.tagged(mask.clone()) is None
    mask[0, 0, 0, 0] = False
    assert bands.tagged(mask) is None


def test_lengths_are_for_one_batch() -> None:
    """A mask that torch would broadcast over the batch does not say where the other sequences lie."""
    one = bands.padded(Band(right=0), VALID[:1], 9, 9)
    assert one is not None
    mask = bands.tag(one.dense(1, 9, 9, DEVICE), one)
    q = torch.zeros(1, 4, 9, 32)
    assert route._of_mask(mask, q, 9) == (one, None)
    for other, keys in ((q.expand(3, -1, -1, -1), 9), (q, 8), (q[:, :, 1:], 9)):
        band, why = route._of_mask(mask, other, keys)
        assert band is None and why is not None and why.reason is Reason.MASK
    plain = bands.tag(torch.ones(1, 1, 9, 9, dtype=torch.bool).tril(), Band(right=0))
    assert route._of_mask(plain, q.expand(3, -1, -1, -1), 9) == (Band(right=0), None)


def operands(rows: int, keys: int, width: int = 32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    shapes = ((3, 4, rows, 32), (3, 2, keys, 32), (3, 2, keys, width))
    q, k, v = (moved(torch.randn(shape, generator=draw, device=CPU).bfloat16()) for shape in shapes)
    return q, k, v


BANDS = [
    ("full", Band(), 9, 9),
    ("causal", Band(right=0), 9, 9),
    ("chunk", Band(right=0, shift=6), 3, 9),
    ("written so far", Band(right=0, shift=2), 3, 9),
    ("window", Band(2, 0), 9, 9),
    ("window of one step", Band(2, 0, 6), 1, 9),
    ("both sides", Band(2, 2), 9, 9),
    ("padded", bands.padded(Band(right=0), VALID, 9, 9), 9, 9),
    ("padded window", bands.padded(Band(2, 0, 6), VALID, 3, 9), 3, 9),
    ("sequences", bands.of_sequences(Band(right=0), torch.arange(27).view(3, 9) // 5), 9, 9),
]


@pytest.mark.parametrize(("band", "rows", "keys"), [case[1:] for case in BANDS], ids=[case[0] for case in BANDS])
@pytest.mark.parametrize(("softcap", "sinks"), [(None, False), (None, True), (0.5, True)])
@pytest.mark.parametrize("width", [32, 24])
@pytest.mark.parametrize("biased", [False, True])
def test_serve(band: Band, rows: int, keys: int, softcap: float | None, sinks: bool, width: int, biased: bool) -> None:
    """Against torch's attention with the dense mask; a sink is one more key, whose value is 0."""
    if biased and ON_CARD and softcap:
        pytest.skip("no kernel both caps and adds")
    q, k, v = operands(rows, keys, width)
    mask = band.dense(3, rows, keys, DEVICE)
    score = torch.tensor([-1.0, 0.0, 1.0, 2.0]) if sinks else None
    bias = randn(1, rows, keys, 4, seed=9).permute(0, 3, 1, 2) if biased else None  # as it lies in T5
    got = serve(q, k, v, band, 0.2, softcap, score, bias)
    assert isinstance(got, torch.Tensor) and got.shape == (3, rows, 4, width) and got.is_contiguous()
    k, v = (x.float().repeat_interleave(2, 1) for x in (k, v))
    scores = q.float() @ k.transpose(2, 3) * 0.2
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.float()
    scores = scores.masked_fill(~mask, -torch.inf)
    if score is not None:
        scores = torch.cat((scores, score[None, :, None, None].expand(3, -1, rows, 1)), 3)
    want = (scores.softmax(3).nan_to_num()[..., :keys] @ v).transpose(1, 2)
    assert tiny.relative(got, want) < 0.08
    unseen = ~mask.any(3).expand(3, 4, rows).transpose(1, 2)
    assert not got[unseen].any()


def test_packed_keys_are_read_where_nothing_of_them_changed() -> None:
    q, k, v = operands(3, 9)
    note_packed(k, v, pack_kv(k, v * 2))  # of other values, to see which are read
    plain = scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)
    got = serve(q, k, v, Band(), None, None, None)
    assert isinstance(got, torch.Tensor) and tiny.relative(got, 2 * plain) < 0.08
    v.add_(0)
    got = serve(q, k, v, Band(), None, None, None)
    assert isinstance(got, torch.Tensor) and tiny.relative(got, plain) < 0.08


def reason(**changes: object) -> Reason | None:
    q, k, v = operands(4, 4)
    found = refusal(changes.pop("q", q), changes.pop("k", k), changes.pop("v", v), Features(**changes))  # type: ignore[arg-type]
    return None if found is None else found.reason


def test_refusals() -> None:
    q, k, v = operands(4, 4)
    score = torch.zeros(4)
    assert reason() is reason(sinks=score) is reason(rest={"use_cache": True, "output_attentions": False}) is None
    assert reason(rest={"a_new_one": None}) is None
    assert reason(rest={"a_new_one": 0}) is reason(rest={"output_attentions": True}) is Reason.KEYWORD
    assert reason(softcap=50.0) is reason(position_bias=score) is None
    assert reason(position_bias=score.clone().requires_grad_()) is Reason.GRAD
    assert reason(dropout=0.1) is Reason.DROPOUT and reason(paged=True) is Reason.PAGED
    assert reason(q=q.float()) is Reason.DTYPE and reason(v=v.half()) is Reason.DTYPE
    assert reason(q=q.requires_grad_()) is Reason.GRAD
    assert reason(q=q.detach()[:1]) is Reason.LAYOUT and reason(q=q.detach()[0]) is Reason.LAYOUT
    assert reason(q=q.detach()[:, :3]) is Reason.HEADS
    assert reason(v=torch.cat((v, v), 3)) is Reason.HEAD_DIM and reason(k=k[..., :16]) is Reason.HEAD_DIM
    assert reason(k=k.to("meta")) is Reason.DEVICE


def test_adapters_are_imported_when_asked_for() -> None:
    """And this one needs its library only when it registers."""
    code = "import sys, fp8cutlass; assert not [m for m in sys.modules if m.startswith('fp8cutlass.integrations')]"
    code += "; import fp8cutlass.integrations.transformers; assert 'transformers' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)


def test_minimum_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """One number for all adapters. Its default is measured, and for cards alone."""
    integrations.set_minimum_length(None)  # on a card the tests have another
    q, k, v = operands(9, 9)
    measured, full, causal = integrations.MEASURED, integrations.FULL, integrations.CAUSAL
    assert integrations.minimum_length(32, 32, causal, on_card=False) == 0
    for head_dim, width in ((64, 64), (72, 128), (192, 256), (256, 256)):
        for mask in measured:
            assert integrations.minimum_length(head_dim, head_dim, mask, on_card=True) == measured[mask][width]
    assert integrations.minimum_length(192, 128, causal, on_card=True) == integrations.NARROW_VALUES
    for mask, by_width in integrations.MEASURED_INTEGERS.items():
        for head_dim, width in ((64, 64), (72, 128), (192, 128)):
            assert integrations.minimum_length(head_dim, head_dim, mask, True, "int8") == by_width[width]
            assert by_width[width] >= measured[mask][width]
    assert integrations.minimum_length(64, 64, causal, False, "int8") == 0
    assert integrations.minimum_length(192, 128, integrations.MASKED, True) == measured[integrations.MASKED][256]
    asked: list[tuple[object, ...]] = []
    with monkeypatch.context() as patch:  # what a band is to it
        patch.setattr(serving, "short_of", lambda *given: asked.append(given) or "")
        padded = bands.padded(Band(right=0), VALID, 9, 9)
        for band in (Band(), Band(right=0), Band(2, 0), padded):
            assert band is not None
            serve(*operands(9, 9, 24), band, None, None, None)
    kinds = (full, causal, "masked", "masked")
    assert [given[:4] for given in asked] == [(9, 32, 24, mask) for mask in kinds]
    whole = serving.work_of(*operands(9, 9, 24), False)
    assert [given[4] for given in asked] == [whole, whole // 2, whole // 2, whole // 2]
    try:
        integrations.set_minimum_length(10)
        found = serve(q, k, v, Band(), None, None, None)
        assert isinstance(found, Refusal) and found.reason is Reason.SHORT
        assert padded is not None and isinstance(serve(q, k, v, padded, None, None, None), Refusal)
        note_packed(k, v, pack_kv(k, v))
        assert isinstance(serve(q, k, v, Band(), None, None, None), torch.Tensor)
        integrations.set_minimum_length(9)
        assert isinstance(serve(*operands(9, 9), Band(), None, None, None), torch.Tensor)
    finally:
        integrations.set_minimum_length(None)
    for wrong in (-1, 1.5, True, "9"):
        with pytest.raises(ValueError, match="a number of tokens"):
            integrations.set_minimum_length(wrong)  # type: ignore[arg-type]


def test_small_calls_that_are_launched_singly_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card, outside of graphs and of compiled programs, unless the program has set a number."""
    integrations.set_minimum_length(None)
    work, full = integrations.LAUNCHED_WORK, integrations.FULL
    capturing = [False]
    assert "outside of a CUDA graph" in integrations.short_of(2048, 64, 64, full, work - 1, True)  # of a fake tensor
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    assert integrations.short_of(2048, 64, 64, full, work, True) == ""
    assert "outside of a CUDA graph" in integrations.short_of(2048, 64, 64, full, work - 1, True)
    assert integrations.short_of(2048, 64, 64, full, work - 1, False) == ""
    assert integrations.short_of(500, 64, 64, full, work, True) == "less than 512 rows"
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert integrations.short_of(2048, 64, 64, full, 1, True) == ""
        # What is not compared makes no guard of the program.
        assert integrations.short_of(2048, 64, 64, full, object(), True) == ""  # type: ignore[arg-type]
    capturing[0] = True
    assert integrations.short_of(2048, 64, 64, full, 1, True) == ""
    capturing[0] = False
    try:
        for least in (0, 2048):
            integrations.set_minimum_length(least)
            assert integrations.short_of(2048, 64, 64, full, 1, True) == ""
    finally:
        integrations.set_minimum_length(None)
