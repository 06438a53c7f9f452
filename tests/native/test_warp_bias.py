"""Kernels of family sm89 that add a bias, on the host, against the emulator (tests/warp_host.py).

Regressions these catch: a bias of another row, key, head or batch; one that is scaled; a step of 0 that is not one; two
keys of a word that are not neighbours; values beyond the last row or key that are read; NaN that reaches another row.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from biases import cast, layouts, normal
from compilers import ROOT, planted
from reference import operands_of, randn
from warp_host import Kernel, same

from codegen.render import environment, render_kernel
from codegen.variant import parse_id
from fp8cutlass.emulator.emulate import emulate
from fp8cutlass.manifest import Variant

BATCH, HEADS, KV_HEADS, ROWS, KEYS = 2, 2, 1, 70, 140
BANDS = ((None, None), (-500, 71), (20, 90))  # the first key of row 0 and the last
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Of each head_dim, softmax and type of output.
KERNELS = (
    "sm89_fwd_d64_m64n128w4_s2_block_window_e4m3_fp16_exp2_biased",
    "sm89_fwd_d64_m64n64w4_s4_block_window_e4m3_bf16_exp2x2_biased",
    "sm89_fwd_d96_m64n64w4_s2_block_window_e4m3_bf16_exp2_biased",
    "sm89_fwd_d128_m64n64w4_s2_block_window_e4m3_fp16_exp2x2_biased",
)


DEVIATION = 1.0
LAYOUTS = layouts(HEADS, DEVIATION)


def wrong(kernel: Kernel, name: str, dtype: torch.dtype, band: tuple[int | None, int | None]) -> bool:
    """Whether a kernel is not what the emulator says."""
    v = kernel.variant
    q = randn(BATCH, HEADS, ROWS, v.head_dim, seed=1)
    k, x = (randn(BATCH, KV_HEADS, KEYS, v.head_dim, seed=s) for s in (2, 3))
    operands, bias = operands_of(v, q, k, x, "block"), cast(LAYOUTS[name](ROWS, KEYS), dtype)
    first, last = (far if end is None else end for end, far in zip(band, (-(1 << 30), 1 << 30), strict=True))
    options: dict[str, Any] = {"scale": v.head_dim**-0.5, "causal_offset": last, "window_offset": first, "bias": bias}
    got = kernel.run(operands, **options)
    expected = emulate(*operands.fp8, *operands.descales, variant=v, **options)
    seen = expected.lse.isfinite()
    return not torch.equal(got.lse.isfinite(), seen) or bool(got.out[~seen].any()) or not same(got, expected)


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_what_the_emulator_says(name: str, tmp_path: Path) -> None:
    kernel = Kernel(name, tmp_path)
    for number, layout in enumerate(LAYOUTS):
        of = DTYPES if layout == "full" else (DTYPES[number % 3],)
        for dtype in of:
            assert not wrong(kernel, layout, dtype, BANDS[number % 3]), (layout, dtype)


def test_nan_reaches_its_own_row_alone(tmp_path: Path) -> None:
    kernel = Kernel(KERNELS[1], tmp_path)
    v: Variant = kernel.variant
    q, k, x = (randn(1, 1, ROWS, v.head_dim, seed=s) for s in (1, 2, 3))
    operands, bias = operands_of(v, q, k, x, "block"), normal(DEVIATION, 1, 1, ROWS, ROWS)
    options: dict[str, Any] = {"scale": v.head_dim**-0.5, "causal_offset": 1 << 30, "window_offset": -(1 << 30)}
    clean = kernel.run(operands, **options, bias=bias).out
    bias[0, 0, 9, 40] = torch.nan
    out = kernel.run(operands, **options, bias=bias).out
    others = torch.arange(ROWS) != 9
    assert bool(out[0, 0, 9].isnan().all()) and torch.equal(out[:, :, others], clean[:, :, others])


# A text of the kernel or of the header, and what stands there instead.
SOURCE, HEADER = "kernel.cu", "fp8cutlass/bias.cuh"
FAULTS = {
    "the row below": (SOURCE, "16 * f + group, Walk::rows", "16 * f + group + 1, Walk::rows"),
    "the key after": (SOURCE, "key, Walk::keys(p, work), kTileN", "key + 1, Walk::keys(p, work), kTileN"),
    "the first head's": (SOURCE, "work.head * bias.stride_head", "0"),
    "the first batch element's": (SOURCE, "work.batch * bias.stride_batch", "0"),
    "scaled": (SOURCE, "slope[0] = slope[1] = 1.f;", ""),
    "in nats": (HEADER, "two.y * kLog2e", "two.y"),
    "the other row's": (HEADER, "first_row + 8 * r", "first_row"),
    "rows beyond the last": (HEADER, "min(first_row + 8 * r, rows - 1)", "(first_row + 8 * r)"),
    "keys beyond the last": (HEADER, "min(key + zero, keys - 1)", "(key + zero)"),
    "pairs past the end": (HEADER, "bias.pairs && keys >= tile_keys", "bias.pairs"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_noticed(name: str, tmp_path: Path) -> None:
    file, old, new = FAULTS[name]
    headers, built = tmp_path / "include", tmp_path / "built"
    built.mkdir()
    shutil.copytree(ROOT / "include", headers)
    source = headers / SOURCE
    source.write_text(render_kernel(parse_id(KERNELS[1]), environment()))
    planted(headers / file, old, new)
    kernel = Kernel(KERNELS[1], built, headers, source.read_text())

    def noticed(layout: str, dtype: torch.dtype) -> bool:
        try:
            return wrong(kernel, layout, dtype, BANDS[0])
        except RuntimeError:  # what the host says: a load outside of the tensors
            return True

    assert any(noticed(layout, dtype) for layout in ("full", "begins at an odd key") for dtype in DTYPES)
