"""What does the user lose? Distances between an output and float64 on the original operands."""

from __future__ import annotations

import torch


def relative_l2(out: torch.Tensor, reference: torch.Tensor) -> float:
    """|o - r| / |r| in float64."""
    return float((out.double() - reference.double()).norm() / reference.double().norm())


def rmse(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Root of the mean squared difference, in units of the output."""
    return float((out.double() - reference.double()).square().mean().sqrt())


def max_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest |o - r|, in units of the output."""
    return float((out.double() - reference.double()).abs().max())


def min_row_cosine(out: torch.Tensor, reference: torch.Tensor) -> float:
    """The worst row: one bad row hides in a mean."""
    return float(torch.cosine_similarity(out.double(), reference.double(), dim=-1).min())
