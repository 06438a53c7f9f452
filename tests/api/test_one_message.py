"""One wrong argument, one sentence, whichever function it is given to; only the argument's own name differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import randn

from fp8cutlass import UnsupportedError, attention, attention_varlen, explain, pack_kv, supports

E4M3 = torch.float8_e4m3fn
X = randn(1, 4, 16, 64, seed=1)
ENDS = torch.tensor([0, 16], dtype=torch.int32)
NAMES = {"q": "query", "k": "key", "v": "value", "causal": "is_causal", "softmax_scale": "scale"}  # of attention_varlen


def of_attention(**changes: Any) -> str:
    call = {"query": X, "key": X, "value": X} | changes
    with pytest.raises(UnsupportedError) as caught:
        attention(**call)
    assert supports(**call) == (False, str(caught.value))
    assert all(reason in explain(**call) for reason in caught.value.reasons)
    return str(caught.value)


def of_packing(**changes: Any) -> str:
    with pytest.raises(UnsupportedError) as caught:
        pack_kv(**({"key": X, "value": X} | changes))
    return str(caught.value)


def of_varlen(**changes: Any) -> str:
    """By the names of `attention`, in its words."""
    x = X[0].transpose(0, 1)
    given = {name: changes.pop(theirs) for name, theirs in NAMES.items() if theirs in changes}
    given = {name: v[0].transpose(0, 1) if isinstance(v, torch.Tensor) else v for name, v in given.items()}
    call = {"q": x, "k": x, "v": x, "cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS, "max_seqlen_q": 16, "max_seqlen_k": 16}
    with pytest.raises(UnsupportedError) as caught:
        attention_varlen(**(call | given | changes))
    return str(caught.value)


ALL = (of_attention, of_packing, of_varlen)
CALLS = (of_attention, of_varlen)
WRONG: list[tuple[dict[str, Any], tuple[Callable[..., str], ...], str]] = [
    ({"key": None}, ALL, "{key} must be a torch.Tensor, got NoneType"),
    ({"value": X.half()}, ALL, "must share one dtype, got "),
    ({"value": torch.zeros(1, 4, 16, 64, device="meta").bfloat16()}, ALL, "{value} is on meta, "),
    ({"value": X[:, :2]}, ALL, "{key} and {value} differ in heads: 4 and 2"),
    ({"value": X[:, :, :9]}, ALL, "{key} and {value} differ in tokens: 16 and 9"),
    ({"key": X[..., :32], "value": X[..., :32]}, CALLS, "{query} and {key} differ in head_dim: 64 and 32"),
    ({"key": X.to(torch.uint8), "value": X}, ALL, "{key} has dtype torch.uint8; accepted are torch.bfloat16, "),
    ({"precision": "best"}, ALL,
     "precision must be one of fast, balanced, accurate, high, int8, int8_full, got 'best'"),
    ({"is_causal": 1}, ALL, "{is_causal} must be True or False, got 1"),
    ({"return_lse": 1}, (of_attention,), "return_lse must be True, False or 'merge', got 1"),
    ({"return_lse": 1}, (of_varlen,), "return_lse must be True or False, got 1"),
    ({"scale": "1"}, CALLS, "{scale} must be a float or None, got str"),
    ({"scale": float("nan")}, CALLS, "{scale} must be finite in float32, also times log2(e), got nan"),
    ({"window_size": 5}, CALLS, "window_size must be (left, right), two integers from -1 up, got 5"),
    ({"softcap": -2.0}, CALLS, "softcap must be 0 or a positive number up to 2^64, got -2.0"),
    ({"softcap": True}, CALLS, "softcap must be 0 or a positive number up to 2^64, got True"),
    ({"sinks": torch.zeros(3)}, CALLS, "sinks must be (4,) on cpu, bfloat16, float16 or float32"),
    ({"causal_alignment": "top"}, CALLS, "causal_alignment must be one of top_left, bottom_right, got 'top'"),
    ({"kernel": ""}, ALL, "kernel must be the id of a variant or None, got ''"),
    ({"kernel": 3}, ALL, "kernel must be the id of a variant or None, got 3"),
    ({"out_dtype": torch.float32}, ALL, "out_dtype must be one of torch.bfloat16, torch.float16, torch.float8_e4m3fn"),
    ({"key": X.clone().requires_grad_()}, ALL, "{key} has requires_grad=True and there is no backward: detach it, or"),
    ({"q_descale": torch.ones(1)}, CALLS, "q_descale is for FP8 operands; torch.bfloat16 ones are quantised inside"),
    (
        {name: X.to(E4M3) for name in ("query", "key", "value")},
        CALLS,
        "q_descale is missing: torch.float8_e4m3fn operands need the float32 factor that multiplies back, ",
    ),
    ({"query": X[:, :3], "key": X[:, :2], "value": X[:, :2], "enable_gqa": True}, CALLS,
     "the heads of {query} must be a multiple of those of {key}, got 3 and 2"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "functions", "sentence"), WRONG, ids=lambda x: x[:40] if isinstance(x, str) else ""
)
def test_one_sentence(changes: dict[str, Any], functions: Any, sentence: str) -> None:
    for function in functions:
        given = {name: x for name, x in changes.items() if function is not of_varlen or name != "enable_gqa"}
        theirs = {theirs: ours if function is of_varlen else theirs for ours, theirs in NAMES.items()}
        said = function(**given)
        assert sentence.format(**theirs) in said, function.__name__


@pytest.mark.parametrize("name", ["key", "value"])
def test_the_number_of_dimensions(name: str) -> None:
    """The order is that of the layout that was asked for."""
    for layout, order in (("bhsd", "heads, tokens"), ("bshd", "tokens, heads")):
        sentence = f"{name} must have 4 dimensions (batch, {order}, head_dim), got shape (64,)"
        assert sentence in of_attention(**{name: X[0, 0, 0]}, layout=layout)
        assert sentence in of_packing(**{name: X[0, 0, 0]}, layout=layout)
    with pytest.raises(
        UnsupportedError, match=r"k must have 3 dimensions \(tokens, heads, head_dim\), got shape \(64,\)"
    ):
        attention_varlen(X[0], X[0, 0, 0], X[0], ENDS, ENDS, 16, 16)
