"""When a call from 16 bits takes a kernel that keeps K and V in shared memory, and whose numbers it then computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8cutlass.call.call import Call
from fp8cutlass.call.plan import Plan, resolve
from fp8cutlass.choose import resident
from fp8cutlass.manifest import generated_dir, load_manifest
from fp8cutlass.native import extension

H100 = ((9, 0), "NVIDIA H100 80GB HBM3", 132)
L4 = ((8, 9), "NVIDIA L4", 58)


def plan(
    shape: tuple[int, int, int, int],
    *,
    keys: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    card: Any = H100,
    **call: Any,
) -> Plan:
    batch, heads, rows, width = shape
    values: dict[str, Any] = {"scaling": "block", "right": None} | call
    with extension.assume(card):
        q = torch.empty(shape, dtype=dtype, device="meta")
        k = torch.empty((batch, heads, keys or rows, width), dtype=dtype, device="meta")
        return resolve(Call("half", values.pop("out", dtype), 0.125, **values), on_card(q), on_card(k), shipped=True)


class _OnCard:
    """What a plan asks of a tensor on a card."""

    def __init__(self, x: torch.Tensor) -> None:
        self.shape, self.dtype, self.device, self.is_cuda = x.shape, x.dtype, torch.device("cuda"), True


def on_card(x: torch.Tensor) -> Any:
    return _OnCard(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("right", [None, 0], ids=["full", "causal"])
def test_short_sequences_take_it(width: int, right: int | None, dtype: torch.dtype) -> None:
    found = plan((128, 16, 128, width), right=right, dtype=dtype)
    kernel = found.resident
    assert kernel is not None and (kernel.head_dim, kernel.keys) == (width, 128)
    assert kernel.source == ("fp16" if dtype == torch.float16 else "bf16")
    # The numbers are a variant's with such tiles, and that is what the plan says.
    v = found.variant
    assert (v.tile_n, v.key_block, v.causal, v.softmax, v.out) == (128, 128, right == 0, "linear", kernel.source)
    assert load_manifest(generated_dir()).variants[found.number] is v and kernel.id in found.decision.criterion


def test_the_smallest_that_holds_the_keys() -> None:
    for keys, most in ((1, 64), (64, 64), (65, 128), (197, 256), (512, 512), (513, 1024), (1024, 1024)):
        kernel = plan((64, 16, 400, 64), keys=keys, right=0).resident
        assert kernel is not None and kernel.keys == most
    assert plan((64, 16, 400, 64), keys=1025, right=0).resident is None
    kernel = plan((64, 16, 400, 40), keys=77).resident
    assert kernel is not None and (kernel.head_dim, kernel.keys) == (64, 128)


def test_where_it_was_slower_the_table_decides() -> None:
    assert plan((32, 16, 768, 64)).resident is None and plan((32, 16, 768, 64), right=0).resident is not None
    assert plan((1, 12, 197, 64)).resident is None  # too few row tiles


@pytest.mark.parametrize(
    "changed",
    [
        {"scaling": "head"},
        {"smooth_k": True},
        {"hadamard": True},
        {"precision": "accurate"},
        {"precision": "balanced"},
        {"out": torch.float16},
        {"out": torch.float8_e4m3fn},
        {"left": 20, "right": 0},
        {"card": L4},
        {"kernel": "sm90a_fwd_d64_m64n128w4_s3_block_full_e4m3_bf16_linear_serial_solo"},
    ],
    ids=str,
)
def test_calls_that_it_does_not_serve(changed: dict[str, Any]) -> None:
    assert plan((128, 16, 128, 64), **changed).resident is None


def test_what_tune_measured_goes_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan((128, 16, 128, 64)).resident is not None
    monkeypatch.setattr("fp8cutlass.call.plan.tuned.find", lambda *_: object())
    monkeypatch.setattr("fp8cutlass.choose.dispatch._tuned", lambda *_: None)
    assert plan((128, 16, 128, 64)).resident is None


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_ragged_batches(width: int, causal: bool) -> None:
    """The fewest keys first, each for the numbers of one variant; and how many sequences it takes."""
    found = resident.for_lengths(generated_dir(), "sm90a", width, "bf16", causal=causal)
    most = resident.MOST_KEYS[width, causal]
    assert [x.kernel.keys for x in found] == [n for n in (64, 128, 256, 512, 1024) if n <= most]
    manifest = load_manifest(generated_dir())
    for x in found:
        assert (x.kernel.head_dim, x.kernel.source) == (width, "bf16") and manifest.residents[x.number] is x.kernel
        assert manifest.variants[x.variant_number] is x.variant and x.variant.causal == causal
    by_keys = {x.kernel.keys: x for x in found}
    assert by_keys[128].serves(128, 1, 12, 12, 132) and not by_keys[128].serves(129, 900, 12, 12, 132)
    assert by_keys[256].serves(200, 64, 12, 12, 132) and not by_keys[256].serves(200, 1, 12, 12, 132)
    # Where more query heads share K and V, it takes more sequences.
    assert by_keys[512].serves(500, 40, 16, 16, 132) and not by_keys[512].serves(500, 40, 64, 16, 132)
    assert resident.for_lengths(generated_dir(), "sm89", width, "bf16", causal=causal) == ()


def test_every_limit_has_kernels() -> None:
    """In the shipped list: one that holds so many keys, for both types, and a variant to compute the numbers of."""
    manifest = load_manifest(generated_dir())
    for (width, causal), most in resident.MOST_KEYS.items():
        for source in ("bf16", "fp16"):
            assert resident.serving(manifest, width, source, most) is not None
            assert resident.reference(manifest, width, source, causal=causal) is not None
