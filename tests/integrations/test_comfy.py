"""The override for ComfyUI, called as ComfyUI's decorator calls one."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import relative_l2
from where import randn

from fp8cutlass import stats
from fp8cutlass.integrations.comfy import OPTION, override, patched

NODE = Path(__file__).resolve().parents[2] / "examples" / "comfyui" / "fp8cutlass_attention.py"
BOUND = 0.06
HEADS, WIDTH = 4, 64


def decorated(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """What ComfyUI puts around each attention function: the override is asked once, with a word that says so."""

    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "_inside_attn_wrapper" in kwargs:
            return function(*args, **kwargs)
        chosen = (kwargs.get("transformer_options") or {}).get(OPTION)
        kwargs["_inside_attn_wrapper"] = True
        return function(*args, **kwargs) if chosen is None else chosen(call, *args, **kwargs)

    return call


@decorated
def stock(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    mask: torch.Tensor | None = None,
    attn_precision: torch.dtype | None = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """ComfyUI's way to torch's attention."""
    if not skip_reshape:
        width = q.shape[2] // heads
        q, k, v = (x.unflatten(2, (-1, width)).transpose(1, 2) for x in (q, k, v))
    gqa = kwargs.get("enable_gqa", False)
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=kwargs.get("scale"), enable_gqa=gqa)
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


def operands(flat: bool = True, width: int = WIDTH, kv_heads: int = HEADS) -> tuple[torch.Tensor, ...]:
    made = [randn(2, n, h, width, seed=n + h) for n, h in ((40, HEADS), (24, kv_heads), (25, kv_heads))]
    made[2] = made[2][:, :24]
    return tuple(x.flatten(2) if flat else x.transpose(1, 2) for x in made)


def run(*args: Any, chosen: Any = None, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, int]]:
    """The result with the override, without it, and the counted calls."""
    options = {OPTION: override() if chosen is None else chosen}
    with stats.collect() as seen:
        out = stock(*args, transformer_options=options, **kwargs)
    counted = {key.what or key.kind: count.calls for key, count in seen.result().counts.items()}
    return out, stock(*args, **kwargs), counted


@pytest.mark.parametrize("skip_reshape", [False, True])
@pytest.mark.parametrize("skip_output_reshape", [False, True])
@pytest.mark.parametrize("scale", [None, 0.05])
def test_all_forms_of_operands_and_results(skip_reshape: bool, skip_output_reshape: bool, scale: float | None) -> None:
    given = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
    given |= {} if scale is None else {"scale": scale}
    out, want, counted = run(*operands(not skip_reshape), HEADS, **given)
    assert out.shape == want.shape and relative_l2(out, want.double()) < BOUND and counted == {"served": 1}


@pytest.mark.parametrize("flat", [False, True])
def test_keys_with_fewer_heads(flat: bool) -> None:
    out, want, counted = run(*operands(flat, kv_heads=2), HEADS, skip_reshape=not flat, enable_gqa=True)
    assert relative_l2(out, want.double()) < BOUND and counted == {"served": 1}


MASK = torch.ones(40, 24, dtype=torch.bool).tril(3)
ADDED = torch.zeros(40, 24, dtype=torch.bfloat16).masked_fill(~MASK, -torch.inf)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"mask": ADDED}, "mask"),
        ({"low_precision_attention": False}, "policy"),
        ({"attn_precision": torch.float32}, "policy"),
        ({"temperature": 2.0}, "keyword"),
        ({"skip_output_reshape": True, "mask": ADDED, "scale": 0.05}, "mask"),
    ],
)
def test_what_is_not_served_is_comfys_own(given: dict[str, Any], why: str) -> None:
    out, want, counted = run(*operands(), HEADS, **given)
    assert torch.equal(out, want) and counted == {why: 1}


def test_a_boolean_mask_is_served() -> None:
    out, want, counted = run(*operands(), HEADS, mask=MASK)
    assert counted == {"served": 1} and 0 < relative_l2(out, want.double()) < BOUND
    assert relative_l2(stock(*operands(), HEADS), want.double()) > 2 * BOUND, "the mask changes the result"


def test_a_mask_as_the_fifth_argument_and_wide_heads() -> None:
    out, want, counted = run(*operands(), HEADS, ADDED)
    assert torch.equal(out, want) and counted == {"mask": 1}
    out, want, counted = run(*operands(width=320), HEADS)
    assert torch.equal(out, want) and counted == {"head_dim": 1}
    out, want, counted = run(*(x.float() for x in operands()), HEADS)
    assert torch.equal(out, want) and counted == {"dtype": 1}


def test_harmless_keywords_do_not_keep_a_call_out() -> None:
    _, _, counted = run(
        *operands(), HEADS, low_precision_attention=True, attn_precision=torch.bfloat16, temperature=None
    )
    assert counted == {"served": 1}


def test_an_override_that_was_there_still_changes_the_call() -> None:
    """Here it adds a mask. Replaced, the mask would be lost; asked afterwards, it would never be called."""

    def earlier(func: Any, q: Any, k: Any, v: Any, heads: int, mask: Any = None, **kwargs: Any) -> torch.Tensor:
        return func(q, k, v, heads, mask=ADDED, **kwargs)

    out, _, counted = run(*operands(), HEADS, chosen=override(earlier))
    assert torch.equal(out, stock(*operands(), HEADS, mask=ADDED)) and counted == {"mask": 1}

    def doubles(func: Any, q: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * func(q, *args, **kwargs)

    out, want, counted = run(*operands(), HEADS, chosen=override(doubles))
    assert relative_l2(out, 2 * want.double()) < BOUND and counted == {"served": 1}


def test_the_word_that_ends_recursion_is_passed_on() -> None:
    """Without it the decorated function asks the override again, without end."""
    seen = {}

    def bare(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.update(kwargs)
        return args[0]

    override()(bare, *operands(), HEADS, mask=ADDED, _inside_attn_wrapper=True, transformer_options={})
    assert seen["_inside_attn_wrapper"] is True and seen["transformer_options"] == {}


class Model:
    """A ModelPatcher, as far as an override is concerned."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.model_options = options

    def clone(self) -> Model:
        return Model(copy.copy(self.model_options))


@pytest.mark.parametrize("options", [{}, {"transformer_options": {"block": 1}}])
def test_the_node_patches_a_clone(options: dict[str, Any]) -> None:
    spec = importlib.util.spec_from_file_location("fp8cutlass_attention", NODE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (kind,) = module.NODE_CLASS_MAPPINGS.values()
    inputs = kind.INPUT_TYPES()["required"]
    model = Model(options)
    before = copy.deepcopy(options)
    settings = {name: spec[1]["default"] for name, spec in inputs.items() if name != "model"}
    (clone,) = getattr(kind(), kind.FUNCTION)(model, **settings)
    assert clone is not model and model.model_options == before
    chosen = clone.model_options["transformer_options"]
    assert {**chosen, OPTION: None} == {**before.get("transformer_options", {}), OPTION: None}
    out, want, counted = run(*operands(), HEADS, chosen=chosen[OPTION])
    assert relative_l2(out, want.double()) < BOUND and counted == {"served": 1}


def test_patched_twice_serves_once() -> None:
    model = patched(patched(Model({})))
    _, _, counted = run(*operands(), HEADS, chosen=model.model_options["transformer_options"][OPTION])
    assert counted == {"served": 1}


def test_an_unknown_setting_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="smooth_q"):
        override(smooth_q=True)
