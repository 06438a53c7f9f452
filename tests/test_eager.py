"""Calls that were made before: which take the short way, and that it gives what the long way gives."""

import dataclasses

import pytest
import torch

import fp8cutlass
from fp8cutlass import UnsupportedError, eager, operator
from fp8cutlass.launch import empty_outputs
from fp8cutlass.plan import execute, make_plan
from fp8cutlass.request import Request

needs_card = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card"),
]


def operands(device: str = "cuda", tokens: int = 100, head_dim: int = 64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, 3, tokens, head_dim, generator=generator).to(torch.bfloat16).to(device) for _ in range(3)]


def test_cpu_tensors_take_the_long_way() -> None:
    eager.forget()
    fp8cutlass.attention(*operands("cpu", 8))
    assert eager.signature(Request(*operands("cpu", 8))) is None
    assert not eager._known


def test_an_option_that_cannot_be_hashed_is_refused_by_name() -> None:
    """It must not come back as a TypeError of the look-up."""
    assert eager.look_up(("a shape", ["unhashable"])) is None
    with pytest.raises(UnsupportedError, match="layout must be one of"):
        fp8cutlass.attention(*operands("cpu", 8), layout=["bhsd"])  # type: ignore[arg-type]


def test_what_is_remembered_is_what_the_operator_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option in its place: the short way and the operator make the same call."""
    asked, kept = [], []
    monkeypatch.setattr(operator, "run_half", lambda *arguments: asked.append(arguments) or empty_outputs(arguments[0]))
    monkeypatch.setattr(eager, "prepared_call", lambda *arguments: kept.append(arguments))
    options = {"is_causal": True, "causal_alignment": "bottom_right", "scale": 0.3, "return_lse": True}
    options |= {"scaling": "token", "precision": "accurate", "hadamard": True, "out_dtype": torch.float16}
    q, k, v = operands("cpu", 8)
    request = Request(q[:, :, :5], k, v, **options)
    plan = make_plan(request)
    execute(request, plan)
    eager.remember(("signature",), request, plan)
    eager.forget()
    ((call, *rest),), ((kept_call, *kept_rest),) = asked, kept
    assert rest == kept_rest
    for field in dataclasses.fields(call):
        mine, theirs = getattr(kept_call, field.name), getattr(call, field.name)
        assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs, field.name


@pytest.fixture
def nothing_known():
    eager.forget()
    yield
    eager.forget()


class TestOnACard:
    pytestmark = [*needs_card, pytest.mark.usefixtures("nothing_known")]

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"is_causal": True, "scale": -0.2},
            {"layout": "bshd", "enable_gqa": True},
            {"return_lse": True, "return_amax": True},
            {"smooth_k": True, "hadamard": True, "return_lse": True},
            {"scaling": "token", "precision": "accurate", "out_dtype": torch.float16},
            {"scaling": "head"},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("head_dim", [64, 80])
    def test_the_second_call_gives_the_bits_of_the_first(self, options: dict, head_dim: int) -> None:
        """head_dim 80 is padded: the columns that the kernel adds must not come out."""
        inputs = operands(head_dim=head_dim)
        first = fp8cutlass.attention(*inputs, **options)
        assert len(eager._known) == 1
        second = fp8cutlass.attention(*inputs, **options)
        assert len(eager._known) == 1
        for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (first, second)), strict=True):
            assert torch.equal(a, b) and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype

    @pytest.mark.parametrize("head_dim", [64, 80, 100])  # as it is, padded, copied first
    def test_the_result_lies_in_memory_as_query_does(self, head_dim: int) -> None:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in operands(head_dim=head_dim))
        assert fp8cutlass.attention(q, k, v).stride() == q.stride()

    def test_it_is_not_taken_for_another_call(self) -> None:
        """Whatever the choice or the launch depends on must be part of the signature."""
        q, k, v = operands()
        base = fp8cutlass.attention(q, k, v)
        assert not torch.equal(fp8cutlass.attention(q, k, v, is_causal=True), base)
        assert not torch.equal(fp8cutlass.attention(q, k, v, scale=0.3), base)
        assert fp8cutlass.attention(q, k, v, out_dtype=torch.float16).dtype == torch.float16
        assert fp8cutlass.attention(q[:, :, :7], k, v).shape[2] == 7
        transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        again = fp8cutlass.attention(*transposed)
        assert torch.equal(again, base) and again.stride() == transposed[0].stride()
        assert len(eager._known) == 6

    def test_what_it_cannot_serve_is_still_refused_or_served(self) -> None:
        """After a call with the same metadata has been kept."""
        q, k, v = operands()
        base = fp8cutlass.attention(q, k, v, is_causal=True)
        with pytest.raises(UnsupportedError, match="is_causal must be True or False"):
            fp8cutlass.attention(q, k, v, is_causal=1)  # type: ignore[arg-type]
        with pytest.raises(UnsupportedError, match="requires_grad"):
            fp8cutlass.attention(q.clone().requires_grad_(), k, v, is_causal=True)
        shifted = torch.empty(q.numel() + 1, dtype=q.dtype, device="cuda")[1:].view(q.shape)  # 2 bytes off
        shifted.copy_(q)
        assert torch.equal(fp8cutlass.attention(shifted, k, v, is_causal=True), base)
        out = torch.empty_like(base)
        assert fp8cutlass.attention(q, k, v, is_causal=True, out=out) is out and torch.equal(out, base)

    def test_it_keeps_no_more_than_its_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(eager, "LIMIT", 2)
        q, k, v = operands()
        for rows in (5, 6, 7):
            fp8cutlass.attention(q[:, :, :rows], k, v)
        assert len(eager._known) == 1

    def test_in_a_graph(self) -> None:
        """A capture of the short way replays with new contents."""
        q, k, v = operands()
        fp8cutlass.attention(q, k, v)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = fp8cutlass.attention(q, k, v)
        q.copy_(torch.randn_like(q))
        graph.replay()
        assert torch.equal(out, fp8cutlass.attention(q, k, v))

    def test_modes_see_the_operator(self) -> None:
        """A dispatch mode must be able to stand in for the call: it sees fp8cutlass.attention_half."""
        from torch.utils._python_dispatch import TorchDispatchMode

        seen = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                seen.append(str(func))
                return func(*args, **(kwargs or {}))

        q, k, v = operands()
        fp8cutlass.attention(q, k, v)
        with Watch():
            fp8cutlass.attention(q, k, v)
        assert "fp8cutlass.attention_half.default" in seen
