"""The kernel that appends to a paged cache on the host: built with g++ from the source that nvcc gets, with
instructions that do the same on the CPU (tests/host/device). It takes the arguments of the operator
``fp8cutlass_C::append``."""

from __future__ import annotations

import ctypes
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from compilers import ROOT, host_library, planted

from codegen.render import environment, render_single

TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.uint8)  # of appending::Type, in order
THREADS, COLUMNS = 256, 16  # kAppendThreads, kColumns
HEADERS = ("append", "walk/lengths.cuh", "params.h", "quantise.cuh")
_P, _L, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


def _struct(name: str, **fields: Any) -> Any:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


_Rows = _struct("Rows", base=_P, token=_L, head=_L)
_Numbers = _struct("Numbers", base=_P, wide=_I)
_Store = _struct("Store", base=_P, page=_L, token=_L, head=_L)
_Given = _struct("GivenDescale", base=_P, row=_L, head=_L)
_Angles = _struct("Angles", base=_P, row=_L)
# appending::AppendParams
_Params = _struct(
    "AppendParams", k=_Rows, v=_Rows, type=_I, tokens=_I, first=_I, count=_I, heads=_I, head_dim=_I, lane_bits=_I,
    row_ctas=_I, pages=_I, page_size=_I, slots=_Numbers, positions=_Numbers, cu=_P, lengths=_P, table=_P, table_row=_L,
    sequences=_I, entries=_I, width=_I, used=_P, cos=_Angles, sin=_Angles, angle_type=_I, table_rows=_I, half=_I,
    interleaved=_I, mean=_P, mean_head=_L, rotated=_I, rotation_scale=ctypes.c_float, k_store=_Store, v_store=_Store,
    k_token=_Store, v_page=_Store, k_descale=_Given, v_descale=_Given,
)  # fmt: skip


def names() -> list[str]:
    """Of the arguments of the operator, from its schema."""
    schema = re.search(r'"append\((.*?)\) -> ', (ROOT / "csrc" / "binding.cpp").read_text(), re.DOTALL)
    assert schema is not None
    return [part.split()[-1] for part in re.sub(r'"\s*"', "", schema[1]).split(",")]


def _strided(x: torch.Tensor | None, size: int, made: Any, axes: int) -> Any:
    """Strides of the first axes in units of ``size`` bytes."""
    return made() if x is None else made(x.data_ptr(), *(size * step for step in x.stride()[:axes]))


def _numbers(x: torch.Tensor | None) -> Any:
    return _Numbers() if x is None else _Numbers(x.data_ptr(), int(x.dtype == torch.int64))


def _given(x: torch.Tensor | None) -> Any:
    return _Given() if x is None else _Given(x.data_ptr(), *([0] * (2 - x.dim())), *x.stride())


def _page_descale(x: torch.Tensor | None) -> Any:
    if x is None:
        return _Store()
    steps = [4 * step for step in x.stride()]
    return _Store(x.data_ptr(), steps[0], *([0] if x.dim() == 2 else []), *steps[1:])


class Kernel:
    """``edits`` replace texts in the headers: (file, text, other text)."""

    def __init__(self, folder: Path, edits: Sequence[tuple[str, str, str]] = ()) -> None:
        headers = folder / "include" / "fp8cutlass"
        for name in HEADERS:
            source = ROOT / "include" / "fp8cutlass" / name
            copy = shutil.copytree if source.is_dir() else shutil.copy
            (headers / name).parent.mkdir(parents=True, exist_ok=True)
            copy(source, headers / name)
        kernel = folder / "kernel.cu"
        kernel.write_text(render_single("append.cu", environment()))
        for file, old, new in edits:
            planted(headers / "append" / file, old, new)
        flags = [f'-DKERNEL_FILE="{kernel}"']
        self.library = host_library("append_host.cpp", folder, folder / "include", *flags)
        self.library.run.restype = ctypes.c_char_p
        self.library.params_bytes.restype = ctypes.c_size_t
        if self.library.params_bytes() != ctypes.sizeof(_Params):
            raise AssertionError("appending::AppendParams has changed")

    def run(self, *given: Any, chunk: int = 4096, seed: int = 0) -> int:
        """Arguments as the operator has them, in its order; returns the launches."""
        a = dict(zip(names(), given, strict=True))
        k, cache = a["k"], a["k_cache"]
        tokens, heads, head_dim = k.shape
        pages, size = cache.shape[:2]
        lanes = 1 << max(0, math.ceil(math.log2(head_dim / COLUMNS)))
        p = _Params(
            type=TYPES.index(k.dtype), tokens=tokens, heads=heads, head_dim=head_dim, lane_bits=lanes.bit_length() - 1,
            pages=pages, page_size=size, k=_strided(k, k.element_size(), _Rows, 2),
            v=_strided(a["v"], k.element_size(), _Rows, 2), slots=_numbers(a["slots"]),
            positions=_numbers(a["positions"]), k_store=_strided(cache, 1, _Store, 3),
            v_store=_strided(a["v_cache"], 1, _Store, 3), k_token=_page_descale(a["k_token_descale"]),
            v_page=_page_descale(a["v_page_descale"]), k_descale=_given(a["k_descale"]),
            v_descale=_given(a["v_descale"]), width=1,
        )  # fmt: skip
        if a["slots"] is None:
            sequences, p.entries = a["page_table"].shape
            p.cu, p.lengths, p.table = (a[n].data_ptr() for n in ("cu_seqlens", "lengths", "page_table"))
            p.table_row, p.sequences = a["page_table"].stride(0), sequences
            p.used = None if a["used"] is None else a["used"].data_ptr()
            while p.width < min(32, tokens // sequences // size + 1):
                p.width *= 2
            chunk = tokens
        if (cos := a["rotary_cos"]) is not None:
            p.angle_type, (p.table_rows, p.half), p.interleaved = TYPES.index(cos.dtype), cos.shape, a["interleaved"]
            p.cos, p.sin = (_strided(x, x.element_size(), _Angles, 1) for x in (cos, a["rotary_sin"]))
        if (mean := a["k_mean"]) is not None:
            p.mean, p.mean_head = mean.data_ptr(), mean.stride(0)
        if a["hadamard"]:
            p.rotated = head_dim if head_dim & (head_dim - 1) == 0 else head_dim // 3
            p.rotation_scale = p.rotated**-0.5
        grows, launches = a["v_descale"] is None, 0
        of_cta = THREADS // lanes
        for first in range(0, tokens, chunk):
            p.first, p.count, launches = first, min(chunk, tokens - first), launches + 1
            p.row_ctas = -(-p.count * heads * (1 if grows else 2) // of_cta)
            ctas = p.row_ctas + (tokens * heads if grows and first + chunk >= tokens else 0)
            if (failure := self.library.run(ctypes.byref(p), ctas, seed)) is not None:
                raise AssertionError(failure.decode())
        return launches
