"""How many attention calls of a program ran in FP8, and why the others did not.

Every door of the package (its integrations, hooks and drop-in functions) counts here the calls that came through it.
A call of ``attention`` itself is not counted: it is served or raises. Counting is always on. Under torch.compile it is
an operator of the graph, so that each run counts; exported programs do not count, and neither does the replay of a
CUDA graph.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from . import log
from ._ops import NAMESPACE

MOST_KEYS = 1000  # more of them are counted as one, OTHER
OTHER = "other"


class Reason(Enum):
    """Why a door did not serve a call. The list is closed: details go into a text beside it."""

    BIAS = "bias"
    DEVICE = "device"
    DROPOUT = "dropout"
    DTYPE = "dtype"
    GRAD = "grad"
    HEAD_DIM = "head_dim"
    HEADS = "heads"
    KEYWORD = "keyword"
    LAYOUT = "layout"
    MASK = "mask"
    NO_KERNEL = "no_kernel"
    PAGED = "paged"
    POLICY = "policy"
    SHORT = "short"
    SINKS = "sinks"
    SOFTCAP = "softcap"
    VARLEN = "varlen"
    WINDOW = "window"


REMEDIES = {
    Reason.BIAS: "an added bias has no FP8 kernel for this call",
    Reason.DEVICE: "move the tensors to the CPU or to an NVIDIA card of compute capability 8.9 or 9.0",
    Reason.DROPOUT: "set the dropout of attention to 0, or call model.eval()",
    Reason.DTYPE: "run the model in bfloat16 or float16",
    Reason.GRAD: "there is no backward: run under torch.no_grad() or torch.inference_mode()",
    Reason.HEAD_DIM: "a head_dim of 1 to 256 is served, with values that are not wider than keys",
    Reason.HEADS: "the heads of the query must be a multiple of those of key and value",
    Reason.KEYWORD: "the model passes an argument that this version does not know",
    Reason.LAYOUT: "pass dense tensors of 4 dimensions",
    Reason.MASK: "pass a boolean mask (head_dim up to 128), a causal mask, a window or lengths of sequences",
    Reason.NO_KERNEL: "fp8cutlass.explain says which kernel is missing; `fp8cutlass doctor` says what is installed",
    Reason.PAGED: "use a cache whose keys are contiguous",
    Reason.POLICY: "a setting of the program keeps such calls out of FP8",
    Reason.SHORT: "so small a call is faster in 16 bits; integrations.set_minimum_length(0) serves it all the same",
    Reason.SINKS: "attention sinks are not served in this form",
    Reason.SOFTCAP: "capped scores have no FP8 kernel",
    Reason.VARLEN: "sequences of unequal lengths are not served in this form: pass cu_seqlens of int32",
    Reason.WINDOW: "a window is served where it is a band beside the diagonal",
}


class Key(NamedTuple):
    """What calls are counted by."""

    kind: str  # "served" or "fallback"
    door: str  # the integration, for example "transformers"
    where: str  # the class of the module that called, or ""
    what: str  # the id of the kernel, or ""; the value of a Reason


class Count(NamedTuple):
    """Calls, and their work: batch * heads * rows * keys * (head_dim of keys + head_dim of values), half if causal."""

    calls: int
    work: int


_counts: dict[Key, Count] = {}  # since the process began: only ever grows
_base: dict[Key, Count] = {}  # what was counted at the last reset
_lock = threading.Lock()


@dataclass(frozen=True)
class Served:
    """What was counted, by key. ``str()`` says it in a few lines."""

    counts: dict[Key, Count] = field(default_factory=dict)

    def _total(self, kind: str) -> Count:
        found = [count for key, count in self.counts.items() if key.kind == kind]
        return Count(sum(c.calls for c in found), sum(c.work for c in found))

    @property
    def served(self) -> Count:
        """The calls that ran in FP8."""
        return self._total("served")

    @property
    def fallback(self) -> Count:
        """The calls that ran as they would have without this package."""
        return self._total("fallback")

    @property
    def share(self) -> float:
        """The part of the work that ran in FP8, 0 to 1; 0 where nothing was counted."""
        yes, no = self.served, self.fallback
        if yes.work + no.work:
            return yes.work / (yes.work + no.work)
        return yes.calls / max(1, yes.calls + no.calls)

    def __str__(self) -> str:
        yes, no = self.served.calls, self.fallback.calls
        if not yes + no:
            return "no attention call came through a door of fp8cutlass"
        lines = [
            f"served {yes} of {yes + no} attention calls in FP8 ({yes / (yes + no):.0%}), {self.share:.0%} of the work"
        ]
        for key, count in sorted(self.counts.items(), key=lambda item: (item[0].kind == "served", -item[1].calls)):
            at = " ".join(part for part in (key.door, key.where) if part)
            if key.kind == "fallback":
                lines.append(f"  not served: {at} x{count.calls}: {key.what} ({remedy(key.what)})")
            else:
                lines.append(f"  served: {at} x{count.calls}{f': {key.what}' if key.what else ''}")
        return "\n".join(lines)


def remedy(reason: str) -> str:
    """What to do about a reason, one line."""
    return "too many different keys to tell" if reason == OTHER else REMEDIES[Reason(reason)]


def work(batch: int, heads: int, rows: int, keys: int, width: int, *, causal: bool = False) -> int:
    """The work of a call. ``width`` is the head_dim of the keys plus that of the values."""
    whole = batch * heads * rows * keys * width
    return whole // 2 if causal else whole


def count_served(door: str, where: str = "", kernel: str = "", work: int = 0, at: torch.Tensor | None = None) -> None:
    """Count a call that runs in FP8. ``at`` is one of its tensors, which says where a compiled graph runs."""
    _count(at, "served", door, where, kernel, "", work)


def count_fallback(
    door: str, where: str, reason: Reason, text: str = "", work: int = 0, at: torch.Tensor | None = None
) -> None:
    """Count a call that does not run in FP8. The first of each (door, where, reason) is logged with its remedy.

    ``text`` is the detail for that line. ``at`` is one of the call's tensors, as in ``count_served``.
    """
    _count(at, "fallback", door, where, reason.value, text, work)


def _count(at: torch.Tensor | None, kind: str, door: str, where: str, what: str, text: str, work: int) -> None:
    """A dict that traced code changes would compile the program again at each call; an operator does not."""
    if not torch.compiler.is_compiling():
        _add(at, kind, door, where, what, text, work)
    elif not torch.compiler._is_exporting_flag:  # `is_exporting()` is True for all that torch 2.11 compiles
        _operator(at, kind, door, where, what, text, work)


def _add(at: torch.Tensor | None, kind: str, door: str, where: str, what: str, text: str, work: int) -> None:
    key = Key(kind, door, where, what)
    with _lock:
        known = _counts.get(key)
        if known is None and len(_counts) >= MOST_KEYS:
            key = Key(kind, OTHER, "", OTHER)
            known = _counts.get(key)
        _counts[key] = Count(1, work) if known is None else Count(known.calls + 1, known.work + work)
    if known is None and kind == "fallback":
        message = "%s %s: attention is not served in FP8: %s%s; %s"
        _logger.info(message, door, where, what, f" ({text})" if text else "", remedy(key.what))


_logger = log.requested("fallback") or logging.getLogger("fp8cutlass.fallback")

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_library.define("count(Tensor? at, str kind, str door, str where, str what, str text, SymInt work) -> ()")
_library.impl("count", _add, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::count", lambda *args: None, lib=_library)
_operator = getattr(torch.ops, NAMESPACE).count.default
_register_effectful_op(_operator, _EffectType.ORDERED)  # else graphs drop it, as nothing reads a result


def _since(before: dict[Key, Count]) -> Served:
    with _lock:
        now = dict(_counts)
    less = {
        key: Count(c.calls - before[key].calls, c.work - before[key].work) if key in before else c
        for key, c in now.items()
    }
    return Served({key: count for key, count in less.items() if count.calls})


def served() -> Served:
    """What was counted since the process began or ``stats.reset()``. ``print`` shows it in a few lines."""
    return _since(_base)


def reset() -> None:
    """Let ``served()`` count from zero. What ``collect`` and ``expect`` count is not changed."""
    with _lock:
        _base.clear()
        _base.update(_counts)


class Collected:
    """What is counted while a ``collect`` lasts. Read it at any time, also after its end."""

    def __init__(self) -> None:
        with _lock:
            self._before = dict(_counts)
        self._result: Served | None = None

    def _end(self) -> None:
        self._result = _since(self._before)

    def result(self) -> Served:
        """What was counted until now, or until the end."""
        return _since(self._before) if self._result is None else self._result

    def __str__(self) -> str:
        return str(self.result())


@contextmanager
def collect() -> Iterator[Collected]:
    """Count the calls of a block: ``with collect() as seen: model(...)``, then ``seen.result()`` or ``print(seen)``.

    Blocks may lie in one another. The calls of other threads count as well.
    """
    seen = Collected()
    try:
        yield seen
    finally:
        seen._end()


class ShareError(RuntimeError):
    """Less of the attention ran in FP8 than ``expect`` was told."""


@contextmanager
def expect(min_share: float = 0.9) -> Iterator[Collected]:
    """Raise ShareError at the end of a block if less than ``min_share`` (0 to 1) of its attention ran in FP8.

    The share is one of work. A block in which no call was counted raises, too. An exception of the block goes before.
    """
    with collect() as seen:
        yield seen
    result = seen.result()
    if not result.counts or result.share < min_share:
        raise ShareError(f"expected {min_share:.0%} of the attention in FP8: {result}")
