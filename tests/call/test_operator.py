"""The torch operator and the layouts, sizes and strides that `attention` brings to it."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calls import fp8_arguments, half_arguments, split
from reference import attention64, randn, relative_l2

from fp8cutlass import UnsupportedError, attention, quantize
from fp8cutlass.call import launch
from fp8cutlass.call.call import Call, parse
from fp8cutlass.call.launch import run
from fp8cutlass.call.operators import attend
from fp8cutlass.call.plan import resolve
from fp8cutlass.choose.problem import CPU_ARCH
from fp8cutlass.emulator.emulate import emulate
from fp8cutlass.manifest import KEY_BLOCK, Manifest, Variant, generated_dir, load_manifest
from fp8cutlass.memory import aligned, as_bytes, is_seq_major
from fp8cutlass.native import extension
from fp8cutlass.quant.v_layout import unpack_v

E4M3 = torch.float8_e4m3fn
NAMES = ("query", "key", "value")
SCORES: dict[str, Any] = {"softcap": 0.5, "sinks": torch.tensor([-1.0, 4.0]), "merge_lse": True}  # of two heads


def operands(batch: int = 2, heads: int = 2, seqlen: int = 40, head_dim: int = 64, **_: Any) -> list[torch.Tensor]:
    return [randn(batch, heads, seqlen, head_dim, seed=seed) for seed in range(3)]


@pytest.mark.edge(57)
@pytest.mark.parametrize("order", ["bhsd", "bshd"])
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16, E4M3])
def test_opcheck(order: str, out: torch.dtype) -> None:
    """Fake tensors have the shapes, dtypes and strides of real ones, also with every size symbolic; B > 1, S % 128."""
    q, k, v = operands(seqlen=133)
    if order == "bshd":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    out_descale = torch.full((1,), 0.01) if out == E4M3 else None
    arguments = fp8_arguments(q, k, v, right=3, out_dtype=out, out_descale=out_descale)
    torch.library.opcheck(attend, arguments, test_utils=("test_faketensor", "test_aot_dispatch_dynamic"))


@pytest.mark.edge(57)
@pytest.mark.parametrize("order", ["bhsd", "bshd"])
@pytest.mark.parametrize("head_dim", [64, 40])
@pytest.mark.parametrize(("scaling", "scores"), [("block", {}), ("token", {}), ("block", SCORES)])
def test_opcheck_of_the_operator_that_quantises(
    order: str, head_dim: int, scaling: str, scores: dict[str, Any]
) -> None:
    """The same; of a head_dim that is padded, and of capped scores and sinks, too."""
    q, k, v = operands(seqlen=133, head_dim=head_dim)
    if order == "bshd":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    arguments = half_arguments(q, k, v, right=3, scaling=scaling, precision="fast", **scores)
    torch.library.opcheck(attend, arguments, test_utils=("test_faketensor", "test_aot_dispatch_dynamic"))


@pytest.mark.edge(57)
@torch._dynamo.config.patch(error_on_recompile=True)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_without_graph_breaks(backend: str) -> None:
    """One graph serves many sizes and gives the bits of eager mode."""
    torch._dynamo.reset()

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return attention(
            q, k, v, is_causal=True, causal_alignment="bottom_right", layout="bshd", return_lse=True, enable_gqa=True
        )

    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=True)
    # No two sizes are equal, which torch.compile would build in, and there is more than one block of 128 keys, as it
    # treats a size of 1 apart.
    for batch, seqlen_q, seqlen_k in ((3, 37, 130), (5, 64, 300), (3, 129, 257)):
        q = randn(batch, seqlen_q, 4, 40, seed=1)
        k, v = (randn(batch, seqlen_k, 2, 40, seed=seed) for seed in (2, 3))
        for got, want in zip(compiled(q, k, v), step(q, k, v), strict=True):
            assert torch.equal(got, want) and got.stride() == want.stride()


@pytest.mark.parametrize(
    "arguments",
    [{}, {"scaling": "token"}, {"precision": "accurate", "scaling": "tensor"}, {"scale": -0.2}, {"scale": 0.0}],
)
def test_compile_options(arguments: dict[str, Any]) -> None:
    torch._dynamo.reset()
    q, k, v = operands()
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, **arguments), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), attention(q, k, v, **arguments))


def test_compile_fp8_operands_and_output() -> None:
    torch._dynamo.reset()
    pairs = [quantize(x, granularity="head") for x in operands()]

    def step(*x: torch.Tensor) -> torch.Tensor:
        descales = dict(zip(("q_descale", "k_descale", "v_descale"), x[3:], strict=True))
        return attention(*x[:3], scaling="head", out_dtype=E4M3, out_descale=0.01, **descales)

    arguments = [x for x, _ in pairs] + [d for _, d in pairs]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*arguments).view(torch.uint8), step(*arguments).view(torch.uint8))


def test_compile_refuses_with_our_words() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="dropout_p is not supported"):
        compiled(*operands(), dropout_p=0.5)


def test_export() -> None:
    class Module(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attention(q, k, v, is_causal=True)

    q, k, v = operands()
    program = torch.export.export(Module(), (q, k, v), strict=True)
    assert torch.equal(program.module()(q, k, v), attention(q, k, v, is_causal=True))


@pytest.mark.parametrize("scaling", ["tensor", "head", "block", "token"])
def test_layout_bshd(scaling: str) -> None:
    """The same numbers, and the result lies in memory as query does."""
    q, k, v = operands(heads=4, seqlen=140)
    want = attention(q, k, v, scaling=scaling)
    got = attention(*(x.transpose(1, 2).contiguous() for x in (q, k, v)), scaling=scaling, layout="bshd")
    assert got.is_contiguous() and want.is_contiguous()
    assert torch.equal(got.transpose(1, 2), want)
    view = attention(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)), scaling=scaling)
    assert torch.equal(view, want) and is_seq_major(view)


def strided_views(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same values in other memory."""
    batch, heads, tokens, head_dim = x.shape
    gap = torch.full((batch, heads, 2 * tokens, head_dim + 24), 77.0, dtype=x.dtype)
    gap[:, :, ::2, 8:-16] = x
    shifted = torch.empty(x.numel() + 3, dtype=x.dtype)[3:].view_as(x).copy_(x)
    return {
        "transposed": x.transpose(1, 2).contiguous().transpose(1, 2),
        "gap": gap[:, :, ::2, 8:-16],
        "last": x.transpose(2, 3).contiguous().transpose(2, 3),
        "shifted": shifted,
        "slice of qkv": torch.stack([x, x, x], 3)[:, :, :, 1],
    }


@pytest.mark.edge(27, 28)
@pytest.mark.parametrize("view", ["transposed", "gap", "last", "shifted", "slice of qkv"])
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_strides_do_not_change_a_bit(view: str, kind: str) -> None:
    xs = operands(seqlen=70)
    extra = {}
    if kind == "fp8":
        xs = [x.to(E4M3) for x in xs]
        extra = {"q_descale": 0.5, "k_descale": 0.5, "v_descale": 2.0}
    want = attention(*xs, **extra)
    for name in range(3):
        changed = list(xs)
        changed[name] = strided_views(xs[name].float())[view].to(xs[name].dtype) if kind == "fp8" else (
            strided_views(xs[name])[view]
        )  # fmt: skip
        got = attention(*changed, **extra)
        assert torch.equal(got, want) and got.stride(3) == 1


@pytest.mark.edge(28, 29)
def test_expanded_keys_and_absurd_strides_of_size_1() -> None:
    q, k, v = operands(batch=1, seqlen=33)
    k, v = (x[:, :1] for x in (k, v))
    want = attention(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))
    assert torch.equal(attention(q, k.expand(-1, 2, -1, -1), v.expand(-1, 2, -1, -1)), want)
    odd = q.as_strided(q.shape, (3331333, *q.stride()[1:]))
    assert torch.equal(attention(odd, k, v, enable_gqa=True), want)


@pytest.mark.edge(31)
def test_aligned_copies_only_what_it_must() -> None:
    base = torch.zeros(2, 4, 33, 64, dtype=torch.uint8)
    assert aligned(base) is base
    view = base.transpose(1, 2)
    assert aligned(view) is view
    single = base[:1].as_strided((1, 4, 33, 64), (3331333, *base.stride()[1:]))
    assert aligned(single) is single
    for wrong in (torch.zeros(2, 4, 33, 72, dtype=torch.uint8)[..., :64], torch.zeros(200, dtype=torch.uint8)[8:136]):
        x = wrong if wrong.dim() == 4 else wrong.view(1, 1, 2, 64)
        copy = aligned(x)
        assert copy is not x and copy.data_ptr() % 16 == 0 and copy.is_contiguous() and torch.equal(copy, x)


@pytest.mark.edge(23)
@pytest.mark.parametrize("head_dim", [1, 8, 31, 33, 40, 60, 72, 80, 96, 100, 136, 160, 200, 256])
@pytest.mark.parametrize("scaling", ["block", "token"])
def test_padded_head_dims(head_dim: int, scaling: str) -> None:
    """The scale is that of the user's head_dim, the result has it, and the columns added are zeros."""
    q, k, v = operands(head_dim=head_dim, seqlen=48)
    got, lse = attention(q, k, v, scaling=scaling, return_lse=True)
    kernel_dim = min(d for d in load_manifest(generated_dir()).head_dims[CPU_ARCH] if d >= head_dim)
    wide = (torch.nn.functional.pad(x, (0, kernel_dim - head_dim)) for x in (q, k, v))
    want, want_lse = attention(*wide, scaling=scaling, scale=head_dim**-0.5, return_lse=True)
    assert torch.equal(got, want[..., :head_dim]) and torch.equal(lse, want_lse)
    assert got.is_contiguous()
    assert not want[..., head_dim:].any()
    exact = attention64(q, k, v, head_dim**-0.5)
    assert relative_l2(got, exact.out) < (0.1 if head_dim == 1 else 0.075)  # 96 numbers make a rough mean


@pytest.mark.edge(5)
@pytest.mark.parametrize(("batch", "heads", "seqlen"), [(0, 2, 5), (2, 0, 5), (2, 2, 0)])
def test_nothing_to_do(batch: int, heads: int, seqlen: int) -> None:
    x = torch.empty(batch, heads, seqlen, 64, dtype=torch.bfloat16)
    for scaling in ("tensor", "head", "block", "token"):
        out, lse, amax = attention(x, x, x, scaling=scaling, return_lse=True, return_amax=True)
        assert out.shape == x.shape and lse.shape == x.shape[:3] and amax.tolist() == [0.0]


@pytest.mark.edge(4)
@pytest.mark.parametrize("out", [torch.bfloat16, E4M3])
def test_no_keys(out: torch.dtype) -> None:
    q, k = randn(2, 3, 5, 64, seed=1), torch.empty(2, 3, 0, 64, dtype=torch.bfloat16)
    out_descale = 1.0 if out == E4M3 else None
    got, lse = attention(q, k, k, return_lse=True, out_dtype=out, out_descale=out_descale)
    assert got.dtype == out and not got.float().any() and bool((lse == -torch.inf).all())


def test_out_is_filled_and_returned() -> None:
    q, k, v = operands()
    out = torch.full_like(q, torch.nan)
    assert attention(q, k, v, out=out) is out
    assert torch.equal(out, attention(q, k, v))
    pitch = torch.full((2, 2, 40, 100), 7.0, dtype=torch.bfloat16)
    attention(q, k, v, out=pitch[..., 20:84])
    assert torch.equal(pitch[..., 20:84], out)
    assert bool((pitch[..., :20] == 7).all()) and bool((pitch[..., 84:] == 7).all())
    columns = torch.full((2, 2, 64, 40), torch.nan, dtype=torch.bfloat16).transpose(2, 3)
    assert attention(q, k, v, out=columns) is columns and torch.equal(columns, out)


@pytest.mark.edge(34)
def test_results_are_independent() -> None:
    """No output lives in a buffer that is kept between calls: a second one leaves the first result alone."""
    first = attention(*operands())
    kept = first.clone()
    attention(*(x + 1 for x in operands()))
    assert torch.equal(first, kept)


def test_what_is_returned() -> None:
    q, k, v = operands()
    assert isinstance(attention(q, k, v), torch.Tensor)
    out, lse = attention(q, k, v, return_lse=True)
    assert lse.shape == (2, 2, 40) and lse.dtype == torch.float32
    out, amax = attention(q, k, v, return_amax=True)
    assert amax.shape == (1,) and amax.dtype == torch.float32
    assert abs(float(amax) - float(out.float().abs().max())) <= 2.0**-8 * float(amax)
    assert len(attention(q, k, v, return_lse=True, return_amax=True)) == 3


@pytest.mark.edge(53)
def test_fp8_output_saturates_and_amax_is_before_the_scale() -> None:
    q, k, v = operands()
    want = attention(q, k, v, out_dtype=torch.float16).float()
    got, amax = attention(q, k, v, out_dtype=E4M3, out_descale=0.001, return_amax=True)
    assert float(got.float().abs().max()) == 448.0
    inside = want.abs() < 0.4
    assert torch.allclose(got.float()[inside] * 0.001, want[inside], rtol=0.07, atol=2e-6)
    assert abs(float(amax) - float(want.abs().max())) < 1e-3


@pytest.mark.parametrize(("scale", "equivalent"), [(-0.3, 0.3), (-1.0, 1.0)])
def test_negative_scale_negates_q(scale: float, equivalent: float) -> None:
    q, k, v = operands()
    assert torch.equal(attention(q, k, v, scale=scale), attention(-q, k, v, scale=equivalent))


def test_scale_zero_is_the_mean_of_v() -> None:
    q, k, v = operands()
    for precision in ("fast", "accurate"):
        got = attention(q, k, v, scale=0.0, precision=precision)
        assert relative_l2(got, v.double().mean(2, keepdim=True).expand_as(got)) < 0.03


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"out_dtype": E4M3}, "out_descale"),
        ({"scaling": "row"}, "scaling"),
        *(({"scale": scale}, "scale must be finite in float32") for scale in (math.nan, -math.inf, 1e39)),
        ({"q_descale": torch.ones(2, 3)}, "q_descale"),
        ({"v_descale": torch.ones(2, 2).double()}, "v_descale"),
        ({"q": torch.zeros(2, 3, 40, 64).to(E4M3)}, "heads of k"),
        ({"k": torch.zeros(2, 2, 41, 64).to(E4M3)}, "k and v"),
        ({"q": torch.zeros(2, 2, 40, 64)}, "e4m3fn"),
        ({"q": torch.zeros(2, 40, 64).to(E4M3)}, "q must have 4"),
        ({"q": torch.zeros(2, 2, 40, 40).to(E4M3)}, "k and v"),
    ],
)
def test_the_bare_operator_checks(changes: dict[str, Any], words: str) -> None:
    """No argument of the operator can make a kernel read outside its tensors."""
    with pytest.raises(UnsupportedError, match=words):
        attend(*fp8_arguments(*operands(), **changes))


def test_the_bare_operator_takes_scale_zero() -> None:
    out, *_ = attend(*fp8_arguments(*operands(), scale=0.0))
    assert bool(out.isfinite().all()) and torch.equal(out, out[:, :, :1].expand_as(out))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": torch.zeros(2, 2, 40, 64)}, "bfloat16 or all torch.float16, got torch.float32"),
        ({"q": torch.zeros(2, 2, 40, 64).to(E4M3)}, "got torch.float8_e4m3fn"),
        ({"k": torch.zeros(2, 2, 40, 64).half()}, "got torch.bfloat16, torch.float16"),
        ({"v": torch.zeros(2, 2, 41, 64).bfloat16()}, "k and v"),
        ({"scaling": "row"}, "scaling"),
        ({"precision": "best"}, "precision='best'"),
        ({"scale": math.nan}, "scale must be finite"),
        ({"kernel": "nonsense"}, "kernel='nonsense'"),
    ],
)
def test_the_operator_that_quantises_checks(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        attend(*half_arguments(*operands(), **changes))


def test_the_bare_operators_pad_and_take_any_strides() -> None:
    """And their fake kernels know the strides of the result: dense, in q's memory order."""
    q, k, v = operands(head_dim=40)
    want = attention(q, k, v, scaling="head", precision="accurate", scale=0.125)
    columns = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    for x in ((q, k, v), columns):
        for got in (attend(*half_arguments(*x))[0], attend(*fp8_arguments(*x))[0]):
            assert got.shape == q.shape and got.stride(3) == 1
            assert relative_l2(got, want) < 0.04  # V is quantised to amax 448 in one, 256 in the other


@pytest.mark.parametrize("make", [fp8_arguments, half_arguments])
def test_the_bare_operator_refuses_head_dims_beyond_the_kernels(make: Any) -> None:
    with pytest.raises(UnsupportedError, match="head_dim must lie in 1..256, got 320"):
        attend(*make(*operands(head_dim=320)))


def test_the_text_of_a_call_is_read_back_and_nothing_else_is() -> None:
    """What the operator is told besides tensors: every field, or a refusal."""
    for call in (
        Call("half", torch.bfloat16, 0.1),
        Call("packed", torch.float16, -0.5, "token", "high", 3, 0, *[True] * 4, "some_id", *[True] * 5, 64, 14.0, 2.0),
    ):
        assert parse(call.text(), call.numbers()) == call
    for text in ("", "kind=half", Call("half", torch.bfloat16, 0.1).text() + " more=1", "kind=half out_dtype=int8"):
        with pytest.raises(ValueError, match="call must be the text of a Call"):
            parse(text)


def wide_blocks(manifest: Manifest) -> Variant:
    """A kernel whose tile does not divide 128 keys."""
    wide = (v for v in manifest.variants if v.kind == "fwd" and v.key_block != KEY_BLOCK)
    return next(v for v in wide if v.out == "bf16" and not v.causal)


def test_operands_are_quantised_in_the_blocks_of_the_kernel(manifest: Manifest) -> None:
    """Bit for bit what quantising by hand in the kernel's blocks gives; in blocks of 128 it is something else."""
    variant = wide_blocks(manifest)
    q, k, v = (randn(1, 2, s, variant.head_dim, seed=s) for s in (40, 700, 701))
    v = v[:, :, :700]
    got = attention(q, k, v, kernel=variant.id, scale=0.1)

    def by_hand(block: int) -> torch.Tensor:
        x = [quantize(q, granularity="token", amax=14.0)]
        x += [quantize(y, granularity="block", amax=amax, block=block) for y, amax in ((k, 14.0), (v, 256.0))]
        return emulate(*(y for y, _ in x), *(d for _, d in x), variant=variant, scale=0.1).out

    assert torch.equal(got, by_hand(variant.key_block))
    assert quantize(k, granularity="block", block=variant.key_block)[1].shape[2] < -(-700 // KEY_BLOCK)
    assert not torch.equal(got, by_hand(KEY_BLOCK))


def test_other_blocks_than_those_of_fp8_operands_are_refused(manifest: Manifest) -> None:
    """FP8 operands come with a descale per 128 keys: a kernel with other blocks serves coarser descales only."""
    variant = wide_blocks(manifest)
    x = randn(1, 2, 40, variant.head_dim, seed=1)

    def run(scaling: str, *granularity: str) -> torch.Tensor:
        fp8, descales = zip(*(quantize(x, granularity=shared_by, amax=14.0) for shared_by in granularity), strict=True)
        named = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
        return attention(*fp8, scaling=scaling, kernel=variant.id, **named)

    with pytest.raises(UnsupportedError, match=f"{variant.id}.*key_block={variant.key_block}.*per 128 keys"):
        run("block", "token", "block", "block")
    assert relative_l2(run("head", "head", "head", "head"), attention64(x, x, x, variant.head_dim**-0.5).out) < 0.075


@pytest.mark.parametrize("order", ["bhsd", "bshd"])
@pytest.mark.parametrize(
    ("head_dim", "scaling", "out_dtype", "scores"),
    [
        (64, "block", torch.bfloat16, {}),
        (40, "token", torch.bfloat16, {}),
        (40, "tensor", E4M3, {}),
        (64, "head", E4M3, {}),
        (64, "block", torch.bfloat16, SCORES),
        (40, "token", torch.bfloat16, {"sinks": SCORES["sinks"]}),
        (40, "tensor", torch.bfloat16, {"softcap": 0.5}),
        (64, "head", E4M3, {"merge_lse": True}),
    ],
)
def test_what_a_launch_is_given(
    head_dim: int,
    scaling: str,
    out_dtype: torch.dtype,
    scores: dict[str, Any],
    order: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The emulator in the place of the compiled kernel, on what the launch hands over: aligned bytes of the kernel's
    head_dim, V packed, K's descales of whole tiles, the cap and the sinks; the result is that of the CPU path. The LSE
    of a kernel lacks the sinks, which the launch adds."""
    q, k, v = operands(seqlen=150, head_dim=head_dim)
    if order == "bshd":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    out_descale = torch.full((1,), 0.01) if out_dtype == E4M3 else None
    asked = {"scaling": scaling, "out_dtype": out_dtype, "out_descale": out_descale, "scale": -0.2}
    asked |= scores
    want = attend(*half_arguments(q, k, v, **asked))
    call, tensors = split("half", q=q, k=k, v=v, **asked)
    plan = resolve(call, q, k)
    variant = plan.variant

    def forward(given: int, *arguments: Any) -> None:
        q8, k8, packed, *descales, out_descale, out, lse, amax, scale, offset, window, merge, cap, sinks = arguments
        assert given == plan.number and window == 0 and out.shape[3] == variant.head_dim
        assert (merge, cap) == (scores.get("merge_lse", False), scores.get("softcap", 0.0))
        assert sinks is scores.get("sinks")
        assert all(x.dtype == torch.uint8 and aligned(x) is x for x in (q8, k8, packed))
        assert packed.is_contiguous() and packed.shape[3] == 256
        if scaling == "token":
            assert descales[1].shape[2] == 256 and descales[2].shape[2] == variant.head_dim
            descales[1] = descales[1][:, :, :150]
        v8 = unpack_v(packed.view(E4M3), 150)
        kernel = partial(
            emulate,
            q8.view(E4M3),
            k8.view(E4M3),
            v8,
            *descales,
            variant=variant,
            scale=scale,
            scaling=scaling,
            causal_offset=offset,
            out_descale=out_descale,
            softcap=cap,
            merge_lse=merge,
        )
        result = kernel(sinks=sinks)
        out.copy_(as_bytes(result.out))
        lse.copy_(kernel().lse)
        amax.copy_(result.amax)

    monkeypatch.setattr(torch.ops, "fp8cutlass_C", SimpleNamespace(forward=forward), raising=False)
    monkeypatch.setattr(extension, "load", lambda: None)
    monkeypatch.setattr(launch, "_emulate", launch._forward)
    got = run(plan, tensors)
    for x, y in zip(got, want, strict=True):
        assert x.stride() == y.stride() and torch.equal(as_bytes(x), as_bytes(y))
