"""The arguments of ``attention`` that are no tensors, and what each accepts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..dtypes import HALF_DTYPES, INTEGER_SCALING
from ..errors import UnsupportedError
from ..manifest import INTEGER
from ..quant.descale import SCALE_MAX

FAR = 1 << 30  # keys before or after a row's own, of a window without an end there
MERGE = "merge"  # of return_lse: from the sums of P that a kernel makes anyway


class Options(NamedTuple):
    """``attention`` documents them. In a signature they stand in this order."""

    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    layout: str = "bhsd"
    scaling: str = "block"
    precision: str = "fast"
    smooth_k: bool | None = None
    hadamard: bool | None = None
    out_dtype: torch.dtype | None = None
    return_lse: bool | str = False
    return_amax: bool = False
    causal_alignment: str = "top_left"
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    kernel: str | None = None
    fallback: str = "error"
    backward: str = "none"
    causal_offset: int | None = None


CHOICES = {
    "layout": ("bhsd", "bshd"),
    "precision": ("fast", "balanced", "accurate", "high", *INTEGER),
    "causal_alignment": ("top_left", "bottom_right"),
    "fallback": ("error", "sdpa"),
    "backward": ("none", "flash"),
}
TRANSFORMS = {  # of operands that are quantised inside, in the order in which they are applied; the text of `explain`
    "smooth_k": "the mean of some keys of a head subtracted from all (smooth_k)",
    "hadamard": "Q and K rotated by a Hadamard matrix (hadamard)",
}
SMALLEST_CAP = 2.0**-63
F16_SCORES = ("fast", "balanced")  # precisions whose kernels want operands in the range of f16 scores


def _choice(name: str, given: Any) -> str | None:
    return one_of(name, given, CHOICES[name])


def one_of(name: str, given: Any, accepted: Sequence[str]) -> str | None:
    """Why ``given`` is none of the accepted words; None if it is one."""
    if isinstance(given, str) and given in accepted:
        return None
    return f"{name} must be one of {', '.join(accepted)}, got {given!r}"


def flag(name: str, given: Any) -> str | None:
    """Why ``given`` is neither True nor False; None if it is."""
    return None if isinstance(given, bool) else f"{name} must be True or False, got {given!r}"


def optional_flag(name: str, given: Any) -> str | None:
    """Why ``given`` is neither True nor False nor None; None if it is."""
    return None if given is None else flag(name, given)


def transformed(options: Options, name: str) -> bool:
    """Whether Q and K are changed before they are quantised; None is as the precision has it: 8-bit integers, of one
    step, need it."""
    given = getattr(options, name)
    return options.precision in INTEGER if given is None else given


def _scaling(name: str, given: Any) -> str | None:  # which words there are, the manifest says
    return None if isinstance(given, str) else f"{name} must be the name of a scaling mode, got {given!r}"


def wrong_kernel(name: str, given: Any) -> str | None:
    """Why ``given`` is no id of a variant and not None; None if it is."""
    if given is None or (isinstance(given, str) and given):
        return None
    return f"{name} must be the id of a variant or None, got {given!r}"


def wrong_scale(name: str, given: Any) -> str | None:
    """Why ``given`` is no softmax scale; None if it is one."""
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        return f"{name} must be a float or None, got {type(given).__name__}"
    if not abs(given) <= SCALE_MAX:  # false for NaN; math.isfinite is no graph operation
        return f"{name} must be finite in float32, also times log2(e), got {given}"
    return None


def wrong_softcap(name: str, given: Any) -> str | None:
    """Why ``given`` is no cap of logits; None if it is one."""
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 <= given <= 2.0**64:
        return f"{name} must be 0 or a positive number up to 2^64, got {given!r}"
    if given and given < SMALLEST_CAP:
        return f"{name} must be 0 or at least 2^-63, got {given!r}"
    return None


def wrong_sinks(name: str, given: Any, heads: int, device: torch.device) -> str | None:
    """Why ``given`` has no logit for each of ``heads``; None if it has, or is None."""
    if given is None:
        return None
    kinds = (*HALF_DTYPES, torch.float32)
    fits = isinstance(given, torch.Tensor) and tuple(given.shape) == (heads,)
    if fits and given.dtype in kinds and given.device == device:
        return None
    return f"{name} must be ({heads},) on {device}, bfloat16, float16 or float32"


def wrong_longest(name: str, given: Any) -> str | None:
    """Why ``given`` is no number of tokens; None if it is one."""
    if isinstance(given, (int, torch.SymInt)) and not isinstance(given, bool) and given >= 0:
        return None
    return f"{name} must be an integer, at least 0, got {given!r}"


def wrong_window(name: str, given: Any) -> str | None:
    """Why ``given`` is no window; None if it is one."""
    ends = given if isinstance(given, (tuple, list)) else ()
    if len(ends) == 2 and all(isinstance(x, int) and not isinstance(x, bool) and x >= -1 for x in ends):
        return None
    return f"{name} must be (left, right), two integers from -1 up, got {given!r}"


def _lse(name: str, given: Any) -> str | None:
    if isinstance(given, bool) or (isinstance(given, str) and given == MERGE):
        return None
    return f"{name} must be True, False or {MERGE!r}, got {given!r}"


def _offset(name: str, given: Any) -> str | None:
    if given is None or (isinstance(given, (int, torch.SymInt)) and not isinstance(given, bool) and -FAR < given < FAR):
        return None
    return f"{name} must be an integer between -{FAR} and {FAR}, or None, got {given!r}"


# Of each option what is wrong with a value by itself. What needs the tensors is in :mod:`.checks`.
RULES: dict[str, Callable[[str, Any], str | None]] = {
    "layout": _choice,
    "precision": _choice,
    "causal_alignment": _choice,
    "fallback": _choice,
    "backward": _choice,
    "scaling": _scaling,
    "is_causal": flag,
    "enable_gqa": flag,
    "smooth_k": optional_flag,
    "hadamard": optional_flag,
    "return_lse": _lse,
    "return_amax": flag,
    "kernel": wrong_kernel,
    "scale": wrong_scale,
    "window_size": wrong_window,
    "causal_offset": _offset,
    "softcap": wrong_softcap,
}


def visible(options: Options) -> tuple[int | None, int | None]:
    """How many keys a row i sees before and after key i, or key ``i + Sk - Sq`` with bottom_right; None for all.
    ``is_causal`` ends a window at the row's own key, and ``causal_offset`` says which one that is."""
    left, right = options.window_size
    if options.is_causal:
        right = 0
    own = 0 if options.causal_offset is None else options.causal_offset
    return (None if left < 0 else left - own), (None if right < 0 else right + own)


def check_options(options: Options) -> None:
    """UnsupportedError with everything that is wrong with options by themselves."""
    wrong = []
    for name, rule in RULES.items():
        reason = rule(name, getattr(options, name))
        if reason is not None:
            wrong.append(reason)
    no_window = options.is_causal is False and options.window_size in ((-1, -1), [-1, -1])
    if no_window and options.causal_alignment == "bottom_right":
        wrong.append(
            "causal_alignment='bottom_right' goes with is_causal=True or a window_size, got is_causal=False and none"
        )
    if options.causal_offset is not None and no_window:
        wrong.append(
            f"causal_offset={options.causal_offset} goes with is_causal=True or a window_size, got is_causal=False and "
            "none"
        )
    if options.causal_offset is not None and options.causal_alignment == "bottom_right":
        wrong.append(f"causal_offset={options.causal_offset} excludes causal_alignment='bottom_right'")
    if not wrong and options.precision in INTEGER and options.scaling != INTEGER_SCALING:
        wrong.append(
            f"precision={options.precision!r} has scaling={INTEGER_SCALING!r} alone, got scaling={options.scaling!r}"
        )
    if options.smooth_k is True and options.softcap:
        wrong.append("softcap bends logits, and smooth_k moves them: the two do not go together")
    if wrong:
        raise UnsupportedError(*wrong)
