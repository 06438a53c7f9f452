"""Calls that were made before: which take the short way, and that it gives what the long way gives."""

import copy
import inspect
import pickle
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import stand_in
import torch
from gpu import needs

import fp8cutlass
from fp8cutlass import UnsupportedError
from fp8cutlass.call import kept
from fp8cutlass.call import memo as eager
from fp8cutlass.call import operators as operator
from fp8cutlass.call.card import prepared_call
from fp8cutlass.call.launch import empty_outputs
from fp8cutlass.call.options import Options
from fp8cutlass.call.plan import resolve
from fp8cutlass.call.request import TENSORS, request_of
from fp8cutlass.call.settle import settle
from fp8cutlass.native import extension

api = import_module("fp8cutlass.api.attention")  # the name is also the function's

needs_card = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card"),
]


def operands(device: str = "cuda", tokens: int = 100, head_dim: int = 64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, 3, tokens, head_dim, generator=generator).to(torch.bfloat16).to(device) for _ in range(3)]


def quantised(x: torch.Tensor, granularity: str) -> tuple[torch.Tensor, torch.Tensor]:
    return fp8cutlass.quantize(x, granularity=granularity)


def reversed_rows(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8).flip(2).view(x.dtype) if x.element_size() == 1 else x.flip(2)


def fp8(device: str = "cuda", tokens: int = 100, head_dim: int = 64, scaling: str = "head") -> Any:
    """FP8 operands and the descales of a call on them, by name."""
    granularity = {"head": ("head",) * 3, "token": ("token", "token", "channel")}[scaling]
    made = [quantised(x, g) for x, g in zip(operands(device, tokens, head_dim), granularity, strict=True)]
    descales = dict(zip(("q_descale", "k_descale", "v_descale"), (d for _, d in made), strict=True))
    return [x for x, _ in made], descales


PARAMETERS = {name: p.default for name, p in inspect.signature(fp8cutlass.attention).parameters.items()}


def signed(*tensors: Any, descales: tuple[Any, ...] = (), **options: Any) -> Any:
    return eager.signature(*tensors, descales, Options(**options))


def test_cpu_tensors_take_the_long_way() -> None:
    eager.forget()
    fp8cutlass.attention(*operands("cpu", 8))
    assert signed(*operands("cpu", 8)) is None
    assert not eager._known


def test_every_argument_is_in_the_signature_or_takes_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument that is in neither would be ignored by all calls but the first; nor may two change places."""
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(eager, "signature", lambda *arguments: seen.append(arguments))
    given = operands("cpu", 8)
    for name in list(PARAMETERS)[3:]:
        seen.clear()
        value = object()
        with pytest.raises(UnsupportedError):
            fp8cutlass.attention(*given, **{name: value})
        if name in ("out", "out_descale"):
            assert not seen, name
            continue
        ((_, _, _, descales, options, sinks, mask),) = seen
        assert (sinks is value) == (name == "sinks") and (mask is value) == (name == "attn_mask")
        if name in ("sinks", "attn_mask"):
            continue
        if name.endswith("_descale"):
            assert [x is value for x in descales] == [name.startswith(x) for x in "qkv"]
        else:
            assert descales == () and getattr(options, name) is value, name


def test_an_option_that_cannot_be_hashed_is_refused_by_name() -> None:
    """It must not come back as a TypeError of the look-up."""
    assert eager.look_up(("a shape", ["unhashable"])) is None
    with pytest.raises(UnsupportedError, match="layout must be one of"):
        fp8cutlass.attention(*operands("cpu", 8), layout=["bhsd"])  # type: ignore[arg-type]


def test_options_have_the_defaults_of_attention() -> None:
    """The two signatures are written by hand."""
    defaults = {name: PARAMETERS[name] for name in Options._fields}
    assert Options()._asdict() == defaults
    assert set(PARAMETERS) == set(Options._fields) | set(TENSORS)


def test_what_is_remembered_is_what_the_operator_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option in its place: the short way and the operator make the same plan."""
    asked, kept = [], []
    monkeypatch.setattr(operator, "run", lambda plan, t: asked.append(plan) or empty_outputs(plan.call, t.q))
    monkeypatch.setattr(eager, "known", lambda plan, t, descales: kept.append(plan))
    options = {"is_causal": True, "causal_alignment": "bottom_right", "scale": 0.3, "return_lse": True}
    options |= {"scaling": "token", "precision": "accurate", "hadamard": True, "out_dtype": torch.float16}
    q, k, v = operands("cpu", 8)
    call, tensors = settle(request_of(q[:, :, :5], k, v, **options))
    operator.execute(call, tensors)
    eager.remember(("signature",), call, tensors)
    eager.forget()
    assert asked == kept and len(kept) == 1


def outputs(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def test_it_keeps_no_more_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "LIMIT", 2)
    calls: kept.Kept[int] = kept.Kept()
    for i in range(3):
        calls.keep((i,), i)
    assert calls == {(2,): 2}


def by_the_short_way(monkeypatch: pytest.MonkeyPatch, operator: str, first: Any, second: Any) -> tuple[Any, Any]:
    """What the second call gives by the long way, and after the first by the short one."""
    want = outputs(second())
    with monkeypatch.context() as patched:
        eager.forget()
        asked = stand_in.card(patched)
        first()
        assert len(eager._known) == 1
        patched.setattr(api, "settle", lambda request: pytest.fail("the long way"))
        got = outputs(second())
        assert asked == [operator] * 2
        eager.forget()
    return got, want


def same(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> bool:
    pairs = zip(got, want, strict=True)
    return all(torch.equal(x, y) and x.stride() == y.stride() and x.dtype == y.dtype for x, y in pairs)


@pytest.mark.parametrize("head_dim", [64, 72, 80])  # as it is, copied, padded by the kernel
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "scale": -0.3, "return_lse": True, "return_amax": True},
        {"out_dtype": torch.float16, "layout": "bshd"},
    ],
    ids=str,
)
@pytest.mark.parametrize("scaling", ["head", "token", "block"])
def test_fp8_operands_by_the_short_way(
    scaling: str, options: dict[str, Any], head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of the emulator, of other tensors than those of the first call, from descales of every accepted form."""
    first, first_descales = fp8("cpu", 40, head_dim, "token" if scaling == "token" else "head")
    if options.get("layout") == "bshd":
        first = [x.view(torch.uint8).transpose(1, 2).contiguous().view(x.dtype) for x in first]
    given = [x.view(torch.uint8).flip(0).view(x.dtype) for x in first]
    mixed = {"q_descale": 0.5, "k_descale": torch.tensor([0.25, 0.5, 1.0]), "v_descale": torch.tensor(0.125)}
    strided = {name: torch.stack([x, 2 * x], -1)[..., 1] for name, x in first_descales.items()}
    for descales in (dict.fromkeys(mixed, 0.5), mixed, strided, {n: x * 2 for n, x in first_descales.items()}):
        call = partial(fp8cutlass.attention, scaling=scaling, **options)
        other = {n: x if isinstance(x, float) else x * 0.5 for n, x in descales.items()}
        calls = partial(call, *first, **descales), partial(call, *given, **other)
        got, want = by_the_short_way(monkeypatch, "attend_fp8", *calls)
        assert same(got, want), descales


def test_descales_that_the_operator_refuses_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no part of the signature of a call that is known."""
    (q, k, v), descales = fp8("cpu")
    asked = stand_in.card(monkeypatch)
    eager.forget()
    call = partial(fp8cutlass.attention, q, k, v, scaling="head")
    want = call(**descales)
    for value, words in (
        (descales["v_descale"].double(), "v_descale must be float32"),
        (descales["v_descale"][:1], r"v_descale has shape \(1, 3\); one descale per head means \(2, 3\)"),
        (descales["v_descale"].tolist(), "v_descale must be a float or a float32 tensor, got list"),
        (descales["v_descale"].clone().requires_grad_(), "requires_grad"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            call(**descales | {"v_descale": value})
    assert torch.equal(call(**descales), want)
    assert len(asked) == 4 and len(eager._known) == 1  # two refusals are the operator's own
    eager.forget()


@pytest.mark.parametrize("head_dim", [64, 72])
@pytest.mark.parametrize("made", [{}, {"smooth_k": True, "hadamard": True}, {"scaling": "token"}], ids=str)
def test_packed_keys_by_the_short_way(made: dict[str, Any], head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = operands("cpu", 40, head_dim)
    packed, other, more = fp8cutlass.pack_kv(k, v, **made), fp8cutlass.pack_kv(k.flip(2), v, **made), q.flip(2)
    options = {"is_causal": True, "scale": -0.3, "return_lse": True}
    for changed in (options, {}):
        call = partial(fp8cutlass.attention, **changed)
        got, want = by_the_short_way(monkeypatch, "attend_packed", partial(call, q, packed), partial(call, more, other))
        assert same(got, want)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("head_dim", [64, 72])
def test_packed_keys_write_into_out(head_dim: int, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some rows of a larger tensor, and nothing beside them. Where a kernel cannot write, the result is copied."""
    q, k, v = operands("cpu", 40, head_dim)
    packed, rows = fp8cutlass.pack_kv(k, v), slice(8, 48)

    def call(q: torch.Tensor, room: torch.Tensor) -> Any:
        given = q.transpose(1, 2) if layout == "bshd" else q
        dim = 1 if layout == "bshd" else 2
        room.fill_(7.0)
        out = room.narrow(dim, rows.start, q.shape[2])
        result, lse = fp8cutlass.attention(given, packed, layout=layout, return_lse=True, out=out)
        assert result is out
        return room.clone(), lse

    def room(last: int) -> torch.Tensor:
        batch, heads, tokens, _ = q.shape
        shape = (batch, tokens + 16, heads, last) if layout == "bshd" else (batch, heads, tokens + 16, last)
        return torch.empty(shape, dtype=q.dtype)[..., :head_dim]

    first, more = room(head_dim), room(head_dim)
    got, want = by_the_short_way(monkeypatch, "attend_packed", partial(call, q, first), partial(call, q.flip(2), more))
    assert same(got, want)
    odd = room(head_dim + 1)  # rows between 16 bytes
    assert torch.equal(call(q.flip(2), odd)[0], want[0])
    fits = partial(eager.room, options=Options())
    assert fits(q.clone(), q, packed) is not None
    others = (None, q, q.half(), q[:1], q.clone().requires_grad_(), q.new_empty(2, 3, 40, head_dim + 1)[..., :head_dim])
    assert all(fits(x, q, packed) is None for x in others) and fits(q.clone(), q, k) is None


@pytest.mark.parametrize("kind", ["attend", "attend_fp8", "attend_packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_by_the_short_way(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others than those of the first call; the LSE gets them once."""
    q, k, v = operands("cpu", 40)
    sinks, options = torch.tensor([0.5, -1.0, 3.0]).to(dtype), {"is_causal": True, "return_lse": True}
    if kind == "attend_fp8":
        (q, k, v), descales = fp8("cpu", 40)
        options |= {**descales, "scaling": "head"}
    keys = (fp8cutlass.pack_kv(k, v), None) if kind == "attend_packed" else (k, v)
    call = partial(fp8cutlass.attention, q, *keys, **options)
    got, want = by_the_short_way(monkeypatch, kind, partial(call, sinks=sinks), partial(call, sinks=sinks + 2))
    assert same(got, want) and not same(got, outputs(call(sinks=sinks)))


def test_packed_keys_are_told_apart_by_a_text_that_a_copy_does_not_keep() -> None:
    """A text that was made of a device, and read on another, would launch there with the address of a third."""
    q, k, v = operands("cpu", 40)
    made = [fp8cutlass.pack_kv(k[:, :, :n], v[:, :, :n], **m) for n in (40, 39) for m in ({}, {"precision": "high"})]
    assert len({kv.metadata for kv in made}) == len(made)
    again = fp8cutlass.pack_kv(k.flip(2), v)
    assert again.metadata is made[0].metadata
    assert "metadata" in vars(again) and "metadata" not in vars(copy.copy(again)) and "cpu" in again.metadata
    assert "metadata" not in vars(pickle.loads(pickle.dumps(again)))


def test_what_the_signature_does_not_tell_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast, the value of a tensor: the next call with this signature would be another one."""
    kept: list[Any] = []
    monkeypatch.setattr(eager, "signature", lambda *arguments: ("signature",))
    monkeypatch.setattr(eager, "remember", lambda *arguments: kept.append(arguments))
    q, k, v = operands("cpu", 8)
    packed = fp8cutlass.pack_kv(k, v)
    with torch.autocast("cpu"):
        fp8cutlass.attention(q.float(), k.float(), v.float())
        fp8cutlass.attention(q, k.float(), v)
        fp8cutlass.attention(q.float(), packed)
    fp8cutlass.attention(q, k, v, scale=torch.tensor(0.1))  # type: ignore[arg-type]
    fp8cutlass.attention(q.clone().requires_grad_(), k, v, backward="flash")
    assert not kept
    fp8cutlass.attention(q, k, v)
    fp8cutlass.attention(q, packed)
    fp8cutlass.attention(q[0], k[0], v[0])  # by the call on four dimensions
    assert len(kept) == 3


@pytest.mark.parametrize("shape", [(2, 3, 0, 64), (0, 3, 8, 64)], ids=str)
def test_what_needs_no_kernel_is_not_kept(shape: tuple[int, ...]) -> None:
    """The short way launches; of nothing it must not."""
    q = torch.zeros(shape, dtype=torch.bfloat16)
    kv = torch.zeros(shape[0], 3, 8, 64, dtype=torch.bfloat16)
    for request in (request_of(q, kv, kv), request_of(q, fp8cutlass.pack_kv(kv, kv))):
        eager.remember(("signature",), *settle(request))
        assert not eager._known


def with_number(constants: torch.Tensor, name: str, value: float) -> torch.Tensor:
    """The numbers of a call with another one in the place of that name."""
    changed = constants.clone()
    changed[extension.call_fields().index(name)] = value
    return changed


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
        needs(*inputs, **options)
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
        needs(q, k, v, out_dtype=torch.float16)
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

    @pytest.mark.parametrize("options", [{}, {"return_lse": True, "return_amax": True}, {"layout": "bshd"}], ids=str)
    @pytest.mark.parametrize("kind", ["tensors", "numbers", "coarse", "packed"])
    def test_fp8_and_packed_operands(self, kind: str, options: dict[str, Any]) -> None:
        """The second call is the short one: the same bits, also of other contents and from other descales."""
        if kind == "packed":
            q, k, v = operands()
            inputs, descales = [q], {}
            packed = fp8cutlass.pack_kv(k, v, layout=options.get("layout", "bhsd"))
            others = [packed]
        else:
            inputs, descales = fp8()
            inputs, others = inputs[:1], inputs[1:]
            if kind != "tensors":
                descales = dict.fromkeys(descales, 0.5 if kind == "numbers" else torch.tensor(0.5, device="cuda"))
            descales["scaling"] = "head"
            if "layout" in options:
                descales |= {"q_descale": 0.5, "k_descale": 0.5, "v_descale": 0.5}
        first = fp8cutlass.attention(*inputs, *others, **descales, **options)
        assert len(eager._known) == 1
        second = fp8cutlass.attention(*inputs, *others, **descales, **options)
        assert len(eager._known) == 1
        flipped = [reversed_rows(inputs[0])]
        third = fp8cutlass.attention(*flipped, *others, **descales, **options)
        eager.forget()
        long = fp8cutlass.attention(*flipped, *others, **descales, **options)
        for got, want in ((second, first), (third, long)):
            for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, want)), strict=True):
                assert torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype

    def test_descales_are_those_of_each_call(self) -> None:
        """A remembered call must not keep the first one's; numbers belong to the signature, tensors do not."""
        (q, k, v), descales = fp8()
        options = {"scaling": "head"}
        base = fp8cutlass.attention(q, k, v, **descales, **options).float()
        doubled = descales | {"v_descale": descales["v_descale"] * 2}
        again = fp8cutlass.attention(q, k, v, **doubled, **options).float()
        assert len(eager._known) == 1
        assert torch.allclose(again, 2 * base, rtol=1e-2, atol=0)
        for number in (1.0, 2.0):
            fp8cutlass.attention(q, k, v, **descales | {"v_descale": number}, **options)
        assert len(eager._known) == 3
        with pytest.raises(UnsupportedError, match="v_descale must be float32"):
            fp8cutlass.attention(q, k, v, **descales | {"v_descale": descales["v_descale"].double()}, **options)
        with pytest.raises(UnsupportedError, match="requires_grad"):
            fp8cutlass.attention(q, k, v, **descales | {"v_descale": descales["v_descale"].requires_grad_()}, **options)

    def test_packed_keys_that_differ(self) -> None:
        """Other sizes, another packing, another precision: none is taken for the one before."""
        q, k, v = operands()
        needs(q, k, v, scaling="token")
        transforms = ({}, {"smooth_k": True}, {"hadamard": True}, {"scaling": "token"}, {"precision": "high"})
        packed = [fp8cutlass.pack_kv(k[:, :, :n], v[:, :, :n], **made) for made in transforms for n in (100, 70)]
        wanted = []
        for kv in packed:
            eager.forget()
            wanted.append(fp8cutlass.attention(q, kv))
        for _ in range(2):
            for kv, want in zip(packed, wanted, strict=True):
                assert torch.equal(fp8cutlass.attention(q, kv), want), kv
        assert len(eager._known) == len(packed)
        with pytest.raises(UnsupportedError, match="not what key was packed with"):
            fp8cutlass.attention(q, packed[0], scaling="token")

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            (lambda c: c[:9], "constants must be 19 numbers"),
            (lambda c: c.float(), "constants must be 19 numbers"),
            (lambda c: c.cuda(), "constants must be 19 numbers"),
            (lambda c: with_number(c, "variant", 0.5), "variant must be an integer"),
            (lambda c: with_number(c, "variant", -1.0), "variant -1 is not in the registry"),
            (lambda c: with_number(c, "q_granularity", torch.nan), "q_granularity must be an integer"),
            (lambda c: with_number(c, "k_granularity", 9.0), "k_granularity is 9"),
            (lambda c: with_number(c, "score_amax", 0.5), "score_amax must lie in"),
        ],
    )
    def test_wrong_constants_are_refused(self, change: Any, named: str) -> None:
        q, k, v = operands()
        call, tensors = settle(request_of(q, k, v))
        ready = prepared_call(resolve(call, q, k), tensors)
        with pytest.raises(RuntimeError, match=named):
            ready.operator(change(ready.constants), q, k, v)

    def test_a_lazy_negation_is_seen(self) -> None:
        """A view that only the dispatcher knows to be negated, of the metadata of a call that is known."""
        q, k, v = operands()
        fp8cutlass.attention(q, k, v)
        for negated in ((torch._neg_view(q), k, v), (q, k, torch._neg_view(v))):
            plain = [x.resolve_neg() for x in negated]
            assert torch.equal(fp8cutlass.attention(*negated), fp8cutlass.attention(*plain))
        assert len(eager._known) == 1

    def test_on_a_stream_of_its_own(self) -> None:
        """The short way launches on the stream that is current, and its workspace belongs to it."""
        q, k, v = operands(tokens=700)
        want = fp8cutlass.attention(q, k, v)
        torch.cuda.synchronize()
        streams, found = [torch.cuda.Stream() for _ in range(4)], []
        for _ in range(50):
            for stream in streams:
                with torch.cuda.stream(stream):
                    found.append(fp8cutlass.attention(q, k, v))
        torch.cuda.synchronize()
        assert all(torch.equal(x, want) for x in found)

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
    def test_on_a_card_that_is_not_current(self) -> None:
        for _ in range(2):
            results = [fp8cutlass.attention(*operands(f"cuda:{index}")) for index in (1, 0)]
            assert [x.get_device() for x in results] == [1, 0] and torch.equal(results[0].cpu(), results[1].cpu())

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

    @pytest.mark.parametrize("kind", ["tensors", "numbers", "packed"])
    def test_fp8_and_packed_operands_in_a_graph(self, kind: str) -> None:
        """A capture of the short way replays with new contents; a number becomes a tensor inside the graph."""
        if kind == "packed":
            q, *kv = operands()
            others: list[Any] = [fp8cutlass.pack_kv(*kv)]
            options: dict[str, Any] = {"return_amax": True}
        else:
            (q, *others), options = fp8()
            if kind == "numbers":
                options = dict.fromkeys(options, 0.5)
            options["scaling"] = "head"
        fp8cutlass.attention(q, *others, **options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = fp8cutlass.attention(q, *others, **options)
        q.copy_(reversed_rows(q))
        for _ in range(2):  # what a launch leaves behind must not reach the next
            graph.replay()
            now = fp8cutlass.attention(q, *others, **options)
            for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (captured, now)), strict=True):
                assert torch.equal(a, b)
        assert len(eager._known) == 1

    def test_modes_see_the_operator(self) -> None:
        """A dispatch mode must be able to stand in for the call: it sees fp8cutlass.attend."""
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
        assert "fp8cutlass.attend.default" in seen
