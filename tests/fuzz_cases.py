"""Random calls of ``attention``, each a function of a seed and a number: shapes, memory orders, options and values."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from layouts import ORDERS, laid_out
from reference import randn

from fp8cutlass.accuracy.inputs import BIAS_SIZE, OUTLIER_SHARE, OUTLIER_SIZE
from fp8cutlass.choose.target import granularities
from fp8cutlass.manifest import INTEGER
from fp8cutlass.quant.quantize import quantize

LENGTHS = (1, 2, 3, 7, 9, 12, 31, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 511, 512, 513, 1023)
HEAD_DIMS = (8, 16, 24, 32, 40, 64, 72, 80, 96, 100, 128, 136, 160, 192, 200, 256)
SOURCES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
HALF = ("bf16", "fp16")
VALUES = ("normal", "outliers", "biased", "scaled", "constant", "rising", "zeros", "tiny", "large")
DESCALES = ("float", "()", "(1,)", "(H,)", "(B, H)", "finest")
# Scores (batch * heads * queries * keys) of a case: float64 references of them fit, and are made in milliseconds.
CELLS = {"cpu": 1 << 16, "cuda": 1 << 22}


@dataclass(frozen=True)
class Case:
    """A call. Of ``scale`` None is the default; ``pick`` in [0, 1) pins one of the kernels that serve the call, None
    leaves the choice to the table; ``orders`` are the memory orders of query, key and value."""

    seed: int
    number: int
    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    source: str
    out: str | None
    scaling: str
    precision: str
    alignment: str | None  # of the causal mask or the window
    smooth_k: bool
    hadamard: bool
    scale: float | None
    layout: str
    values: str
    orders: tuple[str, str, str]
    descales: tuple[str, str, str]
    lse: bool
    pick: float | None
    window: tuple[int, int] | None = None  # (left, right) instead of a causal mask, -1 for all
    softcap: float = 0.0
    sinks: bool = False

    @property
    def half(self) -> bool:
        """Whether ``attention`` quantises the operands."""
        return self.source in HALF

    @property
    def softmax_scale(self) -> float:
        """The scale in force."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def causal_offset(self) -> int | None:
        """Key j is visible to row i when j <= i + this; None without a mask."""
        if self.alignment is None or (self.window and self.window[1] < 0):
            return None
        return self._shift + (self.window[1] if self.window else 0)

    @property
    def window_offset(self) -> int | None:
        """Key j is visible to row i when j >= i + this, too; None without a left end."""
        return self._shift - self.window[0] if self.window and self.window[0] >= 0 else None

    @property
    def _shift(self) -> int:
        return self.seqlen_k - self.seqlen_q if self.alignment == "bottom_right" else 0

    @property
    def seen(self) -> torch.Tensor:
        """(Sq, Sk) bool: which keys a row sees."""
        row, key = torch.arange(self.seqlen_q)[:, None], torch.arange(self.seqlen_k)[None]
        last, first = self.causal_offset, self.window_offset
        seen = torch.ones(self.seqlen_q, self.seqlen_k, dtype=torch.bool)
        seen = seen if last is None else seen & (key <= row + last)
        return seen if first is None else seen & (key >= row + first)


def _bent(precision: str, seed: int, number: int) -> str:
    """``balanced`` instead of a third of ``fast``. Drawn apart, so that cases keep the rest of what they had before."""
    apart = random.Random(f"precision of {seed}/{number}")
    return "balanced" if precision == "fast" and apart.random() < 1 / 3 else precision


def _windowed(case: Case) -> Case:
    """With a window instead of the mask of a fifth of all cases. Drawn apart, so that cases keep the rest."""
    apart = random.Random(f"window of {case.seed}/{case.number}")
    if apart.random() >= 0.2:
        return case
    left, right = (apart.choice((-1, 0, 1, 63, 64, 127, 200, apart.randint(0, case.seqlen_k))) for _ in range(2))
    alignment = case.alignment or apart.choice(("top_left", "bottom_right"))
    return replace(case, window=(left, right), alignment=alignment)


def _of_integers(case: Case) -> Case:
    """With 8-bit integers in a quarter of the cases that they go with, in place of the mode. Drawn apart, too."""
    apart = random.Random(f"integers of {case.seed}/{case.number}")
    plain = case.half and not case.softcap and not case.sinks and case.out != "e4m3"
    if not plain or apart.random() >= 0.25:
        return case
    return replace(case, precision=apart.choice(tuple(INTEGER)), scaling="block")


CAPS = (0.5, 5.0, 30.0, 50.0)


def _scored(case: Case) -> Case:
    """With a cap, sinks or both in a quarter of the cases that they go with. Drawn apart, as the window is."""
    apart = random.Random(f"scores of {case.seed}/{case.number}")
    if case.smooth_k or apart.random() >= 0.25:
        return case
    capped, sinks = apart.choice(((True, False), (False, True), (True, True)))
    return replace(case, softcap=apart.choice(CAPS) if capped else 0.0, sinks=sinks)


def sinks_of(case: Case) -> torch.Tensor | None:
    """A logit for each head, from far below to above those of most rows."""
    r = random.Random(f"sinks of {case.seed}/{case.number}")
    return torch.tensor([r.uniform(-3, 6) for _ in range(case.heads)]) if case.sinks else None


def draw(seed: int, number: int, cells: int) -> Case:
    """Case ``number`` of a seed, of at most ``cells`` scores. The same on every machine."""
    r = random.Random(f"{seed}/{number}")

    def length() -> int:
        return r.choice(LENGTHS) if r.random() < 0.6 else int(2 ** r.uniform(0, 12))

    batch, kv_heads, group = r.randint(1, 4), r.randint(1, 4), r.choice((1, 1, 2, 3, 4, 5, 7, 8))
    seqlen_q, seqlen_k = length(), length()
    while batch * kv_heads * group * seqlen_q * seqlen_k > cells:
        if batch * kv_heads * group > 6:
            batch, kv_heads, group = max(1, batch // 2), max(1, kv_heads - 1), max(1, group // 2)
        elif seqlen_q > seqlen_k:
            seqlen_q = seqlen_q * 2 // 3
        else:
            seqlen_k = seqlen_k * 2 // 3
    source = r.choice(("bf16", "bf16", "bf16", "fp16", "e4m3", "e4m3", "e5m2"))
    half = source in HALF
    case = Case(
        seed=seed,
        number=number,
        batch=batch,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=r.choice(HEAD_DIMS) if r.random() < 0.9 else r.randint(1, 256),
        source=source,
        out=r.choice((None, None, "bf16", "fp16", "e4m3")),
        scaling=r.choice(("block", "block", "tensor", "head", "token")),
        precision=_bent(r.choice(("fast", "accurate")), seed, number),
        alignment=r.choice((None, None, "top_left", "bottom_right")),
        smooth_k=half and r.random() < 0.25,
        hadamard=half and r.random() < 0.25,
        scale=r.choice((None, None, None, None, 0.0, 0.03, 0.2, -0.1)),
        layout=r.choice(("bhsd", "bhsd", "bshd")),
        values="normal" if r.random() < 0.4 else r.choice(VALUES),
        orders=(r.choice(ORDERS), r.choice(ORDERS), r.choice(ORDERS)),
        descales=(r.choice(DESCALES), r.choice(DESCALES), r.choice(DESCALES)),
        lse=r.random() < 0.5,
        pick=r.random() if r.random() < 0.4 else None,
    )
    return _of_integers(_scored(_windowed(case)))


def values_of(case: Case) -> list[torch.Tensor]:
    """Query, key and value (B, H, S, D) in bf16 before they are converted to the case's type."""
    shapes = ((case.heads, case.seqlen_q), (case.kv_heads, case.seqlen_k), (case.kv_heads, case.seqlen_k))
    first = random.Random(f"values of {case.seed}/{case.number}").getrandbits(60)
    x = [randn(case.batch, h, s, case.head_dim, seed=first + i).float() for i, (h, s) in enumerate(shapes)]
    generator = torch.Generator().manual_seed(first)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    if case.values == "outliers":
        hit = [torch.rand(t.shape, generator=generator) < OUTLIER_SHARE for t in x]
        x = [t + OUTLIER_SIZE * normal(*t.shape) * h for t, h in zip(x, hit, strict=True)]
    elif case.values == "biased":
        x[1] += BIAS_SIZE * normal(1, case.kv_heads, 1, case.head_dim)
    elif case.values == "scaled":
        x = [t * 2.0 ** float(normal(1)) for t in x]
        x[2] *= torch.logspace(-0.7, 0.7, case.head_dim)  # every channel of V its own size
    elif case.values == "constant":
        x[2][:] = float(normal(1)) + 2
    elif case.values == "rising":  # by 30 nats over the keys: every tile outweighs the ones before
        rise = torch.linspace(0, 30, case.seqlen_k)[None, None, :, None]
        x[0] = 0.5 * x[0]
        x[0][..., :1] = 8
        x[1][..., :1] = rise[..., :1] / 8 / (case.softmax_scale or 1.0)
    elif case.values == "zeros":  # whole rows, and one operand in its entirety
        x = [t * (torch.rand(t.shape[:3], generator=generator) < 0.5)[..., None] for t in x]
        x[case.number % 3] *= float(case.number % 2)
    elif case.values == "tiny":
        exponent = -100 if case.source == "bf16" else -12
        x[0], x[1] = x[0] * 2.0**exponent, x[1] * 2.0**exponent
    elif case.values == "large":
        x[0], x[1] = 30 * x[0], 30 * x[1]
    return [t.bfloat16() for t in x]


@dataclass
class Inputs:
    """query, key and value as ``attention`` takes them, (B, H, S, D) or (B, S, H, D), on the CPU; ``descales`` of FP8
    operands, a float or a tensor of one of the accepted shapes each."""

    tensors: list[torch.Tensor]
    descales: list[float | torch.Tensor] | None


def inputs_of(case: Case) -> Inputs:
    """The tensors of a case, in their memory orders."""
    given, descales = [], []
    modes = granularities(case.scaling)
    generator = torch.Generator().manual_seed(case.number)
    for x, order, form, granularity in zip(values_of(case), case.orders, case.descales, modes, strict=True):
        if case.half:
            x = x.to(SOURCES[case.source])
        else:
            x, descale = quantize(x, granularity="tensor", dtype=SOURCES[case.source])
            descales.append(_descale(float(descale), form, granularity, x, generator))
        x = laid_out(x, order)
        given.append(x if case.layout == "bhsd" else x.transpose(1, 2))
    return Inputs(given, None if case.half else descales)


def _descale(
    base: float, form: str, granularity: str, x: torch.Tensor, generator: torch.Generator
) -> float | torch.Tensor:
    """Descales of about ``base`` that all differ, in one of the accepted shapes."""
    if form == "float":
        return base
    batch, heads, tokens, head_dim = x.shape
    shapes: dict[str, tuple[int, ...]] = {"()": (), "(1,)": (1,)}
    if granularity != "tensor":
        shapes |= {"(H,)": (heads,), "(B, H)": (batch, heads)}
    finest = {"block": -(-tokens // 128), "token": tokens, "channel": head_dim}
    if granularity in finest:
        shapes["finest"] = (batch, heads, finest[granularity])
    shape = shapes.get(form, list(shapes.values())[-1])
    return base * 2.0 ** (2 * torch.rand(shape, generator=generator) - 1)


def spread(descale: float | torch.Tensor, granularity: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A descale as something that multiplies a (B, H, S, D) tensor: written again here, so that the package's way of
    spreading is tested by it."""
    if not isinstance(descale, torch.Tensor):
        return torch.tensor(descale)
    if descale.dim() == 0 or descale.numel() == 1:
        return descale.reshape(())
    if descale.dim() == 1:
        return descale[None, :, None, None]
    if descale.dim() == 2:
        return descale[:, :, None, None]
    if granularity == "channel":
        return descale[:, :, None, :]
    if granularity == "block":
        return descale[:, :, torch.arange(shape[2]) // 128, None]
    return descale[..., None]


def arguments(case: Case, inputs: Inputs, device: str) -> dict[str, Any]:
    """Keyword arguments of ``attention``, but for out_descale and kernel."""
    options: dict[str, Any] = {"scaling": case.scaling, "precision": case.precision, "layout": case.layout}
    if case.heads != case.kv_heads:
        options["enable_gqa"] = True
    if case.window is not None:
        options |= {"window_size": case.window}
        if case.window != (-1, -1):
            options["causal_alignment"] = case.alignment
    elif case.alignment is not None:
        options |= {"is_causal": True, "causal_alignment": case.alignment}
    if case.scale is not None:
        options["scale"] = case.scale
    if case.smooth_k or case.hadamard or case.precision in INTEGER:  # which have both where nothing is said
        options |= {"smooth_k": case.smooth_k, "hadamard": case.hadamard}
    if case.softcap:
        options["softcap"] = case.softcap
    if (sinks := sinks_of(case)) is not None:
        options["sinks"] = sinks.to(device)
    if case.out is not None:
        options["out_dtype"] = SOURCES[case.out]
    if inputs.descales is not None:
        for name, descale in zip("qkv", inputs.descales, strict=True):
            options[f"{name}_descale"] = descale.to(device) if isinstance(descale, torch.Tensor) else descale
    return options
