"""``attention(attn_mask=...)`` on the emulator: against float64, and what is refused.

Regressions these catch: a bit of another row, head or batch, a tile that is skipped though a key of it is seen, a bias
that is off by a column or scaled with the scores, a row without keys that is not 0, a NaN that leaves its row.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import operands_of, randn, relative_l2
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8cutlass import BlockMask, UnsupportedError, attention, explain, pack_kv, quantize, supports
from fp8cutlass.manifest import generated_dir, load_manifest

B, H, HKV, ROWS, KEYS, D = 2, 4, 2, 150, 300, 64
SHAPE = (B, H, ROWS, KEYS)
# Of P: half a step of e4m3, with `linear` 0.69 of a code more; two terms leave 2^-9.
ROUNDING = {"linear": 0.11, "exp2": 0.0625, "exp2x2": 2.0**-8}
FLUSHED = 2.0**-17  # of the row's largest P, what may become 0


def draw(seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    """Query, key and value."""
    shapes = (B, H, ROWS, D), (B, HKV, KEYS, D), (B, HKV, KEYS, D)
    return tuple(randn(*shape, seed=seed + i).to(dtype) for i, shape in enumerate(shapes))


def noise(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_mask(density: float, shape: tuple[int, ...] = SHAPE, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < density


def held(
    tensors: tuple[torch.Tensor, ...],
    mask: Any,
    seen: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """The result of a call, after every element and the LSE were held to float64 on the operands that the kernel gets.

    ``seen`` and ``bias`` are what ``mask`` stands for, in plain tensors.
    """
    served, text = supports(*tensors, mask, enable_gqa=True, **options)
    assert served, text
    variant = load_manifest(generated_dir()).find(text.split()[0])
    out, lse = attention(*tensors, mask, enable_gqa=True, return_lse=True, **options)
    q, k, v = operands_of(variant, *tensors, options.get("scaling", "block")).real
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(repeat, 1) for x in (k, v))
    logits = q.double() @ k.mT * options.get("scale", q.shape[3] ** -0.5)
    if bias is not None:
        logits = logits + bias.double()
    if seen is not None:
        logits = logits.masked_fill(~seen, -torch.inf)
    want = logits.logsumexp(-1)
    dead = want == -torch.inf
    p = (logits - want.masked_fill(dead, 0.0)[..., None]).exp()
    error = ROUNDING[variant.softmax]
    size = p @ v.abs()
    limit = 2 * error / (1 - error) * size + FLUSHED * p.amax(-1, keepdim=True) * v.abs().sum(2, keepdim=True)
    limit += 2.0**-8 * (p @ v).abs() + 1e-30
    assert bool(((out.double() - p @ v).abs() <= limit).all())
    assert torch.equal(lse == -torch.inf, dead) and not bool(out[dead].any())
    # f16 scores up to 30 are off by 2^-7 after each of two steps.
    error_of_scores = 0.05 if variant.score == "f16" else 1e-4
    assert bool(((lse.double() - want)[~dead].abs() <= error_of_scores).all())
    return out


@pytest.mark.parametrize("precision", ["fast", "accurate", "high"])
@pytest.mark.parametrize("density", [0.0, 0.002, 0.1, 0.5, 0.9, 1.0])
def test_random_masks(density: float, precision: str) -> None:
    """Each row, head and batch its own; packed before or in the call, the bits are the same."""
    seen = random_mask(density)
    seen[:, :, 17] = False
    tensors = draw()
    out = held(tensors, seen, seen, precision=precision)
    packed = attention(*tensors, BlockMask.from_dense(seen), enable_gqa=True, precision=precision)
    assert torch.equal(out, packed)


HIDDEN = {
    "first tile": lambda seen: seen[..., :128].fill_(False),
    "last tile": lambda seen: seen[..., 256:].fill_(False),
    "middle tile": lambda seen: seen[..., 128:256].fill_(False),
    "all but one key": lambda seen: (seen.fill_(False), seen[..., 131].fill_(True)),
    "all but the last key": lambda seen: (seen.fill_(False), seen[..., -1].fill_(True)),
    "a key a row": lambda seen: seen.copy_(torch.eye(KEYS, dtype=torch.bool)[:ROWS]),
    "whole rows": lambda seen: seen[:, :, 100:140].fill_(False),
    "whole row tiles": lambda seen: seen[:, :, :128].fill_(False),
    "a head": lambda seen: seen[:, 1].fill_(False),
    "a batch": lambda seen: seen[1].fill_(False),
}


@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("precision", ["fast", "accurate"])
def test_hidden(name: str, precision: str) -> None:
    seen = torch.ones(SHAPE, dtype=torch.bool)
    HIDDEN[name](seen)  # type: ignore[no-untyped-call]
    held(draw(), BlockMask.from_dense(seen), seen, precision=precision)


SHAPES = [
    (),
    (KEYS,),
    (1,),
    (ROWS, 1),
    (ROWS, KEYS),
    (H, 1, 1),
    (H, ROWS, KEYS),
    (B, 1, 1, KEYS),
    (1, H, ROWS, 1),
    SHAPE,
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_that_broadcast(shape: tuple[int, ...]) -> None:
    seen = random_mask(0.6, shape)
    held(draw(), seen, seen)
    held(draw(), seen.expand(SHAPE), seen)
    bias = noise(shape)
    held(draw(), bias, bias=bias)


@pytest.mark.parametrize("kernel_tile", [32, 64, 128, 192, 256])
@pytest.mark.parametrize("softmax", ["linear", "exp2"])
def test_tiles_of_every_kernel(kernel_tile: int, softmax: str) -> None:
    """A tile of keys is visited where one of the blocks is in which it lies, however wide it is."""
    found = [
        v.id
        for v in load_manifest(generated_dir()).variants
        if (v.kind, v.mask, v.tile_n, v.softmax, v.dtype, v.out)
        == ("fwd", "full", kernel_tile, softmax, "e4m3", "bf16")
        and v.head_dim == D
        and "block" in v.scalings
    ]
    if not found:
        pytest.skip("no kernel has such tiles")
    seen = random_mask(0.3)
    seen[:, :, :, 128:256] = False
    seen[:, :, 128:, :256] = False
    precision = "fast" if softmax == "linear" else "accurate"
    held(draw(), BlockMask.from_dense(seen), seen, kernel=found[0], precision=precision)


def test_masks_that_follow_from_numbers() -> None:
    ids = torch.arange(KEYS)[None] // torch.tensor([[70], [40]])
    row, key = torch.arange(ROWS)[:, None], torch.arange(KEYS)
    causal = key <= row + KEYS - ROWS
    documents = (ids[:, KEYS - ROWS :, None] == ids[:, None])[:, None] & causal
    mask = BlockMask.documents(ids[:, KEYS - ROWS :], ids)
    held(draw(), mask & BlockMask.window(ROWS, KEYS, right=0, bottom_right=True), documents)
    lengths = torch.tensor([0, 170])
    held(draw(), BlockMask.padding(lengths, KEYS), (key < lengths[:, None])[:, None, None])
    bitmap = random_mask(0.5, (B, H, 2, 3))
    blocky = bitmap.repeat_interleave(128, 2)[:, :, :ROWS].repeat_interleave(128, 3)[..., :KEYS]
    held(draw(), BlockMask.blocks(bitmap, ROWS, KEYS), blocky)


def test_a_mask_is_a_band_that_it_says() -> None:
    """The emulator's windows and its masks are one computation, to the bit where tiles are visited alike."""
    tensors = draw()
    for left, right in ((-1, 0), (20, 5), (-1, 100)):
        want = attention(*tensors, enable_gqa=True, window_size=(left, right), precision="accurate")
        got = attention(*tensors, BlockMask.window(ROWS, KEYS, left, right), enable_gqa=True, precision="accurate")
        assert torch.equal(got, want)


def test_an_open_mask_changes_nothing() -> None:
    tensors = draw()
    want = attention(*tensors, enable_gqa=True)
    for mask in (torch.ones(SHAPE, dtype=torch.bool), BlockMask.window(ROWS, KEYS)):
        assert torch.equal(attention(*tensors, mask, enable_gqa=True), want)
    accurate = attention(*tensors, torch.zeros(KEYS), enable_gqa=True)
    # y is rounded before the maximum is taken off, so that some P fall on the other side of a tie.
    assert relative_l2(accurate, attention(*tensors, enable_gqa=True, precision="accurate")) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("precision", ["fast", "accurate", "high"])
def test_biases(precision: str, dtype: torch.dtype) -> None:
    bias = (3 * noise(SHAPE)).to(dtype)
    bias[:, :, 7] = -torch.inf
    bias[:, :, 9, :260] = -torch.inf
    bias[1, 2, :, 128:] = -torch.inf
    held(draw(), bias, bias=bias, precision=precision)


@pytest.mark.parametrize("scaling", ["tensor", "head", "block", "token"])
def test_biases_are_not_scaled(scaling: str) -> None:
    """Neither by the softmax scale, of any sign, nor by a descale."""
    bias = 3 * noise((1, H, ROWS, KEYS))
    for scale in (0.03, -0.2, 0.0):
        held(draw(), bias, bias=bias, scaling=scaling, scale=scale)


@pytest.mark.parametrize(
    "band", [{}, {"is_causal": True, "causal_alignment": "bottom_right"}, {"window_size": (40, 3)}], ids=str
)
def test_a_pinned_kernel_of_biases_is_emulated(band: dict[str, Any]) -> None:
    """One kernel serves every band; without a bias it serves none."""
    variants = [v for v in load_manifest(generated_dir()).variants if v.kind == "biased" and v.head_dim == 64]
    tensors, bias = draw(), 3 * noise((1, H, ROWS, KEYS))
    for v in variants:
        how: dict[str, Any] = {"precision": "accurate" if v.softmax == "exp2" else "high", **band}
        how["out_dtype"] = torch.bfloat16 if v.out == "bf16" else torch.float16
        want = attention(*tensors, bias, enable_gqa=True, **how)
        got = attention(*tensors, bias, enable_gqa=True, kernel=v.id, **how)
        assert relative_l2(got, want.double()) < 0.06  # tiles may have other sizes
        with pytest.raises(UnsupportedError, match="kind='biased'"):
            attention(*tensors, enable_gqa=True, kernel=v.id, **how)
    assert len(variants) == 8  # of two targets, precisions and types


def test_a_bias_beside_a_band() -> None:
    """As of ALiBi in a causal model."""
    row, key = torch.arange(ROWS)[:, None], torch.arange(KEYS)
    bias = -(2.0 ** -torch.arange(1, H + 1))[:, None, None] * (row + KEYS - ROWS - key).abs()
    seen = key <= row + KEYS - ROWS
    held(draw(), bias, seen, bias, is_causal=True, causal_alignment="bottom_right")
    seen &= key >= row + KEYS - ROWS - 40
    held(draw(), bias, seen, bias, window_size=(40, 0), causal_alignment="bottom_right")


def test_the_least_number_hides() -> None:
    """What models write instead of -inf."""
    seen = random_mask(0.5)
    for dtype in (torch.float32, torch.bfloat16):
        bias = torch.zeros(SHAPE, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
        held(draw(), bias, seen)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_nan_stays_in_its_row(value: float) -> None:
    tensors, bias = draw(), noise(SHAPE)
    want = attention(*tensors, bias, enable_gqa=True)
    for place in ((0, 1, 3, 0), (1, 3, 149, 299)):
        bias[place] = value
    got, lse = attention(*tensors, bias, enable_gqa=True, return_lse=True)
    rows = torch.zeros(B, H, ROWS, dtype=torch.bool)
    rows[0, 1, 3] = rows[1, 3, 149] = True
    assert bool(got[rows].isnan().all()) and torch.equal(got[~rows], want[~rows])
    assert torch.equal(lse.isnan(), rows)


def test_what_is_hidden_may_be_nan() -> None:
    """Keys may be anything where no row sees them, values in tiles that no row visits."""
    q, k, v = draw()
    seen = torch.ones(ROWS, KEYS, dtype=torch.bool)
    seen[:, 100:256] = False
    k[:, :, 110:130], v[:, :, 128:256] = 0.0, 0.0
    want = attention(q, k, v, seen, enable_gqa=True)
    k[:, :, 110:130], v[:, :, 128:256] = torch.nan, torch.nan
    assert torch.equal(attention(q, k, v, seen, enable_gqa=True), want)


def test_masks_of_other_operands() -> None:
    """FP8 operands, and packed keys and values."""
    q, k, v = draw()
    seen = random_mask(0.4)
    (q8, qd), (k8, kd), (v8, vd) = (quantize(x, granularity="head") for x in (q, k, v))
    descales = {"q_descale": qd, "k_descale": kd, "v_descale": vd, "scaling": "head", "precision": "accurate"}
    out = attention(q8, k8, v8, seen, enable_gqa=True, **descales)
    assert torch.equal(out, attention(q8, k8, v8, BlockMask.from_dense(seen), enable_gqa=True, **descales))
    want = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
    assert float((out - want).norm() / want.norm()) < 0.06
    packed = pack_kv(k, v, query_shape=q.shape)
    assert torch.equal(attention(q, packed, attn_mask=seen, enable_gqa=True), held((q, k, v), seen, seen))


def test_masks_of_other_forms() -> None:
    """Operands without batch or heads, with more batches, of layout bshd: masks broadcast to (..., H, Sq, Sk)."""
    q, k, v = draw()
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    seen = random_mask(0.5)
    attend = partial(attention, kernel="sm89_fwd_d64_m64n128w4_s2_block_full_e4m3_bf16_linear")  # whatever the load
    want = attend(q, k, v, seen)
    view = [x.transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(attend(*view, seen, layout="bshd").transpose(1, 2), want)
    assert torch.equal(attend(q[0], k[0], v[0], seen[0]), want[0])
    one = [x[:1, 1:2] for x in (q, k, v, seen)]
    assert torch.equal(attend(*(x[0, 0] for x in one)), attend(*one)[0, 0])
    more = [torch.stack((x, x.flip(0))) for x in (q, k, v)]
    for mask in (torch.stack((seen, ~seen)), seen, seen[:1], torch.stack((seen[:1], ~seen[:1])), seen[0, :1]):
        wide = mask.expand(2, *SHAPE)
        got = attend(*more, mask)
        assert all(torch.equal(got[i], attend(*(x[i] for x in more), wide[i])) for i in range(2))
    narrow = attend(q, k, v[..., :40], seen)
    assert torch.equal(narrow, attend(q, k, F.pad(v[..., :40], (0, 24)), seen)[..., :40])


def test_nothing_to_see() -> None:
    q, k, v = draw()
    for given in ((q[:, :, :0], k, v), (q, k[:, :, :0], v[:, :, :0])):
        mask = torch.ones(given[0].shape[2], given[1].shape[2], dtype=torch.bool)
        assert not bool(attention(*given, mask, enable_gqa=True).any())


@pytest.mark.parametrize("kind", ["boolean", "packed", "blocks", "bias"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_compile_keeps_one_graph(kind: str, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows, keys in ((ROWS, KEYS), (140, 290)):
        q, k, v = draw()
        q, k, v = q[:, :, :rows], k[:, :, :keys], v[:, :, :keys]
        mask: Any = random_mask(0.4, (B, 1, rows, keys))
        if kind == "packed":
            mask = BlockMask.from_dense(mask)
        elif kind == "blocks":
            mask = BlockMask.blocks(random_mask(0.5, (2, 3)), rows, keys)
        elif kind == "bias":
            mask = noise((1, H, rows, keys))
        got = compiled(q, k, v, mask, enable_gqa=True)
        assert torch.equal(got, attention(q, k, v, mask, enable_gqa=True))


def test_explain_counts_tiles() -> None:
    q, k, v = draw()
    seen = torch.ones(ROWS, KEYS, dtype=torch.bool)
    seen[:128, 128:256] = False
    seen[128:, 5] = False
    for mask in (seen, BlockMask.from_dense(seen)):
        text = explain(q, k, v, mask, enable_gqa=True)
        assert "1 skipped, 1 seen in part, 4 whole, of 6 (batches x heads 1 x 1)" in text
    rows = explain(q, k, v, BlockMask.padding(torch.tensor([3, 256]), KEYS), enable_gqa=True)
    assert "3 skipped, 1 seen in part, 2 whole, of 6 for all rows (batches x heads 2 x 1)" in rows
    text = explain(q, k, v, noise((H, 1, 1)), enable_gqa=True)
    assert "bias:      (1, 4, 1, 1) torch.float32" in text and "softmax exp2" in text
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (q, k, v, seen)]
        assert "known when it runs" in explain(*fake, enable_gqa=True)


Q, K, V = draw()
MASK = torch.ones(ROWS, KEYS, dtype=torch.bool)
WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({"attn_mask": MASK[:, :7]}, ["attn_mask has shape (150, 7)", "does not broadcast", "(2, 4, 150, 300)"]),
    ({"attn_mask": MASK[None, None, None]}, ["attn_mask has shape (1, 1, 1, 150, 300)"]),
    ({"attn_mask": BlockMask.window(ROWS, 299)}, ["attn_mask has shape (1, 1, 150, 299)"]),
    ({"attn_mask": BlockMask.window(151, KEYS)}, ["attn_mask has shape (1, 1, 151, 300)"]),
    ({"attn_mask": MASK.to("meta")}, ["attn_mask is on meta, query is on cpu"]),
    ({"attn_mask": BlockMask.window(ROWS, KEYS, device="meta")}, ["attn_mask is on meta"]),
    ({"attn_mask": MASK.int()}, ["attn_mask has dtype torch.int32", "torch.bool, torch.float32"]),
    ({"attn_mask": MASK.double()}, ["attn_mask has dtype torch.float64"]),
    ({"attn_mask": MASK.to_sparse()}, ["attn_mask must be a dense tensor", "sparse"]),
    ({"attn_mask": [True]}, ["attn_mask must be a torch.Tensor, a BlockMask or None, got list"]),
    ({"attn_mask": MASK, "is_causal": True}, ["attn_mask excludes is_causal=True", "BlockMask.window"]),
    ({"attn_mask": BlockMask.window(ROWS, KEYS), "window_size": (3, 3)}, ["attn_mask excludes"]),
    ({"attn_mask": MASK.float().requires_grad_()}, ["attn_mask has requires_grad=True"]),
    (
        {"attn_mask": MASK, "query": Q.clone().requires_grad_(), "backward": "flash"},
        ["backward='flash' cannot serve attn_mask"],
    ),
    (
        {"attn_mask": MASK.float(), "kernel": "sm89_fwd_d64_m64n128w4_s2_block_full_e4m3_bf16_linear"},
        ["softmax='linear'", "precision='accurate'"],
    ),
]


@pytest.mark.edge(56)
@pytest.mark.parametrize(("changes", "words"), WRONG, ids=lambda x: "; ".join(x) if isinstance(x, list) else "")
def test_bad_masks_are_refused_by_name(changes: dict[str, Any], words: list[str]) -> None:
    call = {"query": Q, "key": K, "value": V, "enable_gqa": True} | changes
    with pytest.raises(UnsupportedError) as caught:
        attention(**call)
    assert [word for word in words if word not in str(caught.value)] == []
    assert supports(**call) == (False, str(caught.value)) and explain(**call).startswith("no kernel")


def test_a_list_with_a_number_out_of_range_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card nobody looks at lists: what is out of range means no block, and no memory is read beside the keys."""
    monkeypatch.setattr("fp8cutlass.masks.blocks.looks_at", lambda x: False)
    monkeypatch.setattr("fp8cutlass.masks.rules.looks_at", lambda x: False)
    indices, counts = torch.tensor([[0, 9, -1], [2, 1, 7]]), torch.tensor([3, 2])
    seen = torch.zeros(ROWS, KEYS, dtype=torch.bool)
    seen[:128, :128] = seen[128:, 128:] = True
    held((Q, K, V), BlockMask.block_lists(indices, counts, ROWS, KEYS), seen)


def test_the_operator_refuses_what_is_no_mask() -> None:
    """A direct call, as of a saved program."""
    from fp8cutlass.call.operators import execute
    from fp8cutlass.call.request import request_of
    from fp8cutlass.call.settle import settle

    call, t = settle(request_of(Q, K, V, BlockMask.window(ROWS, KEYS, right=0), enable_gqa=True))
    assert t.tiles is not None and t.counts is not None and t.bits is not None
    for change, words in (
        ({"tiles": t.tiles[..., :2]}, "tiles must be torch.int32 that broadcasts to"),
        ({"counts": t.counts.long()}, "counts must be torch.int32"),
        ({"tiles": None, "counts": None}, "bits with both"),
        ({"seen": MASK[None, None]}, "exclude each other"),
        ({"tiles": None, "counts": None, "bits": None}, "masked=True and biased=False"),
        ({"bias": noise((1, 1, 1, 3))}, "bias must be"),
        ({"bias": noise((1, 1, 1, KEYS))}, "biased=False"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            execute(call, t._replace(**change))


def test_torch_serves_a_mask_where_no_kernel_does() -> None:
    """`fallback="sdpa"` unpacks a BlockMask, and joins a bias with a band."""
    q, k, v = (F.pad(x, (0, 256)) for x in draw())
    seen, bias = random_mask(0.5), noise((H, ROWS, KEYS))
    causal = torch.ones(ROWS, KEYS, dtype=torch.bool).tril()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = attention(q, k, v, BlockMask.from_dense(seen), enable_gqa=True, fallback="sdpa")
        biased = attention(q, k, v, bias, is_causal=True, enable_gqa=True, fallback="sdpa")
    assert torch.equal(got, F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True))
    mask = bias.bfloat16().masked_fill(~causal, -torch.inf)
    assert torch.equal(biased, F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True))
