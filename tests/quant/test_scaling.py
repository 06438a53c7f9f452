"""Static and delayed scales.

Regressions these catch: a history that is read after it was written, a maximum that is never forgotten, a state that a
cast of the model rounds, a scale that evaluation still moves, a tensor beyond its scale that does not saturate.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from reference import attention64, randn, relative_l2
from test_quantize import E4M3, same_bytes

from fp8cutlass import DelayedScale, StaticScale, attention, quantize


def peak(height: float, heads: int = 2) -> torch.Tensor:
    """(1, heads, 4, 32) whose largest magnitude in head h is height * 2^h."""
    x = torch.linspace(-1, 0.5, 4 * 32).reshape(1, 1, 4, 32).expand(1, heads, 4, 32)
    return height * x * 2.0 ** torch.arange(heads)[:, None, None]


def test_the_first_call_scales_by_itself_and_later_ones_by_the_calls_before() -> None:
    scale = DelayedScale(history=3, amax=256.0)
    heights = [1.0, 4.0, 2.0, 0.5, 0.25, 0.125]
    expected = [1.0, 1.0, 4.0, 4.0, 4.0, 2.0]  # the largest of the three before; of the first, itself
    got = [float(scale(peak(height, 1))) * 256 for height in heights]
    assert got == expected
    assert scale.amax_history[:, 0].tolist() == heights[-3:]


def test_a_descale_for_each_head_over_all_batches() -> None:
    scale = DelayedScale(heads=3, amax=256.0)
    x = torch.cat((peak(1.0, 3), peak(3.0, 3)))
    assert torch.equal(scale(x) * 256, torch.tensor([3.0, 6.0, 12.0]))
    x8, descale = scale.quantize(peak(1.0, 3).expand(5, 3, 4, 32))
    assert descale.shape == (5, 3) and torch.equal(descale[4] * 256, torch.tensor([3.0, 6.0, 12.0]))
    assert x8.shape == (5, 3, 4, 32)


def test_margin_is_octaves_of_room() -> None:
    assert float(DelayedScale(margin=2, amax=256.0)(peak(1.0, 1))) == 4 / 256
    assert float(DelayedScale(margin=-1, amax=256.0)(peak(1.0, 1))) == 0.5 / 256


@pytest.mark.edge(51)
@pytest.mark.parametrize("first", [torch.zeros(1, 2, 4, 32), torch.zeros(0, 2, 4, 32), torch.zeros(1, 2, 0, 32)])
def test_zeros_say_nothing(first: torch.Tensor) -> None:
    """Their descale is 1, and the next tensor counts for itself."""
    scale = DelayedScale(heads=2, amax=256.0)
    assert scale(first).tolist() == [1.0, 1.0]
    assert torch.equal(scale(peak(1.0)) * 256, torch.tensor([1.0, 2.0]))


@pytest.mark.edge(52)
def test_the_smallest_and_largest_magnitudes() -> None:
    for magnitude in (1e-45, 3e38):
        x = torch.full((1, 1, 4, 32), magnitude)
        x8, descale = DelayedScale(margin=32 if magnitude > 1 else -32).quantize(x)
        assert 2.0**-126 <= float(descale) <= 2.0**126 and bool(x8.float().isfinite().all())


@pytest.mark.edge(54)
def test_what_is_no_number_is_not_recorded() -> None:
    scale = DelayedScale(amax=256.0)
    x = peak(1.0, 1).clone()
    x[0, 0, 1, 1], x[0, 0, 2, 2] = math.nan, -math.inf
    assert float(scale(x)) == 1 / 256 and float(scale.amax_history.max()) == 1.0


@pytest.mark.edge(53)
def test_beyond_the_history_saturates() -> None:
    scale = DelayedScale(amax=14.0)
    scale(peak(1.0, 1))
    x8, descale = scale.quantize(peak(8.0, 1))
    assert float(descale) == pytest.approx(1 / 14) and float(x8.float().abs().max()) == 14.0


def test_evaluation_only_reads() -> None:
    scale = DelayedScale(amax=256.0)
    scale(peak(1.0, 1))
    scale.eval()
    before = scale.amax_history.clone()
    assert float(scale(peak(9.0, 1))) == 1 / 256 and torch.equal(scale.amax_history, before)
    assert float(DelayedScale(amax=256.0).eval()(peak(9.0, 1))) == 9 / 256  # nothing to read: the tensor itself


@pytest.mark.parametrize("cast", ["bfloat16", "half", "double"])
def test_a_cast_of_the_model_leaves_the_state(cast: str) -> None:
    model = torch.nn.ModuleList([DelayedScale(), StaticScale(0.1234567)])
    model[0](peak(1.2345678, 1))
    want = {name: x.clone() for name, x in model.state_dict().items()}
    getattr(model, cast)()
    for name, x in model.state_dict().items():
        assert x.dtype == torch.float32 and torch.equal(x, want[name])
    other = torch.nn.ModuleList([DelayedScale(), StaticScale(1.0)])
    other.load_state_dict(model.state_dict())
    assert torch.equal(other[0].amax_history, model[0].amax_history) and torch.equal(other[1].descale, model[1].descale)
    assert model.to("meta")[0].amax_history.device.type == "meta"


@pytest.mark.parametrize("descale", [0.25, torch.tensor([0.25]), torch.tensor([0.25, 0.5])])
def test_static(descale: torch.Tensor | float) -> None:
    scale = StaticScale(descale, amax=256.0)
    x = peak(100.0)
    granularity = "head" if scale.descale.numel() > 1 else "tensor"
    x8, got = scale.quantize(x)
    want, want_descale = quantize(x, granularity=granularity, amax=256.0, descale=descale)
    assert same_bytes(x8, want) and torch.equal(got, want_descale) and float(x8.float().abs().max()) == 256.0


def run(scales: list[Any], operands: list[torch.Tensor]) -> torch.Tensor:
    pairs = [scale.quantize(x) for scale, x in zip(scales, operands, strict=True)]
    descales = {f"{name}_descale": descale for name, (_, descale) in zip("qkv", pairs, strict=True)}
    return attention(*(x8 for x8, _ in pairs), scaling="head", **descales)


def test_attention_with_delayed_scales() -> None:
    """Tensors of one distribution: within what e4m3 costs, though each is scaled by the one before it."""
    scales = [DelayedScale(heads=2, margin=1) for _ in range(3)]
    for step in range(3):
        operands = [randn(2, 2, 300, 64, seed=10 * step + i) for i in range(3)]
        got = run(scales, operands)
        assert relative_l2(got, attention64(*operands, 0.125).out) <= 0.066


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend: str) -> None:
    """Without graph breaks: the bits of eager mode, and the same histories."""
    torch._dynamo.reset()
    eager, traced = ([DelayedScale(3, 0.5, heads=2), DelayedScale(2), StaticScale(0.02)] for _ in range(2))
    compiled = torch.compile(lambda *x: run(traced, list(x)), fullgraph=True, backend=backend)
    for step in range(4):
        operands = [(step + 1) * randn(2, 2, 130, 64, seed=10 * step + i) for i in range(3)]
        assert torch.equal(compiled(*operands), run(eager, operands))
    for x, y in zip(eager[:2], traced[:2], strict=True):
        assert torch.equal(x.amax_history, y.amax_history)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: StaticScale(0.0), "descale"),
        (lambda: StaticScale(math.inf), "descale"),
        (lambda: StaticScale(True), "bool"),
        (lambda: StaticScale(torch.ones(2, 2)), r"\(2, 2\)"),
        (lambda: StaticScale(torch.ones(2).double()), "float64"),
        (lambda: StaticScale(1.0, amax=449.0), "amax"),
        (lambda: DelayedScale(0), "history"),
        (lambda: DelayedScale(margin=math.nan), "margin"),
        (lambda: DelayedScale(heads=0), "heads"),
        (lambda: DelayedScale(amax=0.5), "amax"),
        (lambda: DelayedScale(heads=3)(peak(1.0)), r"\(batch, 3, tokens, head_dim\), got shape \(1, 2, 4, 32\)"),
        (lambda: DelayedScale()(torch.ones(3)), r"x must be .*, got shape \(3,\)"),
        (lambda: StaticScale(torch.ones(3)).quantize(peak(1.0)), r"descale has shape \(3,\)"),
        (lambda: DelayedScale().quantize([1]), "x must be a torch.Tensor, got list"),
    ],
)
def test_errors_name_the_argument(make: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        make()


def test_nothing_is_read_back_from_the_device() -> None:
    """On meta tensors every value is unknown: a test of one, or a copy to the host, fails."""
    x = torch.empty(2, 2, 40, 32, device="meta", dtype=torch.bfloat16)
    for scale in (DelayedScale(heads=2), DelayedScale(), StaticScale(0.5)):
        x8, descale = scale.to("meta").quantize(x)
        assert x8.dtype == E4M3 and descale.device.type == "meta"
