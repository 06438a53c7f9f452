"""The operators as csrc/binding.cpp states them, on a machine without a card and without a build.

Regressions these catch: an operator whose schema drifted from what the package calls, an argument of a ragged batch
that Python leaves out or gives in another's place.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from operators import SCHEMAS, schema, stated

from fp8cutlass.call import ragged
from fp8cutlass.call.ragged_call import RaggedCall
from fp8cutlass.manifest import generated_dir, load_manifest


def test_schemas_of_the_source() -> None:
    assert {name: str(one) for name, one in stated().items()} == {name: str(schema(x)) for name, x in SCHEMAS.items()}


@pytest.mark.parametrize("name", ["attend_ragged", "attend_ragged_fp8"])
def test_a_ragged_call_gives_every_argument_its_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cap, sinks and a window, whose numbers all differ."""
    fp8 = name == "attend_ragged_fp8"
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    q, k, v = (torch.zeros(5, heads, 64).to(dtype) for heads in (4, 2, 2))
    cu, used = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([1, 3], dtype=torch.int32)
    descales, sinks = tuple(torch.full((1,), 2.0 + i) for i in range(3)), torch.zeros(4)
    call = RaggedCall(
        q, k, v, cu, cu.clone(), used, used.clone(), 3, 3, descales if fp8 else (), 0.25, 7, 3, True, torch.bfloat16,
        "accurate", True, "", 30.0, sinks,
    )  # fmt: skip
    lse, out, given = torch.zeros(4, 5), torch.zeros(5, 4, 64), []

    def operator(*arguments: Any) -> torch.Tensor:
        given.append(dict(zip([a.name for a in stated()[name].arguments], arguments, strict=True)))
        return out

    packet = SimpleNamespace(default=SimpleNamespace(_op=operator))
    monkeypatch.setattr(ragged.extension, "load", lambda: None)
    monkeypatch.setattr(ragged.extension, "compiled", lambda: SimpleNamespace(**{name: packet}))
    variant = next(x for x in load_manifest(generated_dir()).variants if x.kind == "ragged" and x.softmax == "exp2")
    assert ragged.launch(call, variant, 11, lse, leave_q=False) is out
    (got,) = given
    own = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True)) if fp8 else {"leave_q": False}
    same = {"cu_seqlens_q": call.cu_q, "cu_seqlens_k": call.cu_k, "seqused_q": call.used_q, "seqused_k": call.used_k}
    for argument, tensor in {**same, **own, "lse": lse, "sinks": sinks}.items():
        assert got[argument] is tensor, argument
    for argument, x in {"q": q, "k": k, "v": v}.items():
        assert got[argument].data_ptr() == x.data_ptr() and got[argument].shape == x.shape, argument
    numbers = {"variant": 11, "scale": 0.25, "window_left": 7, "window_right": 3, "bottom_right": True, "softcap": 30.0}
    assert {argument: got[argument] for argument in numbers} == numbers
