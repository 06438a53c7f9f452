"""Keys and values that are packed once: the bits of a call on them, for every query that a kernel serves.

Regressions these catch: a packing that depends on the query, a kernel that reads what was packed for other blocks or
another range, a mean that the LSE does not get back, an argument that is ignored because the packing has settled it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import stand_in
import torch
from calls import arguments, split
from reference import randn
from torch.utils import _pytree as pytree

from fp8cutlass import PackedKV, UnsupportedError, attention, explain, pack_kv, supports
from fp8cutlass.cache.packed import HELD
from fp8cutlass.call import launch
from fp8cutlass.call import plan as plans
from fp8cutlass.call.operators import attend
from fp8cutlass.call.operators import pack_kv as pack_kv_operator
from fp8cutlass.call.plan import resolve
from fp8cutlass.call.request import DEFAULTS
from fp8cutlass.manifest import Manifest
from fp8cutlass.memory import as_bytes
from fp8cutlass.native import fused

E4M3 = torch.float8_e4m3fn
TRANSFORMS: list[dict[str, Any]] = [{}, {"smooth_k": True}, {"hadamard": True}, {"smooth_k": True, "hadamard": True}]


def operands(head_dim: int = 64, seqlen_q: int = 37, seqlen_k: int = 200, dtype: Any = torch.bfloat16) -> Any:
    q = randn(2, 4, seqlen_q, head_dim, seed=1)
    k, v = (randn(2, 2, seqlen_k, head_dim, seed=seed) for seed in (2, 3))
    return q.to(dtype), (k.float() + 3).to(dtype), v.to(dtype)


def same(got: Any, want: Any) -> bool:
    """Results, LSE and amax to the bit, and in the same memory order."""
    pairs = list(zip(got, want, strict=True))
    return all(torch.equal(as_bytes(x), as_bytes(y)) and x.stride() == y.stride() for x, y in pairs)


@pytest.mark.parametrize("transforms", TRANSFORMS, ids=str)
@pytest.mark.parametrize("precision", ["fast", "accurate"])
@pytest.mark.parametrize("scaling", ["tensor", "head", "block", "token"])
def test_the_bits_of_a_call_on_key_and_value(scaling: str, precision: str, transforms: dict[str, Any]) -> None:
    q, k, v = operands()
    made = {"scaling": scaling, "precision": precision} | transforms
    common = {"enable_gqa": True, "return_lse": True, "return_amax": True}
    packed = pack_kv(k, v, **made)
    for options in ({}, {"scale": -0.2, "is_causal": True, "causal_alignment": "bottom_right"}):
        want = attention(q, k, v, **common, **options, **made)
        assert same(attention(q, packed, **common, **options), want)
        assert same(attention(q, packed, **common, **options, **made), want)  # what is said twice does no harm


@pytest.mark.parametrize("head_dim", [1, 40, 96, 200])
@pytest.mark.parametrize("scaling", ["block", "token"])
def test_padded_head_dims_and_fp16(head_dim: int, scaling: str) -> None:
    q, k, v = operands(head_dim, dtype=torch.float16)
    made = {"scaling": scaling, "smooth_k": True}
    packed = pack_kv(k, v, **made)
    assert packed.shape == k.shape and packed.dtype == torch.float16
    common: dict[str, Any] = {"enable_gqa": True, "return_lse": True}
    assert same(attention(q, packed, **common), attention(q, k, v, **common, **made))


@pytest.mark.parametrize("order", ["transposed", "gap", "last"])
def test_layouts_and_strides(order: str) -> None:
    """The query's layout is its own affair; keys of any strides pack to the same bytes."""
    q, k, v = operands()
    packed = pack_kv(k, v)
    views = {
        "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "gap": lambda x: torch.cat((x, x), 3)[..., :64],
        "last": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    }
    other = pack_kv(views[order](k), views[order](v))
    for name in ("k", "v", "k_descale", "v_descale"):
        assert torch.equal(getattr(other, name), getattr(packed, name)), name
    as_bshd = pack_kv(k.transpose(1, 2), v.transpose(1, 2), layout="bshd", query_shape=(2, 37, 4, 64))
    want = attention(q, k, v, enable_gqa=True)
    for held in (packed, other, as_bshd):
        assert torch.equal(attention(q, held, enable_gqa=True), want)
        got = attention(q.transpose(1, 2), held, enable_gqa=True, layout="bshd")
        assert torch.equal(got.transpose(1, 2), want)


def test_output_types_and_out() -> None:
    q, k, v = operands()
    packed = pack_kv(k, v)
    common: dict[str, Any] = {"enable_gqa": True, "return_amax": True, "out_dtype": E4M3, "out_descale": 0.01}
    assert same(attention(q, packed, **common), attention(q, k, v, **common))
    out = torch.empty_like(q)
    assert attention(q, packed, enable_gqa=True, out=out) is out
    assert torch.equal(out, attention(q, k, v, enable_gqa=True))


def test_packed_for_a_pinned_kernel() -> None:
    """One of a wider head_dim: later queries find kernels that read it without naming one."""
    q, k, v = operands()
    wide = supports(*operands(128), enable_gqa=True, precision="accurate")[1].split()[0]
    packed = pack_kv(k, v, kernel=wide)
    assert packed.kernel == wide and packed.k.shape[3] == 128 and packed.amax == 448
    want = attention(q, k, v, enable_gqa=True, kernel=wide)
    assert torch.equal(attention(q, packed, enable_gqa=True, kernel=wide), want)
    assert torch.equal(attention(q, packed, enable_gqa=True), want)


def test_many_queries_and_nothing_is_kept_of_key_and_value() -> None:
    q, k, v = operands()
    packed = pack_kv(k, v, smooth_k=True)
    queries = [randn(2, heads, rows, 64, seed=rows) for heads, rows in ((2, 1), (4, 33), (8, 300))]
    want = [attention(x, k, v, enable_gqa=True, smooth_k=True, return_lse=True) for x in queries]
    k.fill_(torch.nan), v.fill_(torch.nan)
    for x, expected in zip(queries, want, strict=True):
        assert same(attention(x, packed, enable_gqa=True, return_lse=True), expected)


@pytest.mark.edge(4, 5)
@pytest.mark.parametrize("scaling", ["tensor", "head", "block", "token"])
def test_nothing_to_attend_or_to_do(scaling: str) -> None:
    none = torch.empty(2, 2, 0, 64, dtype=torch.bfloat16)
    packed = pack_kv(none, none, scaling=scaling, smooth_k=True)
    out, lse = attention(operands()[0], packed, enable_gqa=True, return_lse=True)
    assert not out.any() and bool((lse == -torch.inf).all())
    for batch, heads, rows in ((0, 2, 5), (2, 0, 5), (2, 2, 0)):
        x = torch.empty(batch, heads, rows, 64, dtype=torch.bfloat16)
        assert attention(x, pack_kv(x, x, scaling=scaling, smooth_k=True)).shape == x.shape


@pytest.mark.edge(54)
@pytest.mark.parametrize("scaling", ["head", "block", "token"])
def test_a_broken_key_breaks_what_it_breaks_unpacked(scaling: str) -> None:
    q, k, v = operands()
    k[0, 0, 7, 3], v[1, 1, 9, 2] = torch.inf, torch.nan
    want = attention(q, k, v, enable_gqa=True, scaling=scaling)
    got = attention(q, pack_kv(k, v, scaling=scaling), enable_gqa=True)
    assert torch.equal(got.isnan(), want.isnan()) and bool(want.isnan().any()) and not bool(want.isnan().all())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())


# ---- what is refused ------------------------------------------------------------------------------------------------

KEYS = operands()[1:]
PACKED = pack_kv(*KEYS)
QUERY = operands()[0]
DEVICE, GROUPED, MISMATCH = pytest.mark.edge(37), pytest.mark.edge(24), pytest.mark.edge(25)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"value": KEYS[1]}, ["value must be None", "PackedKV", "Tensor"]),
        ({"scaling": "head"}, ["scaling='head'", "packed with", "scaling='block'"]),
        ({"scaling": "row"}, ["scaling='row'", "scaling='block'"]),
        ({"precision": "accurate"}, ["precision='accurate'", "precision='fast'"]),
        ({"smooth_k": True}, ["smooth_k=True", "smooth_k=False"]),
        ({"hadamard": True}, ["hadamard=True", "hadamard=False"]),
        pytest.param({"query": QUERY.half()}, ["share one dtype", "float16", "bfloat16"], marks=pytest.mark.edge(26)),
        ({"query": QUERY.to(E4M3)}, ["share one dtype"]),
        pytest.param({"query": QUERY.to("meta")}, ["key is on cpu", "query is on meta"], marks=DEVICE),
        pytest.param({"enable_gqa": False}, ["4 heads", "key has 2", "enable_gqa=True"], marks=GROUPED),
        pytest.param({"query": QUERY[:, :3]}, ["multiple", "3 and 2"], marks=GROUPED),
        pytest.param({"query": QUERY[:1]}, ["batch size", "1 and 2"], marks=MISMATCH),
        pytest.param({"query": QUERY[..., :32]}, ["head_dim", "32 and 64"], marks=MISMATCH),
        ({"k_descale": 1.0}, ["k_descale is for FP8 operands"]),
        pytest.param({"dropout_p": 0.5}, ["dropout_p"], marks=pytest.mark.edge(56)),
        ({"dropout_p": 0.5, "fallback": "sdpa"}, ["dropout_p", "fallback='sdpa'", "PackedKV"]),
        ({"attn_mask": torch.ones(7, 200)}, ["attn_mask", "(7, 200)", "does not broadcast"]),
        ({"kernel": "sm90a_fwd"}, ["sm90a_fwd", "manifest"]),
    ],
)
def test_attention_names_what_is_wrong(changes: dict[str, Any], words: list[str]) -> None:
    call: dict[str, Any] = {"query": QUERY, "key": PACKED, "enable_gqa": True} | changes
    with pytest.raises(UnsupportedError) as caught:
        attention(**call)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    if "fallback" not in changes:
        assert not supports(**call)[0] and explain(**call).startswith("no kernel")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"key": None}, ["key must be a torch.Tensor", "NoneType"]),
        ({"key": KEYS[0][0]}, ["key must have 4 dimensions", "(2, 200, 64)"]),
        ({"key": KEYS[0].to(E4M3), "value": KEYS[1].to(E4M3)}, ["key", "value", "float8_e4m3fn", "bfloat16"]),
        ({"value": KEYS[1].half()}, ["share one dtype"]),
        ({"value": KEYS[1][:, :, :9]}, ["tokens", "200 and 9"]),
        ({"value": KEYS[1].to("meta")}, ["value is on meta"]),
        ({"scaling": "row"}, ["scaling", "'row'"]),
        ({"precision": "best"}, ["precision", "'best'"]),
        ({"layout": "sbhd"}, ["layout", "'sbhd'"]),
        ({"smooth_k": 1}, ["smooth_k", "True or False"]),
        ({"query_shape": (2, 4, 64)}, ["query_shape", "(2, 4, 64)"]),
        ({"query_shape": (2, 4, -1, 64)}, ["query_shape", "-1"]),
        ({"query_shape": (2, 3, 7, 64)}, ["multiple", "3 and 2"]),
        ({"out_dtype": torch.float32}, ["out_dtype", "float32"]),
        ({"kernel": "sm90a_fwd"}, ["sm90a_fwd", "manifest"]),
        ({"key": KEYS[0].float().requires_grad_().bfloat16()}, ["key has requires_grad=True"]),
        ({"key": torch.zeros(1, 1, 4, 300).half(), "value": torch.zeros(1, 1, 4, 300).half()}, ["head_dim", "300"]),
    ],
)
def test_packing_names_what_is_wrong(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedError) as caught:
        pack_kv(**({"key": KEYS[0], "value": KEYS[1]} | changes))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_value_is_needed_without_packed_keys() -> None:
    with pytest.raises(UnsupportedError, match="value must be a torch.Tensor, got NoneType"):
        attention(QUERY, KEYS[0])


def test_what_it_says_of_itself() -> None:
    packed = pack_kv(*KEYS, scaling="head", hadamard=True)
    assert isinstance(packed, PackedKV) and packed.device.type == "cpu"
    for text in ("(2, 2, 200, 64)", "torch.bfloat16", "scaling='head'", "hadamard=True", "amax=14", packed.kernel):
        assert text in repr(packed)
    assert "packed with amax 14 for " + packed.kernel in explain(QUERY, packed, enable_gqa=True)
    assert all(getattr(DEFAULTS, name) in ("block", "fast", None) for name in HELD)  # what counts as not given
    assert supports(QUERY, packed, enable_gqa=True) == supports(
        QUERY, *KEYS, enable_gqa=True, scaling="head", hadamard=True
    )


# ---- torch.compile --------------------------------------------------------------------------------------------------


def held_by(packed: PackedKV) -> dict[str, Any]:
    """What the operator gets of packed keys."""
    names = ("k", "v", "k_descale", "v_descale", "k_mean", "key_block", "amax")
    return {name: getattr(packed, name) for name in names}


@pytest.mark.edge(57)
@pytest.mark.parametrize("order", ["bhsd", "bshd"])
@pytest.mark.parametrize("head_dim", [64, 40])
@pytest.mark.parametrize("scaling", ["block", "token"])
def test_opcheck(scaling: str, head_dim: int, order: str) -> None:
    q, k, v = operands(head_dim, 37, 133)
    if order == "bshd":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    packed = pack_kv(k, v, scaling=scaling, smooth_k=True)
    torch.library.opcheck(pack_kv_operator, (k, v, packed.kernel, scaling, True, False), test_utils=checks)
    asked = {"scaling": scaling, "precision": "fast", "right": 3, "scale": -0.1, "smooth_k": True}
    torch.library.opcheck(attend, arguments("packed", q=q, **held_by(packed), **asked), test_utils=checks)


@pytest.mark.edge(57)
@torch._dynamo.config.patch(error_on_recompile=True)
def test_one_graph_serves_many_sizes() -> None:
    torch._dynamo.reset()

    def step(q: torch.Tensor, packed: PackedKV) -> Any:
        return attention(q, packed, enable_gqa=True, is_causal=True, return_lse=True)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    # No two sizes are equal, blocks of 128 keys included: torch.compile would build that in.
    for batch, seqlen_q, seqlen_k in ((3, 37, 650), (5, 64, 1000), (7, 129, 1200)):
        q = randn(batch, 4, seqlen_q, 40, seed=1)
        packed = pack_kv(*(randn(batch, 2, seqlen_k, 40, seed=seed) for seed in (2, 3)), smooth_k=True)
        assert same(compiled(q, packed), step(q, packed))


def test_packing_inside_a_graph() -> None:
    """A length compiles again; what leaves the graph is a PackedKV."""
    torch._dynamo.reset()

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        packed = pack_kv(k, v, hadamard=True, query_shape=q.shape)
        return attention(q, packed, enable_gqa=True), packed

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for seqlen_k in (200, 199, 300):
        q, k, v = operands(seqlen_k=seqlen_k)
        got, packed = compiled(q, k, v)
        assert torch.equal(got, step(q, k, v)[0]) and repr(packed) == repr(step(q, k, v)[1])
        assert torch.equal(attention(q, packed, enable_gqa=True), got)


# ---- the bare operators ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("q", QUERY[:1], "k and v must be"),
        ("q", QUERY.float(), "bfloat16 or all torch.float16, got torch.float32"),
        ("q", QUERY[:, :3], "heads of k"),
        ("q", QUERY[0], "4 dimensions"),
        ("q", torch.zeros(2, 4, 37, 65).bfloat16(), "q must be .*1..64"),
        ("k", PACKED.k[:, :, :100], "v_descale|v must be|k_descale"),
        ("k", PACKED.k.view(torch.int8), "k must be torch.uint8"),
        ("v", PACKED.v[..., :128], "v must be"),
        ("v", PACKED.v.transpose(2, 3).contiguous().transpose(2, 3), "v must be contiguous"),
        ("k_descale", PACKED.k_descale[..., :1], "k_descale must be"),
        ("k_descale", None, "k_descale must be .* got none"),
        ("v_descale", PACKED.v_descale.double(), "v_descale must be"),
        ("k_mean", torch.zeros(2, 2, 32), "k_mean must be"),
        ("scaling", "row", "scaling"),
        ("scale", float("nan"), "scale must be finite"),
        ("key_block", 0, "key_block"),
        ("key_block", 64, "descale must be"),
    ],
)
def test_the_bare_operator_checks(name: str, value: Any, words: str) -> None:
    """No argument can make a kernel read outside its tensors."""
    given = {"q": QUERY, "scaling": "block", "precision": "fast", "scale": 0.1} | held_by(PACKED)
    attend(*arguments("packed", **given))
    with pytest.raises(UnsupportedError, match=words):
        attend(*arguments("packed", **given | {name: value}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ((KEYS[0].float(), KEYS[1].float()), "k and v must be"),
        ((KEYS[0], KEYS[1][:, :, :9]), "k and v must be"),
        ((torch.zeros(1, 1, 4, 72).half(), torch.zeros(1, 1, 4, 72).half()), "head_dim 1..64"),
        ((*KEYS, PACKED.kernel, "token"), "scaling"),
        ((*KEYS, "nothing"), "nothing"),
    ],
)
def test_the_bare_packing_operator_checks(change: tuple[Any, ...], words: str) -> None:
    arguments = (*change, *(*KEYS, PACKED.kernel, "block", False, False)[len(change) :])
    with pytest.raises(UnsupportedError, match=words):
        pack_kv_operator(*arguments)


# ---- the path of a card ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transforms", TRANSFORMS, ids=str)
@pytest.mark.parametrize("scaling", ["tensor", "head", "block", "token"])
def test_the_calls_that_a_card_gets(
    scaling: str, transforms: dict[str, Any], manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the CPU's specification in the place of the kernels: K and V are packed without Q, and one operator gets the
    bytes and descales of both, and Q."""
    q, k, v = operands()
    common: dict[str, Any] = {"enable_gqa": True, "return_lse": True, "return_amax": True, "scale": -0.1}
    want = attention(q, k, v, **common, scaling=scaling, **transforms)
    call, tensors = split("half", q=q, k=k, v=v, scaling=scaling, precision="fast", scale=-0.1, **transforms)
    variant = resolve(call, q, k).variant
    granularity, packs = manifest.scaling[scaling], []
    whole = launch.kernel_operands(call, variant, granularity, tensors)
    mean = pack_kv(k, v, scaling=scaling, **transforms).k_mean

    def pack(key_block: int, q: Any, k: Any, v: Any, gq: int, gk: int, gv: int, *rest: Any) -> None:
        score_amax, _, negate, q8, k8, v8, q_descale, k_descale, v_descale, maxima, rotated, k_mean = rest
        assert key_block == variant.key_block and score_amax == plans.score_amax(variant)
        assert [gq, gk, gv] == [fused.GRANULARITIES.index(granularity[name]) for name in "qkv"]
        assert rotated == call.hadamard and (k_mean is not None) == call.smooth_k
        assert q is None and q8 is None and q_descale is None
        assert not negate  # a negative scale turns Q, and packed keys know of none
        packs.append("kv")
        counts = [d.numel() for d, g in ((k_descale, gk), (v_descale, gv))
                  if fused.GRANULARITIES[g] in fused.BEYOND_BLOCKS]  # fmt: skip
        assert (maxima is None and not counts) or (maxima.numel() == sum(counts) and not maxima.any())
        rooms = {"k": k8, "v": v8, "k_descale": k_descale, "v_descale": v_descale}
        for name, room in rooms.items():
            assert room.shape == getattr(whole, name).shape, name
            room.copy_(getattr(whole, name))
        if k_mean is not None:
            k_mean.copy_(mean)

    asked = stand_in.card(monkeypatch)
    torch.ops.fp8cutlass_C.pack = pack
    held = pack_kv(k, v, scaling=scaling, query_shape=q.shape, **transforms)
    for _ in range(2):
        got = attention(q, held, **common)
        assert same(got, want)
    assert packs == ["kv"] and asked == ["attend_packed"] * 2


def test_a_flag_of_another_type_is_refused_as_without_packing() -> None:
    """0 equals False, and once passed as if it had been left out."""
    q, k, v = (torch.randn(1, 2, 40, 64, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3))
    with pytest.raises(UnsupportedError, match="smooth_k=0 is not what key was packed with"):
        attention(q, pack_kv(k, v), smooth_k=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("smooth_k", [False, True])
def test_it_is_a_pytree_of_its_tensors(smooth_k: bool) -> None:
    """Caches are moved, cloned and offloaded by `tree_map`; what has no tensor goes along."""
    packed = pack_kv(*KEYS, smooth_k=smooth_k)
    leaves, spec = pytree.tree_flatten({"layer": packed})
    assert len(leaves) == (5 if smooth_k else 4) and all(isinstance(x, torch.Tensor) for x in leaves)
    again = pytree.tree_map(torch.clone, packed)
    assert again is not packed and again.k is not packed.k and repr(again) == repr(packed)
    for made in (again, pytree.tree_unflatten(leaves, spec)["layer"]):
        assert torch.equal(attention(QUERY, made, enable_gqa=True), attention(QUERY, packed, enable_gqa=True))
    names = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(packed)[0]]
    assert names == [".k_descale", ".v_descale", *([".k_mean"] if smooth_k else []), ".k", ".v"]
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
    other = pytree.tree_structure(pack_kv(*KEYS, smooth_k=smooth_k, scaling="head"))
    assert other != pytree.tree_structure(packed)


def test_export_takes_packed_keys() -> None:
    class Module(torch.nn.Module):
        def forward(self, q: torch.Tensor, packed: PackedKV) -> torch.Tensor:
            return attention(q, packed, enable_gqa=True)

    program = torch.export.export(Module(), (QUERY, PACKED), strict=False)
    assert torch.equal(program.module()(QUERY, PACKED), attention(QUERY, PACKED, enable_gqa=True))


def test_it_moves_between_devices() -> None:
    packed = pack_kv(*KEYS, smooth_k=True, scaling="token")
    assert packed.to("cpu") is packed and packed.to(torch.device("cpu")) is packed
    there = packed.to("meta")
    assert there.device.type == "meta" and there.shape == packed.shape and there.dtype == packed.dtype
    assert {x.device.type for x in pytree.tree_leaves(there)} == {"meta"}
    with pytest.raises(UnsupportedError, match="key is on meta, query is on cpu"):
        attention(QUERY, there, enable_gqa=True)
    with pytest.raises(TypeError):
        packed.to("cpu", torch.float16)  # type: ignore[call-arg]


@pytest.mark.parametrize("made", [{}, {"smooth_k": True, "hadamard": True, "scaling": "token"}], ids=str)
def test_torch_load_with_weights_only(made: dict[str, Any], tmp_path: Path) -> None:
    packed = pack_kv(*KEYS, **made)
    torch.save({"layers": [packed]}, tmp_path / "kv.pt")
    again = torch.load(tmp_path / "kv.pt", weights_only=True)["layers"][0]
    assert repr(again) == repr(packed)
    assert torch.equal(attention(QUERY, again, enable_gqa=True), attention(QUERY, packed, enable_gqa=True))
    assert (tmp_path / "kv.pt").stat().st_size < 3 * sum(x.numel() for x in pytree.tree_leaves(packed)) + 8192


def test_torch_load_reads_packed_keys_by_default(tmp_path: Path) -> None:
    k, v = (randn(1, 2, 70, 64, seed=s) for s in (1, 2))
    packed = pack_kv(k, v)
    torch.save(packed, tmp_path / "kv.pt")
    again = torch.load(tmp_path / "kv.pt")
    q = randn(1, 2, 9, 64, seed=3)
    assert torch.equal(attention(q, packed), attention(q, again))


@pytest.mark.parametrize("strict", [False, True])
def test_cut_keys_are_exported_with_a_symbolic_batch(strict: bool) -> None:
    """Shapes that are worked out once are worked out anew where sizes are symbols."""
    k, v = torch.randn(2, 2, 2, 512, 64).bfloat16()
    packed = pack_kv(k, v, key_block=128)

    class Cut(torch.nn.Module):
        def forward(self, packed: PackedKV, q: torch.Tensor) -> torch.Tensor:
            return attention(q, packed.narrow(128, 256))  # type: ignore[return-value]

    batch = {0: torch.export.Dim("B", min=2, max=64)}
    leaves = len(torch.utils._pytree.tree_leaves(packed))
    shapes = ([batch] * leaves, batch)
    made = torch.export.export(Cut(), (packed, k), dynamic_shapes=shapes, strict=strict)
    assert torch.equal(made.module()(packed, k), attention(k, packed.narrow(128, 256)))
