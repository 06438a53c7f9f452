"""The mask functions: those of transformers, which also note on a mask what band it is.

Which pattern a mask function of transformers stands for is read from the functions that it is made of. ``KNOWN``
says whether small masks show that these still mean what this module takes them for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import masking_utils as mu

from .band import CAUSAL, FULL, Band, of_sequences, padded, tag

# The code of the functions that each of these makes.
_AND = mu.and_masks(mu.causal_mask_function).__code__
_WINDOW = mu.sliding_window_overlay(1).__code__
_TWO_SIDED = mu.sliding_window_bidirectional_overlay(1).__code__
_remap = getattr(mu, "remap_positions_for_packed_sequence", None)  # not in 5.20
_REMAP = None if _remap is None else _remap(mu.causal_mask_function, torch.zeros(1, 1)).__code__
_PACKED = mu.packed_sequence_mask_function(torch.zeros(1, 1)).__code__


def recognise(function: Callable[..., Any] | None) -> tuple[Band, torch.Tensor | None] | None:
    """The band that a mask function describes, and for packed sequences to which each token belongs; None if neither.

    The band is that of row i and key i at one place; who builds the mask knows offsets and padding.
    """
    if function is mu.causal_mask_function:
        return CAUSAL, None
    if function is mu.bidirectional_mask_function:
        return FULL, None
    if getattr(function, "__code__", None) is not _AND:
        return None
    parts = _held(function).get("mask_functions", ())
    if len(parts) != 2:
        return None
    code, held = getattr(parts[0], "__code__", None), _held(parts[0])
    if code is _WINDOW and parts[1] is mu.causal_mask_function:
        width = held.get("sliding_window")
        return (Band(left=width - 1, right=0), None) if isinstance(width, int) and width > 0 else None
    if code is _TWO_SIDED and parts[1] is mu.bidirectional_mask_function:
        width = held.get("sliding_window")
        return (Band(left=width, right=width), None) if isinstance(width, int) and width >= 0 else None
    if getattr(parts[1], "__code__", None) is _PACKED:
        remapped = code is not None and code is _REMAP
        within, index = recognise(held.get("mask_function") if remapped else parts[0]), _held(parts[1])
        sequence = index.get("packed_sequence_mask")
        if within is not None and within[1] is None and isinstance(sequence, torch.Tensor):
            return within[0], sequence
    return None


def _held(function: Any) -> dict[str, Any]:
    """What a function made inside another one has kept, by name."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True)) if code and cells else {}


def _known() -> bool:
    """Whether the installed version builds the masks that ``recognise`` takes its functions for."""
    index = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]], device="cpu")  # whatever the default device is
    place = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]], device="cpu")
    functions: list[Callable[..., Any]] = [mu.causal_mask_function, mu.bidirectional_mask_function]
    functions += [mu.sliding_window_causal_mask_function(3), mu.sliding_window_bidirectional_mask_function(2)]
    within = functions[::2] + ([] if _remap is None else [_remap(function, place) for function in functions[::2]])
    functions += [mu.and_masks(function, mu.packed_sequence_mask_function(index)) for function in within]
    for function in functions:
        built = mu.sdpa_mask(1, 8, 8, mask_function=function, allow_is_causal_skip=False)
        if (found := recognise(function)) is None:
            return False
        band = found[0] if found[1] is None else of_sequences(found[0], found[1])
        if not torch.equal(band.dense(1, 8, 8, index.device), built):
            return False
    return True


KNOWN = _known()


def _traced(function: Any, arguments: dict[str, Any]) -> Band | None:
    """The same while torch.compile traces, which cannot look into functions.

    transformers may leave a causal mask out where ``allow_is_causal_skip`` is set, if there are fewer keys than
    ``local_size``. So such a mask is causal, with a window of that many keys or in chunks of as many.
    """
    local, config = arguments.get("local_size"), arguments.get("config")
    if local is None:
        simple = {mu.causal_mask_function: CAUSAL, mu.bidirectional_mask_function: FULL}
        return simple.get(function)
    if config is None or local != getattr(config, "sliding_window", None):
        return None
    if arguments.get("allow_is_causal_skip", True) and getattr(config, "attention_chunk_size", None) is None:
        return Band(left=local - 1, right=0)
    return None


def band_of(
    function: Callable[..., Any],
    attention_mask: torch.Tensor | None,
    rows: int,
    keys: int,
    q_offset: int | torch.Tensor,
    kv_offset: int,
    arguments: dict[str, Any],
) -> Band | None:
    """The band of a mask that transformers is about to build, or None. Waits for the device once, twice with a
    StaticCache; under torch.compile, where it cannot wait, it knows neither padding nor such a cache."""
    if torch.compiler.is_compiling():
        if attention_mask is not None or isinstance(q_offset, torch.Tensor):
            return None
        found = _traced(function, arguments)
        return None if found is None else Band(found.left, found.right, q_offset - kv_offset)
    recognised = recognise(function)
    if recognised is None:
        return None
    band, index = recognised
    if index is not None:
        return of_sequences(band, index) if attention_mask is None and index.shape[1] == rows == keys else None
    band = Band(band.left, band.right, int(q_offset) - kv_offset)
    if attention_mask is None or attention_mask.dim() != 2:
        return band if attention_mask is None else None
    valid = mu.prepare_padding_mask(attention_mask, keys, kv_offset)[:, kv_offset : kv_offset + keys].bool()
    if band.right == 0:  # what lies behind the last row is hidden, as in a StaticCache
        valid = valid[:, : rows + band.shift]
    return padded(band, valid, rows, keys)


def full_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    **rest: Any,
) -> torch.Tensor | None:
    """The mask of transformers for ``sdpa``, (batch, 1, rows, keys) bool or None, with a note of what it is."""
    function = mu.causal_mask_function if mask_function is None else mask_function
    band = None
    if KNOWN:
        band = band_of(function, attention_mask, q_length, kv_length, q_offset, kv_offset, rest)
    mask = mu.sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=function,
        attention_mask=attention_mask,
        **rest,
    )
    if mask is None or band is None:
        return mask
    if q_length == 1 and not torch.compiler.is_compiling():
        mask = mask.contiguous()  # which `generate` makes of it, and the copy would be a mask like any other
    return tag(mask, band)


def flash_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    **rest: Any,
) -> torch.Tensor | None:
    """The mask of transformers for FlashAttention, (batch, keys) bool or None; for a pattern that is no band the mask
    for ``sdpa``, which FlashAttention would not see."""
    function = mu.causal_mask_function if mask_function is None else mask_function
    given = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": function,
        "attention_mask": attention_mask,
        **rest,
    }
    tracing = torch.compiler.is_compiling()
    if tracing and attention_mask is None and not isinstance(q_offset, torch.Tensor):
        known = _traced(function, rest) is not None
    else:
        known = not tracing and recognise(function) is not None
    if not KNOWN or not known:
        return mu.sdpa_mask(**{**given, "allow_is_causal_skip": False})
    mask = mu.flash_attention_mask(**given)
    if mask is None and not tracing:
        written = int(q_offset) + q_length - kv_offset
        if written < kv_length:  # of a StaticCache
            return torch.ones(batch_size, written, dtype=torch.bool, device=rest.get("device", "cpu"))
    return mask
