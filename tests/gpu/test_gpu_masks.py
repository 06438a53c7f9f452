"""Masks on a card: every built kernel for lists of tiles against the emulator, and calls against float64.

Regressions these catch: bits of another tile, row or thread; a tile that is skipped, or visited twice; a list of
another head or batch where some share one; entries beyond the first 32 of a list; a tile whose end is not cut; a row
whose first tiles hide everything; an item without tiles; a mask that is read before it is there; a mask that a graph
keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuzz_masks import KINDS, draw_masked, run_masked_case
from gpu import built_manifest, built_variants, is_emulated, needs
from kernel_gates import emulator_limit, lse_limit

from fp8cutlass import BlockMask, UnsupportedError, attention, explain, pack_kv, quantize, supports
from fp8cutlass.call.call import Call, Tensors
from fp8cutlass.call.launch import kernel_operands, quantised
from fp8cutlass.call.masks import for_emulator
from fp8cutlass.dtypes import OPERANDS
from fp8cutlass.emulator.emulate import emulate
from fp8cutlass.manifest import Variant
from fp8cutlass.masks.bits import pack
from fp8cutlass.native import extension
from fp8cutlass.native.masks import pack_mask

pytestmark = pytest.mark.gpu

B, H, HKV = 2, 4, 2
LARGEST = 12.0  # logit of such operands
LISTED = built_variants("blocks")
SIZES = ((300, 300), (129, 1000), (1, 400), (700, 200), (128, 128), (257, 4500))
FEW = 64  # rows of a head: of fewer several draws are held to the limit together, which is that of many rows


def operands(v: Variant, rows: int, keys: int, seed: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float16 if v.out == "fp16" else torch.bfloat16
    shapes = (B, H, rows, v.head_dim), (B, HKV, keys, v.head_dim), (B, HKV, keys, v.head_dim)
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


def random_mask(density: float, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < density


def far(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.cpu().float() - wanted.float()).norm() / wanted.float().norm().clamp_min(1e-6))


def granularity_of(v: Variant) -> dict[str, str]:
    return OPERANDS[v.dtype].granularity(built_manifest().scaling[v.scaling])


def straight(v: Variant, tensors: list[torch.Tensor], mask: BlockMask) -> tuple[torch.Tensor, torch.Tensor]:
    """One kernel on operands that were packed before."""
    call, granularity = Call("half", tensors[0].dtype, v.head_dim**-0.5), granularity_of(v)
    made = kernel_operands(call, v, granularity, Tensors(*(x.cuda() for x in tensors)))
    out = torch.full_like(tensors[0], torch.nan).cuda()
    lse = torch.full(tensors[0].shape[:3], torch.nan).cuda()
    on = mask.to("cuda")
    extension.load()
    extension.compiled().forward(
        built_manifest().index[v.id], made.q, made.k, made.v, made.q_descale, made.k_descale, made.v_descale, None, out,
        lse, None, v.head_dim**-0.5, 0, 0, tiles=on.tiles, counts=on.counts, bits=on.bits,
    )  # fmt: skip
    return out, lse


def check(v: Variant, rows: int, keys: int, mask: BlockMask, what: object = "") -> None:
    """One kernel, straight, against its emulation."""
    pairs = [checked(v, rows, keys, mask, seed, what) for seed in range(5, 6 if rows >= FEW else 5 + FEW // 4)]
    out, wanted = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    if bool(wanted.any()):
        assert far(out, wanted) <= emulator_limit(v), what


def checked(
    v: Variant, rows: int, keys: int, mask: BlockMask, seed: int, what: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's result and the emulator's, whose rows without keys and whose LSE are compared here."""
    tensors = operands(v, rows, keys, seed)
    out, lse = straight(v, tensors, mask)
    call, granularity = Call("half", tensors[0].dtype, v.head_dim**-0.5), granularity_of(v)
    one = quantised(call, v, granularity, Tensors(*tensors))
    wanted = emulate(
        one.q, one.k, one.v, one.q_descale, one.k_descale, one.v_descale, variant=v, scale=v.head_dim**-0.5,
        scaling=v.scaling, causal_offset=0, mask=for_emulator(mask), emulated_mma=is_emulated(v),
    )  # fmt: skip
    dead = wanted.lse.isneginf()
    assert not out.isnan().any() and torch.equal(lse.cpu().isneginf(), dead), what
    assert not out.cpu()[dead].any(), what
    if not bool(dead.all()):
        assert float((lse.cpu() - wanted.lse)[~dead].abs().max()) < lse_limit(v, LARGEST, emulated=is_emulated(v)), what
    return out.cpu(), wanted.out


@pytest.mark.parametrize("density", [0.0, 0.001, 0.1, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("v", LISTED, ids=lambda v: v.id)
def test_every_kernel_on_random_masks(v: Variant, density: float) -> None:
    """Each row, head and batch its own."""
    for rows, keys in SIZES:
        mask = BlockMask.from_dense(random_mask(density, B, H, rows, keys))
        check(v, rows, keys, mask, (rows, keys))


HIDDEN: dict[str, Any] = {
    "first tile": lambda seen: seen[..., :128].fill_(False),
    "last tile": lambda seen: seen[..., 896:].fill_(False),
    "all but the last tile": lambda seen: seen[..., :896].fill_(False),
    "all but one key": lambda seen: (seen.fill_(False), seen[..., 131].fill_(True)),
    "all but the last key": lambda seen: (seen.fill_(False), seen[..., -1].fill_(True)),
    "a key a row": lambda seen: (seen.fill_(False), seen.diagonal(dim1=-2, dim2=-1).fill_(True)),
    "first tiles of some rows": lambda seen: seen[:, :, 3:70:2, :640].fill_(False),
    "whole rows": lambda seen: seen[:, :, 100:140].fill_(False),
    "whole row tiles": lambda seen: seen[:, :, 128:256].fill_(False),
    "a head": lambda seen: seen[:, 1].fill_(False),
    "a batch": lambda seen: seen[1].fill_(False),
}


@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("v", LISTED, ids=lambda v: v.id)
def test_every_kernel_where_much_is_hidden(v: Variant, name: str) -> None:
    seen = torch.ones((B, H, 300, 1000), dtype=torch.bool)
    HIDDEN[name](seen)
    check(v, 300, 1000, BlockMask.from_dense(seen))


ROWS, KEYS = 2200, 4500  # 18 tiles of rows, and 36 of keys: more than the loader reads of a list at once
MADE: dict[str, Callable[[], BlockMask]] = {
    "documents": lambda: (
        BlockMask.documents(torch.arange(ROWS) // 300, torch.arange(KEYS) // 650)
        & BlockMask.window(ROWS, KEYS, right=0, bottom_right=True)
    ),
    "window": lambda: BlockMask.window(ROWS, KEYS, 300, 20, bottom_right=True),
    "causal": lambda: BlockMask.window(ROWS, KEYS, right=0, bottom_right=True),
    "padding": lambda: BlockMask.padding(torch.tensor([KEYS - 1, 130]), KEYS),
    "prefix": lambda: BlockMask.prefix(torch.tensor([1000, 0]), ROWS, KEYS),
    "tree": lambda: BlockMask.tree(torch.tensor([-1, 0, 0, 1, 1, 2, -1, 6]), KEYS),
    "blocks": lambda: BlockMask.blocks(random_mask(0.3, B, H, 18, 36), ROWS, KEYS),
    "nothing is hidden": lambda: BlockMask.from_dense(torch.ones((1, 1, 1, 1), dtype=torch.bool), KEYS),
    "everything is": lambda: BlockMask.from_dense(torch.zeros((1, 1, 1, 1), dtype=torch.bool), KEYS),
    "some rows see nothing": lambda: BlockMask.from_dense(random_mask(0.5, 1, H, ROWS, 1), KEYS),
}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("v", [v for v in LISTED if v.out == "bf16"], ids=lambda v: v.id)
def test_every_kernel_on_lists_of_many_tiles(v: Variant, name: str) -> None:
    """And more items than multiprocessors."""
    mask = MADE[name]()
    check(v, ROWS if mask.rows == 1 else mask.rows, KEYS, mask)


@pytest.mark.parametrize("number", range(120))
def test_calls_against_float64(number: int) -> None:
    verdict = run_masked_case(draw_masked(26, number, 1 << 22), "cuda")
    assert verdict.status != "failed", verdict


def test_cases_are_of_every_kind() -> None:
    assert {draw_masked(26, number, 1 << 22).kind for number in range(120)} == set(KINDS)


def call(head_dim: int = 64, dtype: torch.dtype = torch.bfloat16, rows: int = 300, keys: int = 500) -> list[Any]:
    generator = torch.Generator().manual_seed(9)
    shapes = (B, H, rows, head_dim), (B, HKV, keys, head_dim), (B, HKV, keys, head_dim)
    return [torch.randn(*shape, generator=generator).to(dtype).cuda() for shape in shapes]


SHAPES = [(), (500,), (1,), (300, 1), (300, 500), (H, 1, 1), (H, 300, 500), (B, 1, 1, 500), (1, H, 300, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_that_broadcast_give_the_bits_of_the_expanded_mask(shape: tuple[int, ...]) -> None:
    tensors, seen = call(), random_mask(0.6, *shape).cuda()
    whole, held = seen.expand(B, H, 300, 500), seen.reshape(shape or (1,))
    needs(*tensors, seen, enable_gqa=True)
    results = [
        attention(*tensors, mask, enable_gqa=True, return_lse=True)
        for mask in (seen, whole, whole.contiguous(), BlockMask.from_dense(held, 500), BlockMask.from_dense(whole))
    ]
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
    wanted = attention(*(x.cpu() for x in tensors), seen.cpu(), enable_gqa=True)
    assert far(results[0][0], wanted) < 0.08  # another kernel: P of other roundings


def memory_orders(seen: torch.Tensor) -> list[torch.Tensor]:
    """The same mask with rows that are contiguous or not, and aligned to 16 bytes, to 4 or to none."""
    found = [seen, seen.mT.contiguous().mT, seen.transpose(1, 2).contiguous().transpose(1, 2)]
    for more in (1, 4, 16):
        wide = torch.ones((*seen.shape[:3], seen.shape[3] + more), dtype=torch.bool, device=seen.device)
        wide[..., more:] = seen
        found.append(wide[..., more:])
    return found


@pytest.mark.parametrize("density", [0.0, 0.01, 0.3, 0.99, 1.0])
@pytest.mark.parametrize(
    "shape",
    [
        (2, 3, 300, 700),
        (1, 1, 128, 128),
        (2, 1, 129, 4112),
        (1, 2, 1, 260),
        (3, 1, 257, 1),
        (1, 1, 1, 1),
        (1, 1, 5, 2001),
    ],
    ids=str,
)
def test_the_kernel_packs_as_torch_does(shape: tuple[int, ...], density: float) -> None:
    """Bits and lists, of every order in memory; also of expanded masks, and of those of one column for many keys."""
    if not LISTED:
        pytest.skip("not built")
    seen, keys = random_mask(density, *shape), 777 if shape[3] == 1 else shape[3]
    wanted = pack(seen, keys)
    for x in memory_orders(seen.cuda()):
        made = pack_mask(x, keys)
        for got, want in zip(made, (wanted.tiles, wanted.counts, wanted.bits), strict=True):
            assert got is not None and want is not None and torch.equal(got.cpu(), want), x.stride()
    on_card = BlockMask.from_dense(seen.cuda(), keys).to("cpu")
    assert torch.equal(on_card.tiles, wanted.tiles) and torch.equal(on_card.counts, wanted.counts)
    assert on_card.bits is not None and torch.equal(on_card.bits, wanted.bits)


def test_large_calls_take_the_overlap_of_packing() -> None:
    """Q is quantised by the attention kernel, and K and V are packed while it runs: the bits are those of operands
    that were packed before."""
    v = next((v for v in LISTED if (v.head_dim, v.out, v.softmax) == (128, "bf16", "linear")), None)
    if v is None:
        pytest.skip("not built")
    mask = BlockMask.documents(torch.arange(4096) // 1000) & BlockMask.window(4096, 4096, 700, 0)
    generator = torch.Generator(device="cuda").manual_seed(3)
    q, k, x = (torch.randn(2, 48, 4096, 128, generator=generator, device="cuda").bfloat16() for _ in range(3))
    assert "while the attention kernel runs" in explain(q, k, x, mask.to("cuda"))
    out, lse = attention(q, k, x, mask.to("cuda"), return_lse=True)
    wanted, sums = straight(v, [q, k, x], mask)
    assert torch.equal(out, wanted) and torch.equal(lse, sums)
    for _ in range(20):
        assert torch.equal(attention(q, k, x, mask.to("cuda")), out)


@pytest.mark.parametrize("head_dim", [40, 64, 96, 128])
def test_other_operands(head_dim: int) -> None:
    """FP8 ones, packed keys, sinks, smoothing, and head_dims that are padded."""
    mask = (BlockMask.documents(torch.arange(500) // 200) & BlockMask.window(500, 500, right=30)).to("cuda")
    tensors = call(head_dim, rows=500)
    how: dict[str, Any] = {"enable_gqa": True}
    needs(*tensors, mask, **how)
    on_cpu = [x.cpu() for x in tensors]
    precisions: tuple[dict[str, Any], ...] = ({"precision": "accurate"}, {"precision": "int8"})
    for more in ({}, {"smooth_k": True}, {"hadamard": True}, *precisions, {"return_lse": True}):
        if not supports(*tensors, mask, **how, **more)[0]:
            continue
        got, wanted = attention(*tensors, mask, **how, **more), attention(*on_cpu, mask.to("cpu"), **how, **more)
        if isinstance(got, tuple):
            assert float((got[1].cpu() - wanted[1]).abs().max()) < 0.1
            got, wanted = got[0], wanted[0]
        assert far(got, wanted) < 0.08, more
    sinks = torch.tensor([0.0, -1.0, 2.0, 5.0])
    got = attention(*tensors, mask, **how, sinks=sinks.cuda())
    assert far(got, attention(*on_cpu, mask.to("cpu"), **how, sinks=sinks)) < 0.08
    if head_dim % 64 == 0:
        kernel = next(v for v in LISTED if (v.head_dim, v.dtype, v.out) == (head_dim, "e4m3", "bf16"))
        precision = "fast" if kernel.softmax == "linear" else "accurate"
        kept = pack_kv(*tensors[1:], precision=precision, key_block=kernel.key_block)
        a = attention(tensors[0], kept, None, mask, **how, kernel=kernel.id)
        b = attention(*tensors, mask, **how, precision=precision, kernel=kernel.id)
        assert torch.equal(a, b)
        fp8, descales = zip(*(quantize(x, granularity="head") for x in tensors), strict=True)
        named = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
        if supports(*fp8, mask, **how, **named, scaling="head")[0]:
            got = attention(*fp8, mask, **how, **named, scaling="head")
            named = {name: x.cpu() for name, x in named.items()}
            wanted = attention(*(x.cpu() for x in fp8), mask.to("cpu"), **how, **named, scaling="head")
            assert far(got, wanted) < 0.08


def test_graphs_read_the_mask_when_they_run() -> None:
    tensors, seen = call(128), random_mask(0.5, B, 1, 300, 500).cuda()
    needs(*tensors, seen, enable_gqa=True)
    packed = BlockMask.from_dense(seen)
    for mask in (seen, packed):
        want = attention(*tensors, mask, enable_gqa=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attention(*tensors, mask, enable_gqa=True)
        graph.replay()
        assert torch.equal(out, want)
    bits = packed.bits
    assert bits is not None
    other = random_mask(0.5, B, 1, 300, 500, seed=1).cuda()
    again = BlockMask.from_dense(other)
    packed.tiles.copy_(again.tiles), packed.counts.copy_(again.counts), bits.copy_(again.bits)
    graph.replay()
    assert torch.equal(out, attention(*tensors, other, enable_gqa=True)) and not torch.equal(out, want)


def test_a_nan_in_hidden_tiles_stays_there() -> None:
    """Of keys that no row of the tile visits; a NaN of a hidden key in K of a tile that is seen in part as well."""
    tensors = call()
    hidden = BlockMask.documents(torch.zeros(300, dtype=torch.long), torch.arange(500) // 256).to("cuda")
    beside = BlockMask.documents(torch.arange(300) // 128, torch.arange(500) // 128).to("cuda")
    needs(*tensors, hidden, enable_gqa=True)
    want, near = (attention(*tensors, mask, enable_gqa=True) for mask in (hidden, beside))
    for x in tensors[1:]:
        x[:, :, 390:] = torch.nan
    assert torch.equal(attention(*tensors, hidden, enable_gqa=True), want)
    # Of two tiles that a kernel takes together one may be hidden. A descale that both share is then another.
    assert far(attention(*tensors, beside, enable_gqa=True), near.cpu()) < 0.08


def test_what_has_no_kernel_is_refused() -> None:
    tensors, seen = call(), torch.ones((300, 500), dtype=torch.bool, device="cuda")
    wide = call(256)
    for refused, options, why in (
        ((*wide, torch.zeros((300, 500), device="cuda")), {}, "added to scores"),
        ((*wide, seen), {}, "up to head_dim 128"),
        ((*tensors, seen), {"softcap": 5.0}, "without softcap"),
        ((*tensors, seen), {"out_dtype": torch.float8_e4m3fn, "out_descale": 1.0}, "give bf16 and fp16"),
    ):
        served, text = supports(*refused, enable_gqa=True, **options)
        assert not served and why in text, text
        with pytest.raises(UnsupportedError, match=why):
            attention(*refused, enable_gqa=True, **options)


def test_operators_refuse_lists_that_do_not_fit() -> None:
    v = next(iter(LISTED), None)
    if v is None:
        pytest.skip("not built")
    tensors, mask = operands(v, 300, 500), BlockMask.from_dense(random_mask(0.5, 1, 1, 300, 500))
    for change in (
        {"tiles": mask.tiles[:, :, :2].contiguous()},
        {"counts": mask.counts.long()},
        {"counts": mask.counts[:, :, :1].contiguous()},
        {"bits": mask.bits[..., :1].contiguous() if mask.bits is not None else None},
    ):
        wrong = BlockMask(**{**{n: getattr(mask, n) for n in ("tiles", "counts", "bits", "extent")}, **change})
        with pytest.raises(RuntimeError, match=next(iter(change))):
            straight(v, tensors, wrong)
