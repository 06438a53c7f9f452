"""The kernel that merges partial results, on the host, from the source that nvcc compiles, against torch operations.

Regressions these catch: an LSE that is written before another lane has read it; a row of another head; rows that a
warp does not fill; weights of rows that saw no key; a NaN that is lost.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from compilers import ROOT, host_library

from codegen.render import environment, render_single
from fp8cutlass.call.merge import weights

_P, _L, _U, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32, ctypes.c_int32
KINDS = (torch.float32, torch.bfloat16, torch.float16)
THREADS = 256


class _Params(ctypes.Structure):
    """merging::MergeParams"""

    _fields_ = [
        ("out", _P), ("lse", _P), ("to", _P), ("to_lse", _P),
        *((name, _L * 3) for name in ("out_stride", "lse_stride", "to_stride", "to_lse_stride")),
        ("rows", _U), ("size", _U * 2), ("columns", _U), ("lanes", _U), ("kind", _I),
    ]  # fmt: skip


class Kernel:
    """``edits`` replace texts in the kernel's header."""

    def __init__(self, folder: Path, edits: Sequence[tuple[str, str]] = ()) -> None:
        headers = folder / "include" / "fp8cutlass" / "merge"
        headers.mkdir(parents=True)
        for name in ("params.h", "merge.cuh"):
            text = (ROOT / "include" / "fp8cutlass" / "merge" / name).read_text()
            for old, new in edits if name == "merge.cuh" else ():
                assert text.count(old) == 1, old
                text = text.replace(old, new)
            (headers / name).write_text(text)
        kernel = folder / "kernel.cu"
        kernel.write_text(render_single("merge.cu", environment()))
        self.library = host_library("merge_host.cpp", folder, folder / "include", f'-DKERNEL_FILE="{kernel}"')
        self.library.run.restype = ctypes.c_char_p
        self.library.params_bytes.restype = ctypes.c_size_t
        assert self.library.params_bytes() == ctypes.sizeof(_Params), "merging::MergeParams has changed"

    def merge(self, out: torch.Tensor, lse: torch.Tensor, to: torch.Tensor, to_lse: torch.Tensor, seed: int) -> None:
        """As csrc/merge.cpp launches it."""
        rows, columns, lanes = out[..., 0].numel(), out.shape[3], 32
        while lanes > 1 and lanes // 2 * 4 >= columns:
            lanes //= 2
        order = sorted(range(3), key=lambda dim: -out.stride(dim))

        def steps(x: torch.Tensor) -> object:
            return (_L * 3)(*(x.stride(dim) if x.shape[dim] > 1 else 0 for dim in order))

        size = (_U * 2)(*(out.shape[dim] for dim in order[1:]))
        p = _Params(
            out.data_ptr(), lse.data_ptr(), to.data_ptr(), to_lse.data_ptr(), steps(out), steps(lse), steps(to),
            steps(to_lse), rows, size, columns, lanes, KINDS.index(to.dtype),
        )  # fmt: skip
        failure = self.library.run(ctypes.byref(p), -(-rows // (THREADS // lanes)), seed)
        assert failure is None, failure


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    return Kernel(tmp_path_factory.mktemp("merge"))


def operands(head_dim: int, dtype: torch.dtype, swapped: bool) -> list[torch.Tensor]:
    """Results and LSEs of two parts: rows that saw nothing in one or both, a NaN, a row whose weight is all."""
    generator = torch.Generator().manual_seed(head_dim)
    shape = (2, 3, 37, head_dim)
    out, to = (torch.randn(shape, generator=generator) for _ in range(2))
    lse, to_lse = (3 * torch.randn(shape[:3], generator=generator) for _ in range(2))
    out[0, 0, 1], lse[0, 0, 1] = 0, -torch.inf
    to[0, 1, 1], to_lse[0, 1, 1] = 0, -torch.inf
    out[1, 2, 5], to[1, 2, 5], lse[1, 2, 5], to_lse[1, 2, 5] = 0, 0, -torch.inf, -torch.inf
    to[1, 0, 36, 3], lse[1, 1, 0], to_lse[0, 2, 9] = torch.nan, torch.nan, 200.0
    to = to.to(dtype)
    if swapped:  # (B, S, H, D) in memory, and a row of the LSE for each token
        out, to = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (out, to))
        lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
    return [out, lse, to, to_lse]


def differs(kernel: Kernel, given: list[torch.Tensor], seed: int = 0) -> bool:
    out, lse, to, to_lse = (x.clone() for x in given)
    kernel.merge(out, lse, to, to_lse, seed)
    total, weight = weights(given[1], to_lse)
    wanted = torch.lerp(given[0], to.float(), weight.unsqueeze(-1))
    near = {"rtol": 2e-6, "atol": 2e-6, "equal_nan": True}
    return not (torch.allclose(out, wanted, **near) and torch.allclose(lse, total, **near))  # type: ignore[arg-type]


@pytest.mark.parametrize("head_dim", [4, 32, 72, 128, 256])
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("swapped", [False, True])
def test_it_merges_as_torch_does(kernel: Kernel, head_dim: int, dtype: torch.dtype, swapped: bool) -> None:
    for seed in range(2):
        assert not differs(kernel, operands(head_dim, dtype, swapped), seed)


MUTANTS = {
    "the LSE is not written": ("  if (lane == 0) p.lse[lse] = total;\n", ""),
    "the LSE of other rows": ("  if (lane == 0) p.lse[lse]", "  if (lane == 0) p.lse[lse ^ 1]"),
    "weights the wrong way round": ("expf(b - total)", "expf(a - total)"),
    "rows without keys": ("total == -INFINITY ? 0.f : ", ""),
    "bf16 in the wrong order": ("make_float4(low(pairs.x), high(pairs.x),", "make_float4(high(pairs.x), low(pairs.x),"),
    "a stride": ("to += place[i] * p.to_stride[i]", "to += place[i] * p.out_stride[2 - i]"),
    "columns past a warp": ("column += kColumns * p.lanes", "column += p.columns"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_faults_are_noticed(name: str, tmp_path: Path) -> None:
    broken = Kernel(tmp_path, [MUTANTS[name]])
    assert any(differs(broken, operands(d, torch.bfloat16, swapped)) for d in (32, 256) for swapped in (False, True))
