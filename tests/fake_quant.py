"""What each mode of the accuracy table loses, by fake quantisation in float64. Of the package only the random operands
and the names of the modes are used, so the figures of ``standard`` are not what the code under test happens to do.

Q, K and V are rounded to e4m3 by scales that map the largest magnitude of a group to 448, and multiplied back. Softmax
and both products are in float64; P is rounded to e4m3 where the row maximum is 2^8, and a row divided by the sum of its
rounded P. Smoothing subtracts the mean of all keys of a head; rotation is an orthonormal Walsh-Hadamard matrix after
random signs.

    python -m tests.fake_quant              # the five columns: six minutes of one core
    python -m tests.fake_quant --column 2   # one of them
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fp8cutlass.accuracy.inputs import INPUTS, Shape
from fp8cutlass.accuracy.standard import COLUMNS, GIVEN, LARGE, MODES, SMALL

DRAWS = {SMALL: 8, LARGE: 3}  # of the operands
QUANTISED = [mode for mode in MODES if not mode.peer and not mode.precision]
SIGNS_SEED = 3
FP8_MAX = 448.0
P_MAX = 256.0
KEYS = 128  # in a block
GROUPS = {  # what shares a scale: of Q, K and V
    "tensor": ("tensor", "tensor", "tensor"),
    "head": ("head", "head", "head"),
    "block": ("token", "block", "block"),
    "token": ("token", "token", "channel"),
}
DIMENSIONS = {"tensor": (0, 1, 2), "head": (1, 2), "token": (2,), "channel": (1,)}  # of (H, S, D)
DERIVED_WITHIN = 0.01  # four digits, and another machine's rounding
GIVEN_WITHIN = 3.0  # standard deviations of a draw: what was given is taken to be of one draw


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """The nearest e4m3 of float64 numbers whose magnitude is at most 448."""
    return x.to(torch.float8_e4m3fn).double()


def fake_quantised(x: torch.Tensor, group: str) -> torch.Tensor:
    """x (H, S, D) float64, every group rounded to e4m3 of its own scale."""
    if group == "block":
        return fake_quantised(x.reshape(-1, KEYS, x.shape[2]), "head").view_as(x)
    scale = x.abs().amax(DIMENSIONS[group], keepdim=True) / FP8_MAX
    return e4m3(x / scale) * scale


def hadamard(columns: int) -> torch.Tensor:
    """An orthonormal matrix (columns, columns): random signs, then Walsh-Hadamard."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < columns:
        matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64))
    generator = torch.Generator().manual_seed(SIGNS_SEED)
    signs = 1.0 - 2.0 * torch.randint(2, (columns, 1), generator=generator).double()
    return signs * matrix * columns**-0.5


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, rounded: bool) -> torch.Tensor:
    """Attention of one head, (S, D) float64 operands; P ``rounded`` to e4m3 or not."""
    p = (q @ k.T).mul_(q.shape[1] ** -0.5)
    p = p.sub_(p.amax(1, keepdim=True)).exp_()
    if rounded:
        p = e4m3(p.mul_(P_MAX))
    return (p @ v) / p.sum(1, keepdim=True)


def loss(options: Mapping[str, Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative L2 on operands (H, S, D) float64 under a mode's arguments; ``exact`` is attention of the operands."""
    if options.get("smooth_k"):
        k = k - k.mean(1, keepdim=True)
    if options.get("hadamard"):
        matrix = hadamard(q.shape[2])
        q, k = q @ matrix, k @ matrix
    groups = GROUPS[options["scaling"]]
    q, k, v = (fake_quantised(x, group) for x, group in zip((q, k, v), groups, strict=True))
    error = 0.0
    for head, want in enumerate(exact):  # one at a time: at 4096 tokens P of a head is 128 MiB
        error += float((attended(q[head], k[head], v[head], rounded=True) - want).square().sum())
    return error**0.5 / float(exact.norm())


def draws(inputs: str, shape: Shape) -> Iterator[tuple[torch.Tensor, ...]]:
    """The operands of a column as often as DRAWS says, (H, S, D) float64: the heads of one draw with the seeds of
    INPUTS, dealt out."""
    _, heads, tokens, head_dim = shape
    total = DRAWS[shape] * heads
    operands = [x.double()[0] for x in INPUTS[inputs]((1, total, tokens, head_dim))]
    for start in range(0, total, heads):
        yield tuple(x[start : start + heads] for x in operands)


def losses(inputs: str, shape: Shape) -> dict[str, list[float]]:
    """Relative L2 of every mode in each draw of a column."""
    found: dict[str, list[float]] = {mode.name: [] for mode in QUANTISED}
    for q, k, v in draws(inputs, shape):
        exact = torch.stack([attended(*head, rounded=False) for head in zip(q, k, v, strict=True)])
        for mode in QUANTISED:
            found[mode.name].append(loss(mode.arguments, q, k, v, exact))
    return found


def agrees(name: str, figure: float, found: Sequence[float]) -> bool:
    """Whether the figure of a mode is what the draws of its column say."""
    mean = statistics.mean(found)
    allowed = GIVEN_WITHIN * statistics.stdev(found) if name in GIVEN else DERIVED_WITHIN * mean
    return abs(figure - mean) <= allowed


def main(arguments: Sequence[str]) -> int:
    """Print the table of each column; 1 when a figure disagrees."""
    parser = argparse.ArgumentParser(prog="python -m tests.fake_quant")
    parser.add_argument("--column", type=int, choices=range(len(COLUMNS)))
    only = parser.parse_args(arguments).column
    torch.set_num_threads(1)  # a second one gains little, and waits where the cores are busy
    wrong = 0
    for inputs, shape in COLUMNS if only is None else COLUMNS[only : only + 1]:
        found = losses(inputs, shape)
        print(f"{inputs} {shape}: figure, mean and standard deviation of {DRAWS[shape]} draws")
        for mode in QUANTISED:
            figure, draw = mode.figure(inputs, shape), found[mode.name]
            right = agrees(mode.name, figure, draw)
            wrong += not right
            kind = "given" if mode.name in GIVEN else "derived"
            numbers = f"{figure:.4f} {statistics.mean(draw):.4f} {statistics.stdev(draw):.4f}"
            print(f"  {mode.name:16} {kind:7} {numbers} {'' if right else 'DISAGREES'}".rstrip(), flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
