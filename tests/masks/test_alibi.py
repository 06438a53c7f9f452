"""ALiBi as an additive mask, against float64.

Regressions these catch: a slope of another head; distances from another row's own key; a causal call whose rows lose
more than a constant; an LSE that is not what the documentation says.
"""

from __future__ import annotations

import pytest
import torch
from reference import randn, relative_l2

from fp8cutlass import UnsupportedError, alibi_bias, alibi_slopes, attention


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor, own: int, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Result and LSE in float64; row i's own key is ``i + own``."""
    heads, rows, keys = q.shape[1], q.shape[2], k.shape[2]
    k, v = (x.double().repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = q.double() @ k.mT * q.shape[3] ** -0.5
    distance = torch.arange(rows)[:, None] + own - torch.arange(keys)
    scores -= slopes.double().reshape(-1, heads, 1, 1) * distance.abs()
    if causal:
        scores = scores.masked_fill(distance < 0, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize(
    ("causal", "alignment"), [(False, "top_left"), (False, "bottom_right"), (True, "bottom_right")]
)
def test_against_float64(batches: bool, causal: bool, alignment: str) -> None:
    rows, keys = 70, 200
    q, k, v = randn(2, 6, rows, 64, seed=1), randn(2, 3, keys, 64, seed=2), randn(2, 3, keys, 64, seed=3)
    slopes = alibi_slopes(6) * torch.tensor([[1.0], [0.5]]) if batches else alibi_slopes(6)
    mask = alibi_bias(slopes, rows, keys, is_causal=causal, causal_alignment=alignment)
    assert mask.shape == (2 if batches else 1, 6, 1 if causal else rows, keys)
    how = {"causal_alignment": alignment} if causal else {}
    own = keys - rows if alignment == "bottom_right" else 0
    out, lse = attention(q, k, v, mask, is_causal=causal, enable_gqa=True, precision="high", return_lse=True, **how)
    expected, log_sum = exact(q, k, v, slopes, own, causal)
    # The rounding of e4m3: near keys alone count, and little averages out.
    assert relative_l2(out.double(), expected) < 0.06
    if causal:
        lse = lse + slopes.reshape(-1, 6, 1) * (keys - 1 - own - torch.arange(rows))
    assert float((lse - log_sum).square().mean().sqrt()) < 0.03  # what e4m3 makes of queries and keys
    if not batches:  # a slope too many or too few is seen
        other, _ = exact(q, k, v, slopes.flip(0), own, causal)
        assert relative_l2(out.double(), other) > 0.1


def test_the_slopes_of_the_paper() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-h for h in range(1, 9)]
    assert torch.allclose(alibi_slopes(12)[:8], alibi_slopes(8))
    assert torch.allclose(alibi_slopes(12)[8:], 2.0 ** -torch.tensor([0.5, 1.5, 2.5, 3.5]))
    assert alibi_slopes(1).tolist() == [2.0**-8]


@pytest.mark.parametrize(
    ("slopes", "sizes", "how"),
    [
        (torch.ones(2, dtype=torch.int32), (3, 4), {}),
        (torch.ones(1, 2, 3), (3, 4), {}),
        (torch.ones(2), (0, 4), {}),
        (torch.ones(2), (3, 4), {"causal_alignment": "middle"}),
    ],
)  # fmt: skip
def test_refused(slopes: torch.Tensor, sizes: tuple[int, int], how: dict[str, str]) -> None:
    with pytest.raises(UnsupportedError):
        alibi_bias(slopes, *sizes, **how)
    with pytest.raises(UnsupportedError):
        alibi_slopes(0)
