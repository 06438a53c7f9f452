"""One row of the accuracy table: run a mode on random operands, compare with both float64 references, apply the gates.

The references are made one head at a time: at 4096 tokens one head's probabilities are 128 MiB.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F

from ..api.ask import supports
from ..api.attention import attention
from ..choose.target import target
from ..manifest import Variant, load_manifest
from .inputs import INPUTS, Operands16, Shape
from .measures import max_error, min_row_cosine, relative_l2, rmse
from .operands import operands_of
from .reference import attention64
from .standard import COLUMNS, HIGH_ERROR, MARGIN, MODES, ON_CARDS, SMALL, Mode
from .ztest import FLOOR, ZTest, summarise, z_scores

MOVED_ROW = 2.5  # largest rms of a row of z with two terms of P and outliers in Q and K


@dataclass(frozen=True)
class Figures:
    """Against float64 on the original operands; ``own_error``, the largest that the kernel adds, and ``z`` against
    float64 on the dequantised ones, where they are known."""

    relative_l2: float
    rmse: float
    max_error: float
    min_row_cosine: float
    own_error: float | None
    z: ZTest | None


@dataclass(frozen=True)
class Row:
    """A row that was measured, or that was skipped and why. ``gate`` is the largest relative L2 that passes."""

    inputs: str
    shape: Shape
    mode: str
    precision: str
    kernel: str
    gate: float
    figures: Figures | None
    refusals: tuple[str, ...] = ()
    skipped: str = ""

    @property
    def status(self) -> str:
        """pass, FAIL or skip."""
        if self.figures is None:
            return "skip"
        return "FAIL" if self.refusals else "pass"


def judge(
    figures: Figures, gate: float, inputs: str, precision: str = "", rmse_limit: float = math.inf
) -> tuple[str, ...]:
    """Every gate that the figures miss; NaN misses."""
    missed = []
    if not figures.relative_l2 <= gate:
        missed.append(f"relative L2 {figures.relative_l2:.4g} > {gate:.4g}")
    if not figures.rmse <= rmse_limit:
        missed.append(f"RMSE {figures.rmse:.3g} > {rmse_limit:.3g}")
    if precision == "high" and inputs == "randn" and figures.own_error is not None:
        if not figures.own_error <= HIGH_ERROR:
            missed.append(f"own error {figures.own_error:.3g} > {HIGH_ERROR}")
    if figures.z is not None:
        refused = figures.z.refusals(floor=FLOOR if inputs == "randn" else 0.0)
        # Where scores of outliers are cut, whole rows of `high` move together: up to 2.2 on an H200.
        moved = precision == "high" and inputs == "outlier" and figures.z.row_rms <= MOVED_ROW
        missed += ["z " + text for text in refused if not (moved and text.startswith("row_rms"))]
    return tuple(missed)


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """float64 attention of (B, H, S, D) operands at the default scale, head by head."""
    scale = q.shape[3] ** -0.5
    return torch.cat([attention64(x, y, z, scale).out for x, y, z in by_head(q, k, v)], 1)


def by_head(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The tensors (B, H, S, D), one head after the other."""
    for h in range(tensors[0].shape[1]):
        yield tuple(x[:, h : h + 1] for x in tensors)


def own(out: torch.Tensor, operands: Operands16, variant: Variant, scaling: str) -> tuple[float, ZTest]:
    """The largest error and the z-test of what a kernel made of bf16 operands in one scaling mode."""
    real = operands_of(variant, *operands, scaling).real
    errors, scores = [], []
    for o, q, k, v in by_head(out, *real):
        reference = attention64(q, k, v, q.shape[3] ** -0.5)
        errors.append(max_error(o, reference.out))
        scores.append(z_scores(o, reference, variant.softmax))
    return max(errors), summarise(torch.cat(scores, 1), out)


def kernels_of(mode: Mode, precisions: Sequence[str], operands: Operands16) -> Iterator[tuple[str, bool, str]]:
    """The kernels that ``attention`` runs for a mode, each once: precision, True and the kernel's id; or False and why
    there is none. Where precisions lead to one kernel, the first stands for the others."""
    if mode.peer:
        yield "", True, "torch"
        return
    seen = set()
    for precision in mode.of(precisions):
        arguments: dict[str, Any] = {"precision": precision, **mode.arguments}
        served, text = supports(*operands, **arguments)
        name = text.split()[0] if served else text
        if name not in seen:
            yield precision, served, name
        seen.add(name)


def measure(mode: Mode, precision: str, kernel: str, operands: Operands16, original: torch.Tensor) -> Figures:
    """Run one mode on (B, H, S, D) bf16 operands, torch's attention where it is the peer; ``original`` is float64
    attention of them."""
    own_error, z = None, None
    if mode.peer:
        out = F.scaled_dot_product_attention(*operands)
    else:
        arguments: dict[str, Any] = {"precision": precision, **mode.arguments}
        out = cast(torch.Tensor, attention(*operands, **arguments))
        if not mode.transforms:
            variant = load_manifest(target(operands[0].device).directory).find(kernel)
            own_error, z = own(out, operands, variant, mode.arguments["scaling"])
    return Figures(
        relative_l2(out, original),
        rmse(out, original),
        max_error(out, original),
        min_row_cosine(out, original),
        own_error,
        z,
    )


def table(device: str, precisions: Sequence[str], *, quick: bool = False) -> Iterator[Row]:
    """Every row of the standard on a device, as it is measured; ``quick`` leaves out all but (1, 8, 512, 64)."""
    for inputs, shape in (*COLUMNS, *(() if device == "cpu" else ON_CARDS)):
        if quick and shape != SMALL:
            continue
        q, k, v = (x.to(device) for x in INPUTS[inputs](shape))
        original = exact(q, k, v)
        for mode in MODES:
            gate = MARGIN * mode.figure(inputs, shape)
            missing = mode.missing()
            if missing is not None:
                yield Row(inputs, shape, mode.name, "", "", gate, None, skipped=missing)
                continue
            for precision, served, name in kernels_of(mode, precisions, (q, k, v)):
                if not served:
                    yield Row(inputs, shape, mode.name, precision, "", gate, None, skipped=name)
                    continue
                figures = measure(mode, precision, name, (q, k, v), original)
                missed = judge(figures, gate, inputs, precision, mode.rmse_limit(shape))
                yield Row(inputs, shape, mode.name, precision, name, gate, figures, missed)
