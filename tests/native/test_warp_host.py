"""The attention kernels of Ada on the host, from the sources that nvcc compiles: against the emulator, with copies that
arrive late or at once and threads in any order, and with planted faults. No kernel has run on an Ada card.

Instructions that a whole warp executes are meetings of its threads here. A sum of products is rounded
once, where tensor cores cut more.

Regressions these catch: a fragment that lies elsewhere, a missing wait or barrier, a slot that is loaded while it is
read, a descale of another head or block, keys beyond the end, a wrong diagonal, an item that nobody takes.
"""

from __future__ import annotations

import shutil
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from compilers import ROOT, planted
from reference import Operands, operands_of, randn, relative_l2
from warp_host import Kernel, same, spans

from codegen.render import environment, render_kernel
from codegen.variant import parse_id
from fp8cutlass.call.ragged import by_torch, emulate_sequence, fp8_by_torch
from fp8cutlass.call.ragged_call import RaggedCall
from fp8cutlass.dtypes import OUT_DTYPES
from fp8cutlass.emulator.emulate import Emulation, emulate
from fp8cutlass.emulator.visible import Mask
from fp8cutlass.manifest import Variant, generated_dir, load_manifest
from fp8cutlass.masks.block_mask import BlockMask

ALL = [v for v in load_manifest(generated_dir()).variants if v.family == "sm89" and v.kind != "diag"]
VARIANTS = [v for v in ALL if v.mask not in ("window", "blocks") and v.walk == "dense"]
HEADS, ROWS, KEYS = (2, 1), 70, 140  # of K and V one


def one_of_each(*axes: str) -> list[str]:
    """The first kernel of every combination of values."""
    return [v.id for v in {tuple(getattr(v, axis) for axis in axes): v for v in reversed(VARIANTS)}.values()]


# Of each softmax, scaling, type of operands, output, head_dim and mask.
KERNELS = sorted(
    {*one_of_each("softmax", "scaling", "dtype", "kind"), *one_of_each("head_dim", "causal"), *one_of_each("out")}
)


@cache
def problem(variant: Variant, scaling: str) -> Operands:
    q = randn(1, HEADS[0], ROWS, variant.head_dim, seed=1)
    k, v = (randn(1, HEADS[1], KEYS, variant.head_dim, seed=s) for s in (2, 3))
    return operands_of(variant, q, k, v, scaling)


def options_of(variant: Variant) -> dict[str, Any]:
    given: dict[str, Any] = {"scale": variant.head_dim**-0.5, "softcap": 2.0 if variant.kind == "capped" else 0.0}
    given["causal_offset"] = KEYS - ROWS - 3 if variant.mask != "full" else 0
    if variant.mask == "window":
        given["window_offset"] = 20
    given["out_descale"] = torch.tensor([0.02]) if variant.out == "e4m3" else None
    return given


def want(variant: Variant, operands: Operands, scaling: str, **more: Any) -> Emulation:
    return emulate(*operands.fp8, *operands.descales, variant=variant, scaling=scaling, **options_of(variant), **more)


@pytest.fixture(scope="module", params=KERNELS)
def kernel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    return Kernel(request.param, tmp_path_factory.mktemp("warp"))


def test_a_kernel_is_what_the_emulator_says(kernel: Kernel) -> None:
    """Grouped heads, tails of rows and keys, rows that do not see the last keys, and more items than CTAs."""
    scaling = kernel.variant.scaling
    operands = problem(kernel.variant, scaling)
    got = kernel.run(operands, **options_of(kernel.variant))
    assert same(got, want(kernel.variant, operands, scaling))


# Of each softmax, with one stage and more, and with a cap.
WINDOWS = (
    "sm89_fwd_d64_m64n128w4_s2_block_window_e4m3_bf16_linear",
    "sm89_fwd_d96_m64n64w4_s2_block_window_e4m3_fp16_exp2",
    "sm89_fwd_d256_m64n32w4_s1_block_window_e4m3_bf16_linear",
    "sm89_fwd_d128_m64n64w4_s2_block_window_e4m3_bf16_exp2_capped",
)
# Rows, keys, the first key of row 0 and the last: inside a tile, far ends, a first tile that is not the first, rows
# without keys before others and after them, and no key at all.
BANDS = (
    (130, 200, -10, 70),
    (70, 140, -500, 500),
    (70, 300, 100, 130),
    (100, 90, 60, 75),
    (70, 140, -60, -30),
    (9, 40, 50, 60),
)


@pytest.mark.parametrize("name", WINDOWS)
def test_windows(name: str, tmp_path: Path) -> None:
    kernel = Kernel(name, tmp_path)
    v = kernel.variant
    for rows, keys, first, last in BANDS:
        q = randn(1, HEADS[0], rows, v.head_dim, seed=1)
        k, x = (randn(1, HEADS[1], keys, v.head_dim, seed=s) for s in (2, 3))
        operands = operands_of(v, q, k, x, "block")
        options = options_of(v) | {"causal_offset": last, "window_offset": first}
        got = kernel.run(operands, **options, seed=rows)
        expected = emulate(*operands.fp8, *operands.descales, variant=v, **options)
        seen = expected.lse.isfinite()
        assert torch.equal(got.lse.isfinite(), seen) and not bool(got.out[~seen].any())
        assert not bool(seen.any()) or same(got, expected), (rows, keys, first, last)


# Of each softmax and tile.
LISTED = (
    "sm89_fwd_d64_m64n128w4_s2_block_blocks_e4m3_bf16_linear",
    "sm89_fwd_d64_m64n128w4_s2_block_blocks_e4m3_fp16_exp2",
    "sm89_fwd_d128_m64n64w4_s2_block_blocks_e4m3_bf16_exp2",
    "sm89_fwd_d128_m64n64w4_s2_block_blocks_e4m3_fp16_linear",
)


def masks(rows: int, keys: int) -> dict[str, torch.Tensor]:
    """What is seen, (Bm, Hm, rows, keys): of two heads each; of all alike; whole tiles alone; nothing by some rows, the
    first tile by none, the last key alone, and nothing at all."""
    random = torch.rand(1, 2, rows, keys, generator=torch.Generator().manual_seed(4)) < 0.3
    tiles = torch.ones(1, 1, rows, keys, dtype=torch.bool)
    tiles[..., :128, 128:256], tiles[..., 128:, :128] = False, False
    some = random.clone()
    some[..., 3:9, :], some[..., :128], some[:, 1, 20:] = False, False, False
    last = torch.zeros(1, 1, rows, keys, dtype=torch.bool)
    last[..., -1] = True
    return {"random": random, "alike": random[:, :1], "tiles": tiles, "some": some, "last": last, "none": ~last & last}


def wrong_masks(kernel: Kernel) -> set[str]:
    """The masks with which a kernel is not what the emulator says."""
    v, (rows, keys), wrong = kernel.variant, (150, 300), set()
    q = randn(1, HEADS[0], rows, v.head_dim, seed=1)
    k, x = (randn(1, HEADS[1], keys, v.head_dim, seed=s) for s in (2, 3))
    operands, options = operands_of(v, q, k, x, "block"), {"scale": v.head_dim**-0.5}
    for number, (which, seen) in enumerate(masks(rows, keys).items()):
        lists = BlockMask.from_dense(seen)
        got = kernel.run(operands, **options, mask=lists, seed=number, late=number % 2 == 0)
        visited = Mask(seen, lists.visited())
        expected = emulate(*operands.fp8, *operands.descales, variant=v, mask=visited, **options)
        finite = expected.lse.isfinite()
        alike = torch.equal(got.lse.isfinite(), finite) and not bool(got.out[~finite].any())
        if not alike or (bool(finite.any()) and not same(got, expected)):
            wrong.add(which)
    return wrong


@pytest.mark.parametrize("name", LISTED)
def test_lists_of_a_mask(name: str, tmp_path: Path) -> None:
    assert not wrong_masks(Kernel(name, tmp_path))


# Of a kernel, a text of a header, and what stands there instead.
LISTED_FAULTS = {
    "another list": (LISTED[0], "fp8cutlass/walk/tile_mask.h", "row_tile * mask.list_row", "0"),
    "the first half of a tile twice": (LISTED[2], "fp8cutlass/schedule_listed.h", "tile % kParts * kTileN", "0"),
    "bits of the first half": (LISTED[3], "fp8cutlass/seen.cuh", "part % (kMaskTile / kKeys)", "0"),
    "bits of the tile's first rows": (LISTED[1], "fp8cutlass/seen.cuh", "row / 16 * 32 + threadIdx.x", "threadIdx.x"),
    "another tile's bits": (LISTED[0], "fp8cutlass/schedule_listed.h", "mask.bit_tiles + entry / 2", "mask.bit_tiles"),
    "a tile is left out": (
        LISTED[2],
        "fp8cutlass/schedule_listed.h",
        "work.tiles = kParts *",
        "work.tiles = -2 + kParts *",
    ),
    "parts are seen whole": (LISTED[0], "fp8cutlass/schedule_listed.h", "if (entry % 2 == 0 ||", "if (entry >= 0 ||"),
}


@pytest.mark.parametrize("name", LISTED_FAULTS)
def test_faults_of_lists_are_noticed(name: str, tmp_path: Path) -> None:
    of, *fault = LISTED_FAULTS[name]
    headers, built = tmp_path / "include", tmp_path / "built"
    built.mkdir()
    shutil.copytree(ROOT / "include", headers)
    planted(headers / fault[0], *fault[1:])
    kernel = Kernel(of, built, headers)
    assert wrong_masks(kernel) & {"random", "tiles"}


# Of each mask, softmax and head_dim with other tiles, one stage and more, and with a cap.
RAGGED = (
    "sm89_fwd_d32_m64n128w4_s4_block_full_e4m3_fp16_exp2_ragged",
    "sm89_fwd_d64_m64n128w4_s2_block_causal_e4m3_bf16_linear_ragged",
    "sm89_fwd_d96_m64n64w4_s2_block_window_e4m3_bf16_linear_ragged",
    "sm89_fwd_d128_m64n64w4_s2_block_window_e4m3_bf16_exp2_ragged_capped",
    "sm89_fwd_d256_m64n32w4_s1_block_causal_e4m3_bf16_linear_ragged",
)
BAND = {"full": (-1, -1), "causal": (-1, 0), "window": (40, 20)}


def ragged_call(v: Variant, fp8: bool) -> RaggedCall:
    """Five sequences: a tail of rows and keys, no row, no key, a row, more rows than keys, and tokens that do not
    count; behind the last one are tokens of none."""
    rows, keys = (70, 0, 5, 1, 40), (140, 30, 0, 129, 20)
    cu_q, cu_k = (torch.tensor([0, *accumulate(x)], dtype=torch.int32) for x in (rows, keys))
    q = randn(sum(rows) + 3, 4, v.head_dim, seed=1)
    k, x = (randn(sum(keys) + 2, 2, v.head_dim, seed=s) for s in (2, 3))
    descales: tuple[torch.Tensor, ...] = ()
    if fp8:
        q, k, x = (y.to(torch.float8_e4m3fn) for y in (q, k, x))
        steps = (torch.arange(5 * h).reshape(5, h) for h in (4, 2, 2))
        descales = tuple(1 + 0.25 * s for s in steps)
    left, right = BAND[v.mask]
    return RaggedCall(
        q, k, x, cu_q, cu_k, torch.tensor([70, 0, 5, 1, 31], dtype=torch.int32),
        torch.tensor([133, 30, 0, 129, 20], dtype=torch.int32), max(rows), max(keys), descales,
        v.head_dim**-0.5, left, right, True, OUT_DTYPES[v.out], "fast", True, "",
        softcap=2.0 if v.kind == "capped" else 0.0,
    )  # fmt: skip


def wrong_sequences(kernel: Kernel, call: RaggedCall, **how: Any) -> list[int]:
    """The sequences whose rows are not what the emulator says; -1 where a row is written that belongs to none."""
    make = fp8_by_torch if call.descales else by_torch
    got, found, rest = kernel.run_ragged(call, make(call, kernel.variant), **how), [], set(range(len(call.q)))
    for s, (rows, keys) in enumerate(spans(call)):
        rest -= set(range(rows.start, rows.stop))
        q, k, v = (x[of].transpose(0, 1)[None] for x, of in ((call.q, rows), (call.k, keys), (call.v, keys)))
        own, lse = got.out[rows].float(), got.lse[:, rows]
        if not q.shape[2] or not k.shape[2]:
            right = not bool(own.any()) and bool((lse == -torch.inf).all())
        else:
            descales = tuple(d[s : s + 1] for d in call.descales)
            expected, log_sum = emulate_sequence(call, q, k, v, descales, kernel.variant)
            other, seen = expected[0].transpose(0, 1).float(), log_sum[0].isfinite()
            # One P of a row that rounds the other way is 4e-4 of a sequence that has no other row.
            right = relative_l2(own, other) <= 1e-3 and torch.equal(lse.isfinite(), seen)
            right = right and torch.allclose(lse[seen], log_sum[0][seen], rtol=3e-7, atol=2e-6)
        found += [] if right else [s]
    return found if bool(got.out[sorted(rest)].isnan().all()) else [*found, -1]


@pytest.mark.parametrize("name", RAGGED)
def test_ragged_batches(name: str, tmp_path: Path) -> None:
    """From 16 bits, and from FP8 with a descale of each sequence and head."""
    kernel = Kernel(name, tmp_path)
    for fp8 in (False, True):
        call = ragged_call(kernel.variant, fp8)
        assert wrong_sequences(kernel, call, seed=3, late=not fp8) == []


PLAIN = "sm89_fwd_d64_m64n128w4_s2_block_causal_e4m3_bf16_linear"
ONE_STAGE = "sm89_fwd_d256_m64n32w4_s1_block_causal_e4m3_bf16_exp2x2"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    return Kernel(PLAIN, tmp_path_factory.mktemp("warp"))


@pytest.mark.parametrize("seed", range(4))
def test_no_order_of_threads_and_no_arrival_of_copies_changes_a_bit(plain: Kernel, seed: int) -> None:
    operands, options = problem(plain.variant, "block"), options_of(plain.variant)
    first = plain.run(operands, **options)
    got = plain.run(operands, **options, seed=seed + 1, late=seed % 2 == 0, ctas=1 + seed, wants_lse=seed != 3)
    assert torch.equal(got.out, first.out) and (seed == 3 or torch.equal(got.lse, first.lse))


@pytest.mark.parametrize("scaling", ["tensor", "head"])
def test_coarser_scaling(plain: Kernel, scaling: str) -> None:
    operands = problem(plain.variant, scaling)
    got = plain.run(operands, scaling=scaling, **options_of(plain.variant))
    assert same(got, want(plain.variant, operands, scaling))


def test_sinks_and_rows_without_keys(plain: Kernel) -> None:
    operands, options, sinks = problem(plain.variant, "block"), options_of(plain.variant), torch.tensor([1.5, -0.5])
    options["causal_offset"] = -5
    got = plain.run(operands, **options, sinks=sinks)
    expected = emulate(*operands.fp8, *operands.descales, variant=plain.variant, sinks=sinks, **options)
    assert torch.equal(got.out, expected.out) and not bool(got.out[:, :, :5].any())
    assert bool((got.lse[:, :, :5] == -torch.inf).all())


# Of the walk over ragged batches, and of the kernel.
RAGGED_FAULTS = {
    "keys of the next sequence": ("fp8cutlass/walk/ragged.h", "return item.of.keys;", "return item.of.keys + 1;"),
    "rows of the next sequence": ("fp8cutlass/walk/ragged.h", "return item.of.rows;", "return item.of.rows + 1;"),
    "the first sequence's descales": ("fp8cutlass/walk/ragged.h", "of.sequence * p.ragged.k_descale_sequence", "0"),
    "another head's V": ("fp8cutlass/schedule_ragged.h", "int64_t(work.kv_head) * kHeadDim", "int64_t(0)"),
    "an item beyond the last": ("fp8cutlass/schedule_ragged.h", "< *p.ragged.count", "<= *p.ragged.count"),
    "the batch's first K": ("fp8cutlass/schedule_ragged.h", "work.of.key * p.k_stride_row", "0"),
    "O of the tile's first row": ("fp8cutlass/schedule_ragged.h", "(row - work.row) * p.o_stride_row", "0"),
}


@pytest.mark.parametrize("name", RAGGED_FAULTS)
def test_faults_of_the_ragged_walk_are_noticed(name: str, tmp_path: Path) -> None:
    headers, built = tmp_path / "include", tmp_path / "built"
    built.mkdir()
    shutil.copytree(ROOT / "include", headers)
    planted(headers / RAGGED_FAULTS[name][0], *RAGGED_FAULTS[name][1:])
    kernel = Kernel(RAGGED[0], built, headers)
    try:
        noticed = any(wrong_sequences(kernel, ragged_call(kernel.variant, fp8)) for fp8 in (False, True))
    except RuntimeError:
        noticed = True
    assert noticed


# Of a kernel, a text of it or of a header, and what stands there instead.
SOURCE, PRODUCTS = "kernel.cu", "fp8cutlass/sm89/mma.cuh"
FAULTS = {
    "no barrier before a slot is loaded": (PLAIN, SOURCE, "__syncthreads();                     // for", "// for"),
    "a tile is not waited for": (PLAIN, SOURCE, "wait_copies<kStages - 2>();", "wait_copies<kStages - 1>();"),
    "V is not waited for": (ONE_STAGE, SOURCE, "sm89::wait_copies<1>();  // V of this tile", "// V of this tile"),
    "the next K over this one": (ONE_STAGE, SOURCE, "__syncthreads();  // everybody is done with K\n", "\n"),
    "the diagonal of the row above": (PLAIN, SOURCE, "work).last - key);", "work).last - 1 - key);"),
    "keys beyond the end are read": (PLAIN, SOURCE, "stride_row, Walk::keys(p, work) - key);", "stride_row, kTileN);"),
    "a fragment of other columns": (PLAIN, PRODUCTS, "q[f][step], b[2], b[3]);", "q[f][step], b[3], b[2]);"),
    "a window begins a key late": (WINDOWS[0], SOURCE, "band(p, work).first - key;", "band(p, work).first + 1 - key;"),
    "a window's first tile is left out": (WINDOWS[0], SOURCE, "first_tile(work); tile", "first_tile(work) + 1; tile"),
    "a row sum of one step": (PLAIN, PRODUCTS, "step < kSteps; ++step) Mma::fma(t,", "step < 1; ++step) Mma::fma(t,"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_noticed(name: str, tmp_path: Path) -> None:
    """By a wrong result, or by what the host says, for one of a few orders of threads."""
    of, file, old, new = FAULTS[name]
    headers, built = tmp_path / "include", tmp_path / "built"
    built.mkdir()
    shutil.copytree(ROOT / "include", headers)
    source = headers / SOURCE
    source.write_text(render_kernel(parse_id(of), environment()))
    planted(headers / file, old, new)
    kernel = Kernel(of, built, headers, source.read_text())
    operands = problem(kernel.variant, "block")
    expected = want(kernel.variant, operands, "block")

    def noticed(seed: int) -> bool:
        try:
            got = kernel.run(operands, **options_of(kernel.variant), seed=seed, late=seed % 2 == 0, ctas=2)
        except RuntimeError:
            return True
        return not same(got, expected)

    assert any(noticed(seed) for seed in range(6))
