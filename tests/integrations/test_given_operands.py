"""The operands of other libraries' calls: one cast under autocast and one refusal, and where adapters differ.

Regressions these catch: an adapter in the place of torch's attention whose result has another dtype than torch's, keys
that are kept in a cache and are cast at each call, FP8 operands that are cast without their descales.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from where import DEVICE

from fp8cutlass import stats
from fp8cutlass.autocast import under_autocast
from fp8cutlass.integrations import dense
from fp8cutlass.integrations.refusal import Refusal, refusal_of
from fp8cutlass.integrations.transformers import serve
from fp8cutlass.stats import Reason

BF16, FP16, FP32, FP64, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn


def of(*dtypes: torch.dtype) -> list[torch.Tensor]:
    return [torch.zeros(1, 2, 4, 8).to(dtype) for dtype in dtypes]


def kinds(operands: Sequence[torch.Tensor]) -> list[torch.dtype]:
    return [x.dtype for x in operands]


@pytest.mark.parametrize("to", [BF16, FP16])
def test_operands_that_torch_casts(to: torch.dtype) -> None:
    """All of them where one is float32 or two differ. torch's attention is asked for its dtype."""
    for given in ((FP32, FP32, FP32), (FP32, BF16, BF16), (BF16, FP16, BF16), (FP16, FP32, BF16)):
        operands = of(*given)
        with torch.autocast(DEVICE.type, dtype=to):
            for as_torch in (False, True):
                assert kinds(under_autocast(operands, as_torch=as_torch)) == [to] * 3
            assert F.scaled_dot_product_attention(*operands).dtype == to
        assert under_autocast(operands, as_torch=True) is operands  # outside


def test_operands_of_one_16_bit_dtype_are_cast_in_the_place_of_torch_alone() -> None:
    """The difference that stays: torch's attention gives fp16, and keys in a cache stay what they are."""
    operands = of(BF16, BF16, BF16)
    with torch.autocast(DEVICE.type, dtype=FP16):
        assert F.scaled_dot_product_attention(*operands).dtype == FP16
        assert kinds(under_autocast(operands, as_torch=True)) == [FP16] * 3
        assert under_autocast(operands) is operands
    with torch.autocast(DEVICE.type, dtype=BF16):
        assert under_autocast(operands, as_torch=True) is operands


@pytest.mark.parametrize("as_torch", [False, True])
def test_operands_that_are_not_cast(as_torch: bool) -> None:
    """A check says why they are not served; None and packed keys are no tensors."""
    with torch.autocast(DEVICE.type, dtype=BF16):
        for given in ((E4M3, E4M3, E4M3), (FP64, FP32, FP32), (FP32, E4M3, FP32), (torch.int8, FP32, FP32)):
            operands = of(*given)
            assert under_autocast(operands, as_torch=as_torch) is operands
        (x,) = of(FP32)
        cast = under_autocast((x, None, "packed"), as_torch=as_torch)
        assert cast[0].dtype == BF16 and list(cast[1:]) == [None, "packed"]
        assert under_autocast((None,), as_torch=as_torch) == (None,)
        meta = [x.to("meta")]
        assert under_autocast(meta, as_torch=as_torch) is meta


def test_an_adapter_gives_the_dtype_of_torch() -> None:
    operands = [torch.randn(1, 2, 16, 64).bfloat16() for _ in range(3)]
    with torch.autocast(DEVICE.type, dtype=FP16), stats.collect():
        assert dense.attend("test", "", *operands).dtype == F.scaled_dot_product_attention(*operands).dtype == FP16


def test_what_every_adapter_refuses_is_refused_in_one_place() -> None:
    q, wide = torch.zeros(1, 2, 8, 64).bfloat16(), torch.zeros(1, 2, 8, 264).bfloat16()
    assert refusal_of(q, q, q) is None
    for operands, reason in (
        ((q.clone().requires_grad_(), q, q), Reason.GRAD),
        ((q[0, 0], q, q), Reason.LAYOUT),
        ((q, q, q.to("meta")), Reason.DEVICE),
        ((q, q, q.half()), Reason.DTYPE),
        ((wide, wide, wide), Reason.HEAD_DIM),
    ):
        found = refusal_of(*operands)
        assert found is not None and found.reason is reason
        assert dense.refusal(*operands) is reason
        assert serve.refusal(*operands, serve.Features()) == found


def test_what_adapters_refuse_by_themselves() -> None:
    """The differences that stay: models pass four dimensions, and torch's attention takes what broadcasts."""
    q = torch.zeros(2, 4, 8, 64).bfloat16()
    for operands, reason in (
        ((q[0], q[0], q[0]), Reason.LAYOUT),
        ((q, q[:1], q[:1]), Reason.LAYOUT),
        ((q, q[:, :3], q[:, :3]), Reason.HEADS),
        ((q[..., :32], q[..., :32], q), Reason.HEAD_DIM),
    ):
        found = serve.refusal(*operands, serve.Features())
        assert isinstance(found, Refusal) and found.reason is reason
        assert dense.refusal(*operands) is None
    mask = torch.ones(8, 8)
    assert dense.refusal(q, q, q, mask) is Reason.MASK and dense.refusal(q, q, q, None, 0.1) is Reason.DROPOUT
