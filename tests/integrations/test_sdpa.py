"""`use_fp8` and the provider of flash attention. On the CPU the provider exchanges the CPU's flash attention."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import relative_l2
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import current_flash_attention_impl as current
from torch.nn.attention.varlen import varlen_attn
from where import DEVICE, ON_CARD, randn

from fp8cutlass import UnsupportedError, quantize, stats
from fp8cutlass.integrations import provider, set_minimum_length
from fp8cutlass.integrations.sdpa import use_fp8

BOUND = 0.06
QUANTIZED = torch.ops.aten._scaled_dot_product_flash_attention.quantized
FLASH = (
    torch.ops.aten._scaled_dot_product_flash_attention.default
    if ON_CARD
    else torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
)


def operands(kv_heads: int = 4, keys: int = 40) -> tuple[torch.Tensor, ...]:
    shapes = ((2, 4, 40, 64), (2, kv_heads, keys, 64), (2, kv_heads, keys, 64))
    return tuple(randn(*shape, seed=seed) for seed, shape in enumerate(shapes))


Q, K, V = operands()
MASK = torch.ones(40, 40, dtype=torch.bool).tril(3)
ADDED = torch.zeros(40, 40, dtype=torch.bfloat16).masked_fill(~MASK, -torch.inf)


def counted(seen: stats.Collected) -> dict[str, int]:
    return {key.what or key.kind: count.calls for key, count in seen.result().counts.items()}


class Way:
    """A way of `use_fp8`, and torch without it: with the same order of backends, so that bits can be compared."""

    def __init__(self, block: Callable[[], AbstractContextManager[None]], by_mode: bool) -> None:
        self.block, self.by_mode = block, by_mode

    def __call__(self) -> AbstractContextManager[None]:
        return self.block()

    def torchs(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.by_mode else flash_first()

    def left(self, reason: str) -> dict[str, int]:
        """What is counted of a call with a mask or in float32. A card's flash attention is not asked for one."""
        return {reason: 1} if self.by_mode or not ON_CARD else {}


def flash_first() -> AbstractContextManager[Any]:
    """Torch's backends in the order in which a provider has them. On Hopper cuDNN may be before flash attention."""
    return sdpa_kernel(provider._flash_first(), set_priority=True)


BY_MODE = Way(use_fp8, True)
BY_PROVIDER = Way(partial(provider.provided, device=DEVICE.type), False)


@pytest.fixture(params=["mode", "provider"])
def fp8(request: pytest.FixtureRequest) -> Way:
    """The two ways of `use_fp8`, the second for the device of the tests."""
    return BY_MODE if request.param == "mode" else BY_PROVIDER


SERVED: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: F.scaled_dot_product_attention(Q, K, V),
    "causal": lambda: F.scaled_dot_product_attention(Q, K, V, is_causal=True),
    "scale": lambda: F.scaled_dot_product_attention(Q, K, V, scale=0.05),
    "by name": lambda: F.scaled_dot_product_attention(query=Q, key=K, value=V, attn_mask=None, dropout_p=0.0),
    "gqa": lambda: F.scaled_dot_product_attention(Q, K[:, :2], V[:, :2], enable_gqa=True),
}
LEFT: dict[str, Callable[[], torch.Tensor]] = {
    "mask": lambda: F.scaled_dot_product_attention(Q, K, V, ADDED),
    "dtype": lambda: F.scaled_dot_product_attention(Q.float(), K.float(), V.float()),
}


@pytest.mark.parametrize("case", SERVED)
def test_calls_are_served(fp8: Way, case: str) -> None:
    before = SERVED[case]()
    with fp8(), stats.collect() as seen:
        out = SERVED[case]()
    assert counted(seen) == {"served": 1} and 0 < relative_l2(out, before.double()) < BOUND
    assert torch.equal(SERVED[case](), before)


@pytest.mark.parametrize("case", LEFT)
def test_others_run_as_before_bit_by_bit(fp8: Way, case: str) -> None:
    with fp8.torchs():
        before = LEFT[case]()
    with fp8(), stats.collect() as seen:
        out = LEFT[case]()
    assert counted(seen) == fp8.left(case) and torch.equal(out, before)


MASKS: dict[str, Callable[[], torch.Tensor]] = {
    "rows and keys": lambda: MASK,
    "a batch": lambda: MASK.expand(2, 1, 40, 40),
    "padding": lambda: (torch.arange(40) < torch.tensor([[17], [40]]))[:, None, None],
}


@pytest.mark.parametrize("kind", MASKS)
def test_a_boolean_mask_is_served(kind: str) -> None:
    mask = MASKS[kind]().to(DEVICE)
    before = F.scaled_dot_product_attention(Q, K, V, mask)
    with use_fp8(), stats.collect() as seen:
        out = F.scaled_dot_product_attention(Q, K, V, attn_mask=mask)
    assert counted(seen) == {"served": 1} and 0 < relative_l2(out, before.double()) < BOUND
    assert relative_l2(F.scaled_dot_product_attention(Q, K, V), before.double()) > 2 * BOUND


@pytest.mark.parametrize("shape", [(40, 39), (2, 3, 40, 40), (1, 1, 1, 40, 40)])
def test_a_mask_that_does_not_fit_is_torchs_error(shape: tuple[int, ...]) -> None:
    mask = torch.ones(shape, dtype=torch.bool, device=DEVICE)
    with use_fp8(), stats.collect() as seen, pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(Q, K, V, mask)
    assert counted(seen) == {"mask": 1}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_with_a_mask_are_torchs_error() -> None:
    q = torch.nested.nested_tensor([Q[0], Q[1]])
    with use_fp8(), pytest.raises(RuntimeError, match="explicit attn_mask"):
        F.scaled_dot_product_attention(q, q, q, MASK)


def test_training_goes_on(fp8: Way) -> None:
    def gradient() -> torch.Tensor:
        q = Q.clone().requires_grad_()
        F.scaled_dot_product_attention(q, K, V).float().square().sum().backward()
        assert q.grad is not None
        return q.grad

    with fp8.torchs():
        before = gradient()
    with fp8(), stats.collect() as seen:
        assert torch.equal(gradient(), before)
    assert counted(seen) == {"grad": 1}


def test_dropout_is_torchs() -> None:
    with use_fp8(), stats.collect() as seen:
        out = F.scaled_dot_product_attention(Q, K, V, dropout_p=0.5)
    assert out.shape == Q.shape and counted(seen) == {"dropout": 1}


@pytest.mark.parametrize("dimensions", [3, 4])
def test_shapes_that_torch_takes_are_taken(dimensions: int) -> None:
    """A batch that broadcasts, and three dimensions; whether they are served is the package's own affair."""
    q, k, v = (Q, K[:1], V[:1]) if dimensions == 4 else (Q[0], K[0], V[0])
    want = F.scaled_dot_product_attention(q, k, v)
    with use_fp8(), stats.collect() as seen:
        out = F.scaled_dot_product_attention(q, k, v)
    assert sum(counted(seen).values()) == 1 and relative_l2(out, want.double()) < BOUND
    (key,) = seen.result().counts
    assert torch.equal(out, want) == (key.kind == "fallback") and seen.result().counts[key].work > 0


def test_wrong_shapes_are_torchs_errors() -> None:
    with use_fp8(), stats.collect() as seen, pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(Q, K[..., :32], V)
    assert seen.result().fallback.calls == 1


def test_autocast_casts_before(fp8: Way) -> None:
    """Float32 weights under autocast; the emulator's own products are not cast."""
    with fp8(), stats.collect() as seen:
        plain = F.scaled_dot_product_attention(Q, K, V)
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            out = F.scaled_dot_product_attention(Q.float(), K.float(), V.float())
    assert counted(seen) == {"served": 2} and out.dtype == torch.bfloat16 and torch.equal(out, plain)


@pytest.mark.parametrize("causal", [False, True])
def test_compile_keeps_one_graph_and_counts_each_run(fp8: Way, causal: bool) -> None:
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        served = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return served + F.scaled_dot_product_attention(q, k, v, ADDED)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), fp8(), stats.collect() as seen:
        out = [compiled(Q, K, V) for _ in range(2)]
        eager = step(Q, K, V)
    left = {reason: 3 * calls for reason, calls in fp8.left("mask").items()}
    assert counted(seen) == {"served": 3} | left and all(torch.equal(x, eager) for x in out)


def test_compile_traces_the_block_itself() -> None:
    def step(q: torch.Tensor) -> torch.Tensor:
        with use_fp8(smooth_k=True):
            return F.scaled_dot_product_attention(q, K, V)

    torch._dynamo.reset()
    with stats.collect() as seen:
        out = torch.compile(step, fullgraph=True, backend="aot_eager")(Q)
    assert counted(seen) == {"served": 1} and torch.equal(out, step(Q))


def test_accuracy_is_passed_on() -> None:
    biased = K + 20.0
    exact = F.scaled_dot_product_attention(Q.double(), biased.double(), V.double())
    error = {}
    for smooth in (False, True):
        with use_fp8(smooth_k=smooth):
            error[smooth] = relative_l2(F.scaled_dot_product_attention(Q, biased, V), exact)
    assert error[True] < 0.5 * error[False]
    with pytest.raises(TypeError, match="softcap"), use_fp8(softcap=3.0):
        pass
    with pytest.raises(TypeError, match="return_lse"):
        provider.register(return_lse=True)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_mode_reaches_multi_head_attention(compiled: bool) -> None:
    """Torch hands the whole function to modes, whose own calls are then outside of them. Dynamo cannot trace it inside
    a mode: there it is left to torch, and counted."""
    module = torch.nn.MultiheadAttention(256, 4, batch_first=True, dtype=torch.bfloat16).eval()
    x = randn(2, 40, 256, seed=5)
    with torch.no_grad():
        before = module(x, x, x, need_weights=False)[0]
        torch._dynamo.reset()
        call = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
        with use_fp8(), stats.collect() as seen:
            out = call(x, x, x, need_weights=False)[0]
    assert counted(seen) == ({"policy": 1} if compiled else {"served": 1})
    assert relative_l2(out, before.double()) < (0.01 if compiled else BOUND)


def test_short_calls_are_left_alone() -> None:
    set_minimum_length(64)
    try:
        with use_fp8(), stats.collect() as seen:
            out = SERVED["plain"]()
    finally:
        set_minimum_length(None)
    assert counted(seen) == {"short": 1} and torch.equal(out, SERVED["plain"]())


# The provider.


@pytest.fixture
def restored() -> Iterator[None]:
    """Torch's own kernels afterwards, whatever a test did, and its own FlashAttention-3."""
    yield
    if current() is not None:
        provider.restore()
    torch.nn.attention.register_flash_attention_impl(
        "FA3", register_fn=torch.nn.attention._fa3.register_flash_attention_fa3
    )


@pytest.mark.usefixtures("restored")
def test_activation_can_be_repeated_and_undone() -> None:
    before = SERVED["plain"]()
    provider.register("again", device=DEVICE.type)
    with flash_first(), warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's warning about overridden kernels as well
        for _ in range(2):
            provider.activate("again")
            assert current() == "again" and relative_l2(SERVED["plain"](), before.double()) > 0.01
        provider.restore()
    assert current() is None and torch.equal(SERVED["plain"](), before)


@pytest.mark.usefixtures("restored")
def test_the_name_of_flash_attention_3_is_taken_only_where_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)  # it may be installed
    provider.register(device=DEVICE.type)
    with pytest.raises(ModuleNotFoundError):
        torch.nn.attention.activate_flash_attention_impl("FA3")
    provider.register("FA3", device=DEVICE.type)
    torch.nn.attention.activate_flash_attention_impl("FA3")
    with flash_first(), stats.collect() as seen:
        SERVED["plain"]()
    assert counted(seen) == {"served": 1}


@pytest.mark.usefixtures("restored")
def test_a_block_gives_back_the_provider_before_it() -> None:
    provider.register("outer", device=DEVICE.type)
    provider.activate("outer")
    with provider.provided(device=DEVICE.type):
        assert current() == provider.NAME
    assert current() == "outer"


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has flash attention for CUDA")
@pytest.mark.usefixtures("restored")
def test_a_torch_without_cuda_says_so_and_keeps_what_was_there() -> None:
    provider.register("outer", device=DEVICE.type)
    provider.activate("outer")
    with pytest.raises(UnsupportedError, match="no flash attention for cuda"), use_fp8(provider=True):
        pass
    assert current() == "outer"


def test_an_old_torch_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl")
    with pytest.raises(UnsupportedError, match="too old"):
        provider.register()


def test_the_math_backend_is_not_exchanged() -> None:
    with provider.provided(device=DEVICE.type), sdpa_kernel(SDPBackend.MATH), stats.collect() as seen:
        SERVED["plain"]()
    assert counted(seen) == {}


def test_a_block_puts_flash_attention_first_and_leaves_cudnn_out() -> None:
    order = torch._C._get_sdp_priority_order()
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
        with provider.provided(device=DEVICE.type):
            inside = torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)
        after = torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)
    assert inside == [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    assert after[0] == SDPBackend.CUDNN_ATTENTION and torch._C._get_sdp_priority_order() == order


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("chosen", [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION])
def test_activate_says_when_torch_prefers_another_backend(chosen: SDPBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    provider.register("warned", device=DEVICE.type)
    monkeypatch.setattr(provider, "preferred", lambda: chosen)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        provider.activate("warned")
    assert [str(w.message) for w in caught if "CUDNN" in str(w.message)] == [
        str(w.message) for w in caught if chosen == SDPBackend.CUDNN_ATTENTION
    ]
    assert bool(caught) == (chosen == SDPBackend.CUDNN_ATTENTION)


def test_preferred_asks_torch() -> None:
    assert provider.preferred("cpu") == SDPBackend.FLASH_ATTENTION
    with sdpa_kernel(SDPBackend.MATH):
        assert provider.preferred("cpu") == SDPBackend.MATH


@pytest.mark.parametrize("causal", [False, True])
def test_quantized_operands_with_a_descale_for_each_kv_head(causal: bool) -> None:
    q, k, v = operands(2)
    k, v = 3 * k, 5 * v
    pairs = [quantize(x, granularity="head") for x in (q.view(2, 2, 80, 64), k, v)]  # a group of heads shares one
    q8, q_descale = pairs[0][0].view(2, 4, 40, 64), pairs[0][1]
    (k8, k_descale), (v8, v_descale) = pairs[1:]
    want = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal, enable_gqa=True)
    with provider.provided(device=DEVICE.type), stats.collect() as seen:
        out, lse, *rest = QUANTIZED(q8, k8, v8, q_descale, k_descale, v_descale, 0.0, causal, False)
        wrong = QUANTIZED(q8, k8, v8, q_descale, torch.ones_like(k_descale), v_descale, 0.0, causal, False)[0]
        with pytest.raises(UnsupportedError, match="q_descale is missing"):
            QUANTIZED(q8, k8, v8, None, k_descale, v_descale, 0.0, causal, False)
        with pytest.raises(UnsupportedError, match="dropout_p"):
            QUANTIZED(q8, k8, v8, q_descale, k_descale, v_descale, 0.1, causal, False)
        if causal:
            with pytest.raises(UnsupportedError, match="as many rows as keys"):
                QUANTIZED(q8, k8[:, :, :24], v8[:, :, :24], q_descale, k_descale, v_descale, 0.0, True, False)
    assert out.dtype == torch.bfloat16 and relative_l2(out, want) < 1.5 * BOUND < relative_l2(wrong, want)
    assert lse.shape == (2, 4, 40) and rest[:4] == [None, None, 40, 40] and counted(seen) == {"served": 2}


def test_the_lse_is_that_of_torch() -> None:
    lse = FLASH(Q, K, V, 0.0, True)[1]
    with provider.provided(device=DEVICE.type):
        got = FLASH(Q, K, V, 0.0, True)[1]
    assert got.shape == lse.shape and 0 < float((got - lse).abs().max()) < 0.3


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3)])
def test_strides_are_those_of_torch(order: tuple[int, ...]) -> None:
    """Compiled code relies on them."""
    q = Q.permute(order).contiguous().permute([order.index(i) for i in range(4)])
    want = FLASH(q, K, V)
    with provider.provided(device=DEVICE.type):
        got = FLASH(q, K, V)
        quantized = QUANTIZED(*(x.to(torch.float8_e4m3fn) for x in (q, K, V)), *[torch.ones(2, 4)] * 3)
    assert [x.stride() for x in got[:2]] == [x.stride() for x in want[:2]] and not torch.equal(got[0], want[0])
    assert quantized[0].stride() == q.stride()


def test_multi_head_attention_compiles_with_the_provider() -> None:
    module = torch.nn.MultiheadAttention(256, 4, batch_first=True, dtype=torch.bfloat16).eval()
    x = randn(2, 40, 256, seed=5)
    torch._dynamo.reset()
    with torch.no_grad():
        before = module(x, x, x, need_weights=False)[0]
        with provider.provided(device=DEVICE.type), stats.collect() as seen:
            out = torch.compile(module, backend="aot_eager")(x, x, x, need_weights=False)[0]
    assert counted(seen) == {"served": 1} and relative_l2(out, before.double()) < BOUND


# Ragged batches, which only the provider sees.

ENDS = torch.tensor([0, 24, 40], dtype=torch.int32)
SHARES = "enable_gqa" in inspect.signature(varlen_attn).parameters  # heads; not in torch 2.11


def ragged(window: tuple[int, int] = (-1, -1), **given: Any) -> torch.Tensor:
    """Two sequences of 24 and 16 tokens."""
    heads = 2 if SHARES else 4
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (Q, K[:, :heads], V[:, :heads]))
    more = {"enable_gqa": True} if SHARES else {}
    return varlen_attn(q, k, v, ENDS, ENDS, 24, 24, window_size=window, **more, **given)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (8, 0)])
def test_ragged_batches_are_served(window: tuple[int, int]) -> None:
    with provider.provided(device=DEVICE.type), stats.collect() as seen:
        out = ragged(window)
    assert counted(seen) == {"served": 1} and {key.where for key in seen.result().counts} == {"varlen"}
    row, key = torch.arange(24)[:, None], torch.arange(24)[None]
    shown = (key <= row if window[1] == 0 else key >= 0) & (key >= row - window[0] if window[0] >= 0 else key >= 0)
    for begin, end in ((0, 24), (24, 40)):
        heads = 2 if SHARES else 4
        part = [x[:1, :, begin:end].double() for x in (Q, K[:, :heads], V[:, :heads])]
        n = end - begin
        want = F.scaled_dot_product_attention(*part, shown[:n, :n], enable_gqa=True)[0].transpose(0, 1)
        assert relative_l2(out[begin:end], want) < BOUND


def test_ragged_batches_that_are_not_served_are_torchs() -> None:
    """On the CPU torch has nothing for them."""
    accurate = Way(partial(provider.provided, device=DEVICE.type, smooth_k=True), False)
    for block, reason in ((accurate, "policy"), (BY_PROVIDER, "grad")):
        with block(), stats.collect() as seen:
            q, k, v = (x[0].transpose(0, 1).contiguous() for x in (Q, K, V))
            call = partial(varlen_attn, q.requires_grad_(reason == "grad"), k, v, ENDS, ENDS, 24, 24)
            if ON_CARD:
                out = call()
            else:
                with pytest.raises(UnsupportedError, match="no ragged flash attention"):
                    call()
        assert counted(seen) == {reason: 1}
        if ON_CARD and reason == "grad":
            out.float().square().sum().backward()
            assert q.grad is not None and float(q.grad.norm()) > 0


def test_causal_with_unequal_lengths_stays_torchs() -> None:
    q, k, v = operands(keys=56)
    with flash_first():
        before = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    with provider.provided(device=DEVICE.type), stats.collect() as seen:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(out, before) and set(counted(seen)) <= {"mask"}
