"""Adapters with a fault planted in them: the tests of the adapters must notice each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import test_comfy
import test_flash
import test_sage
import test_sdpa
import torch
from where import cpu_alone

from fp8cutlass.integrations import comfy, dense, flash, provider, sage


def changed(function: Callable[..., Any], **changes: Any) -> Callable[..., Any]:
    """``function`` with some keywords replaced, whatever it is called with."""
    return lambda *args, **kwargs: function(*args, **{**kwargs, **changes})


def without(function: Callable[..., Any], at: int, value: Any) -> Callable[..., Any]:
    """``function`` with its positional argument number ``at`` replaced."""
    return lambda *args, **kwargs: function(*args[:at], value, *args[at + 1 :], **kwargs)


def ones(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with descales of 1."""

    def call(*args: Any, **kwargs: Any) -> Any:
        names = [name for name, x in kwargs.items() if name.endswith("_descale") and x is not None]
        return function(*args, **{**kwargs, **{name: torch.ones_like(kwargs[name]) for name in names}})

    return call


def no_word(func: Any, *args: Any, **kwargs: Any) -> Any:
    """A node that takes ComfyUI's word against recursion away."""
    kwargs.pop("_inside_attn_wrapper", None)
    return ATTEND(func, *args, **kwargs)


def unmasked(q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0) -> Any:
    """A check that does not see masks."""
    return REFUSAL(q, k, v, None, dropout_p)


ATTEND, REFUSAL = comfy._attend, dense.refusal
MASK = 3  # place of attn_mask in dense's call of attention
CAUSAL = 5  # place of is_causal in dense's call of attention
SCALE = 6

by_mode, by_provider = test_sdpa.BY_MODE, test_sdpa.BY_PROVIDER
descales = partial(test_flash.test_descales_are_those_of_flash_attention_3, "kv_heads")
flash_masks = partial(test_flash.test_masks_are_aligned_with_the_end, rows=40)

MUTANTS: dict[str, tuple[Any, str, Any, Callable[[], None]]] = {
    "mode: mask not seen": (
        dense, "refusal", unmasked,
        lambda: test_sdpa.test_others_run_as_before_bit_by_bit(by_mode, "mask"),
    ),
    "mode: mask dropped": (
        dense, "attention", without(dense.attention, MASK, None),
        lambda: test_sdpa.test_a_boolean_mask_is_served("padding"),
    ),
    "provider: mask not seen": (
        dense, "refusal", unmasked,
        lambda: test_sdpa.test_others_run_as_before_bit_by_bit(by_provider, "mask"),
    ),
    "mode: causal lost": (
        dense, "attention", without(dense.attention, CAUSAL, False),
        lambda: test_sdpa.test_calls_are_served(by_mode, "causal"),
    ),
    "mode: scale lost": (
        dense, "attention", without(dense.attention, SCALE, None),
        lambda: test_sdpa.test_calls_are_served(by_mode, "scale"),
    ),
    "mode: autocast ignored": (
        dense, "under_autocast", lambda tensors, **_: tensors,
        lambda: test_sdpa.test_autocast_casts_before(by_mode),
    ),
    "provider: descales ignored": (
        provider, "attention", ones(provider.attention),
        lambda: test_sdpa.test_quantized_operands_with_a_descale_for_each_kv_head(False),
    ),
    "sage: mask dropped": (
        dense, "attention", without(dense.attention, MASK, None),
        lambda: test_sage.test_a_mask_is_applied("HND", torch.bool),
    ),
    "sage: causal lost": (
        sage, "attend", changed(sage.attend, is_causal=False),
        lambda: test_sage.test_results_and_lse("NHD", True, True),
    ),
    "sage: keys not smoothed": (
        sage, "attend", changed(sage.attend, accuracy={}),
        test_sage.test_smoothing_is_the_default_and_helps_keys_that_share_a_bias,
    ),
    "flash: causal lost": (
        flash, "attention", changed(without(flash.attention, CAUSAL, False), causal_alignment="top_left"),
        lambda: flash_masks({"causal": True}, -1, 0),
    ),
    "flash: aligned with the first key": (
        flash, "attention", changed(flash.attention, causal_alignment="top_left"),
        lambda: flash_masks({"causal": True}, -1, 0),
    ),
    "flash: window lost": (
        flash, "attention", changed(flash.attention, window_size=(-1, -1), causal_alignment="top_left"),
        lambda: flash_masks({"window_size": (8, 4)}, 8, 4),
    ),
    "flash: descales ignored": (flash, "attention", ones(flash.attention), lambda: descales(False)),
    "flash: descales of ragged batches ignored": (
        flash, "attention_varlen", ones(flash.attention_varlen), lambda: descales(True),
    ),
    "comfy: mask not seen": (
        dense, "refusal", unmasked,
        lambda: test_comfy.test_what_is_not_served_is_comfys_own({"mask": test_comfy.ADDED}, "mask"),
    ),
    "comfy: mask dropped": (
        dense, "attention", without(dense.attention, MASK, None), test_comfy.test_a_boolean_mask_is_served,
    ),
    "comfy: scale lost": (
        comfy, "attend", changed(comfy.attend, scale=None),
        lambda: test_comfy.test_all_forms_of_operands_and_results(False, False, 0.05),
    ),
    "comfy: word against recursion lost": (
        comfy, "_attend", no_word, test_comfy.test_the_word_that_ends_recursion_is_passed_on,
    ),
}  # fmt: skip


NO_MASK = cpu_alone("torch asks no flash attention of a card for a call with a mask")
CASES = [pytest.param(name, marks=NO_MASK if name == "provider: mask not seen" else ()) for name in MUTANTS]


@pytest.mark.parametrize("name", CASES)
def test_a_planted_fault_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, attribute, fault, noticing = MUTANTS[name]
    noticing()  # not without the fault
    monkeypatch.setattr(module, attribute, fault)
    with pytest.raises((AssertionError, RecursionError, KeyError)):
        noticing()
