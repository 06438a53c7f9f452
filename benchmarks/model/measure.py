"""Times of whole forwards. On a card forwards are CUDA graphs that take turns; on the CPU they run one after the other,
which shows that the command works and nothing about speed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from ..decode import or_infinite
from ..grid import Settings
from ..peers.base import Refused
from ..results import FAILED, OK, UNAVAILABLE, WRONG, Timed, first_line
from ..turns import ErrorOf, Launch, all_timed
from . import cached, dense
from .dense import BACKENDS, FA3, HOST_SDPA, OURS, WITHOUT, Source, Way
from .layers import Attend
from .llama import Llama
from .problems import Problem
from .video import Video

# Errors add up over layers. A wrong mask, head or scale makes far more than these limits.
LIMITS = MappingProxyType({"bf16": 0.1, "fp8": 0.3})
# Of one call on the operands of the reference.
CALL_LIMITS = MappingProxyType({"bf16": 0.02, "fp8": 0.1})


@dataclass(frozen=True)
class ModelTime(Timed):
    """What was found of one attention in one model. ``without_us`` is the time of the same forward without attention,
    append included. ``error`` is that of the forward's result against one whose attention is float32, ``call_error``
    the largest of its calls, each on the operands of that forward."""

    problem: str
    layers: int
    of: int
    batch: int
    tokens: int
    keys: int
    contender: str
    precision: str
    status: str
    reason: str = ""
    without_us: float | None = None
    call_error: float | None = None

    @property
    def share(self) -> float | None:
        """Of attention in the time of a forward, 0 to 1."""
        if self.median_us is None or self.without_us is None:
            return None
        return 1 - self.without_us / self.median_us

    @property
    def model_ms(self) -> float | None:
        """All layers of the model, if each takes what a timed one does."""
        return None if self.median_us is None else self.median_us * self.of / self.layers * 1e-3


def row_of(problem: Problem, name: str, precision: str, status: str, reason: str = "", **more: Any) -> ModelTime:
    sizes = (problem.layers, problem.of, problem.batch, problem.tokens, problem.keys)
    return ModelTime(problem.name, *sizes, name, precision, status, reason, **more)


def sources_of(
    problem: Problem, device: torch.device, peers: bool = True
) -> tuple[dict[str, Source], Callable[[], Attend]]:
    """The ways to attend by name, and what makes the reference's."""
    names = list(BACKENDS) if device.type == "cuda" else [HOST_SDPA]
    found: dict[str, Source] = {WITHOUT: lambda: Way(WITHOUT, "bf16", dense.no_attention)}
    if problem.name != "decode":
        found |= {name: partial(dense.sdpa, name) for name in names}
        found |= {FA3: dense.fa3} if peers else {}
        return found | {OURS: dense.ours}, lambda: dense.exact
    caches = cached.Caches(problem, device)
    found |= {name: partial(cached.sdpa, name, caches) for name in names}
    found |= {FA3: partial(cached.fa3, caches)} if peers else {}
    return found | {OURS: partial(cached.ours, caches)}, lambda: cached.reference(caches)


def measure(problem: Problem, device: torch.device, settings: Settings, peers: bool = True) -> list[ModelTime]:
    """Rows of one model, the forward without attention among them."""
    gc.collect()  # not during a capture, where a graph that goes may call the driver
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with torch.no_grad():
        model = Video(problem, device) if problem.name == "video" else Llama(problem, device)
        sources, reference = sources_of(problem, device, peers)
        rows, ways = _found(problem, sources)
        attend, calls = compared(reference(), ways)
        wanted = model.forward(attend).float()
        contenders: list[tuple[ModelTime, Launch, ErrorOf]] = []
        for way in ways:
            row, good = _judged(row_of(problem, way.name, way.precision, OK), calls.get(way.name))
            if not good:
                rows.append(row)
                continue
            error_of: ErrorOf = (lambda out: 0.0) if way.name == WITHOUT else partial(_error, wanted)
            contenders.append((row, partial(model.forward, way.attend), error_of))
        rows += all_timed(contenders, device, settings, LIMITS)
    base = next((row.median_us for row in rows if row.contender == WITHOUT), None)
    return [replace(row, without_us=base) if row.median_us is not None else row for row in rows]


def _found(problem: Problem, sources: Mapping[str, Source]) -> tuple[list[ModelTime], list[Way]]:
    """The ways that there are, and rows of those that there are not."""
    rows: list[ModelTime] = []
    ways: list[Way] = []
    for name, source in sources.items():
        try:
            ways.append(source())
        except (ImportError, OSError, Refused) as refusal:
            rows.append(row_of(problem, name, "", UNAVAILABLE, first_line(refusal)))
        except Exception as failure:  # one that breaks must not end the run
            rows.append(row_of(problem, name, "", FAILED, first_line(failure)))
    return rows, ways


def compared(reference: Attend, ways: Sequence[Way]) -> tuple[Attend, dict[str, float | Exception]]:
    """The reference, which hands each call to all ways, too, and for each the largest error of its calls, or what it
    raised first. A forward by one way would give the errors of other layers to a call as well."""
    found: dict[str, float | Exception] = {way.name: 0.0 for way in ways if way.name != WITHOUT}

    def attend(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, cross: bool = False
    ) -> torch.Tensor:
        wanted = reference(layer, q, k, v, causal=causal, cross=cross)
        for way in ways:
            largest = found.get(way.name)
            if isinstance(largest, float):
                try:
                    out = way.attend(layer, q, k, v, causal=causal, cross=cross)
                    found[way.name] = max(largest, _error(wanted.float(), out))
                except Exception as failure:  # one that breaks must not end the run
                    found[way.name] = failure
        return wanted

    return attend, found


def _judged(row: ModelTime, call: float | Exception | None) -> tuple[ModelTime, bool]:
    """The row with what its calls gave, and whether a forward is worth timing."""
    if isinstance(call, Exception):
        status = UNAVAILABLE if isinstance(call, Refused) else FAILED
        return replace(row, status=status, reason=first_line(call)), False
    if call is not None and call > CALL_LIMITS[row.precision]:
        reason = f"relative L2 error {call:.3g} of a call, the limit is {CALL_LIMITS[row.precision]:g}"
        return replace(row, status=WRONG, reason=reason, call_error=call), False
    return replace(row, call_error=call), True


def _error(wanted: torch.Tensor, out: torch.Tensor) -> float:
    return or_infinite(float((out.float() - wanted).norm() / wanted.norm()))
