"""The kernels that bring long chunks over a paged cache to those of ragged batches, on the host: built with g++ from
the sources that nvcc gets (tests/host/device). They take what the operator ``fp8cutlass_C::prefill`` has."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compilers import ROOT, host_library, planted

from codegen.pack import Pack, Source
from codegen.render import environment, render_pack, render_single

BLOCK = 128  # prefill::kBlock
HEADERS = ("prefill", "decode", "walk", "pack_fp8.cuh", "pack_ragged.cuh")  # that edits may change
_P, _L, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


def _struct(name: str, **fields: Any) -> Any:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


_Divisor = _struct("Divisor", by=_I, factor=ctypes.c_uint32, shift=_I)
_Places = _struct("Places", base=_P, page=_L, token=_L, head=_L)
_HeadDescale = _struct("HeadDescale", base=_P, sequence=_I, head=_I, value=ctypes.c_float)
_Batch = _struct(
    "Batch", lengths=_P, cu_q=_P, total_q=_I, sequences=_I, most_keys=_I, heads=_I, kv_heads=_I, by_group=_Divisor,
    by_kv_heads=_Divisor, left=_I, right=_I, each=_I, routed=_I,
)  # fmt: skip
_Members = _struct("Members", count=_P, sequence=_P, first=_P, cu_q=_P, used_q=_P, cu_k=_P, most=_I)
_Route = _struct("RouteParams", batch=_Batch, least=_I, capacity=_I, members=_Members, lengths=_P)
_Gather = _struct(
    "GatherParams", k=_Places, v=_Places, k_token=_Places, v_token=_Places, k_descale=_HeadDescale,
    v_descale=_HeadDescale, page_table=_P, table_row=_L, by_page_size=_Divisor, entries=_I, pages=_I, members=_Members,
    lengths=_P, kv_heads=_I, columns=_I, k_out=_P, v_out=_P, k_scales=_P, v_scales=_P,
)  # fmt: skip


def _divisor(by: int) -> Any:
    bits = (by - 1).bit_length()
    return _Divisor(by, ((1 << (31 + bits)) + by - 1) // by, 31 + bits)


@dataclass
class Made:
    """What the kernels wrote. The members' tables as prefill::Members has them, K (Hkv, columns, D), V packed."""

    rest: torch.Tensor
    tables: dict[str, torch.Tensor]
    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor
    v_scales: torch.Tensor

    @property
    def count(self) -> int:
        return int(self.tables["count"])


class Kernels:
    """Of a head_dim. ``edits`` replace texts in the sources: (file, text, other text)."""

    def __init__(self, head_dim: int, folder: Path, edits: Sequence[tuple[str, str, str]] = ()) -> None:
        self.head_dim = head_dim
        pack = Pack(head_dim=head_dim, key_block=BLOCK, source=Source.FP8)
        headers = folder / "include" / "fp8cutlass"
        for name in HEADERS:
            source = ROOT / "include" / "fp8cutlass" / name
            (headers / name).parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if source.is_dir() else shutil.copy)(source, headers / name)
        (headers / "decode" / "instructions.cuh").unlink()
        kernel, route = folder / "kernel.cu", folder / "route.cu"
        kernel.write_text(render_pack(pack, environment()))
        route.write_text(render_single("route.cu", environment()))
        for file, old, new in edits:
            planted(kernel if file == "kernel.cu" else headers / file, old, new)
        files = [f'-DKERNEL_FILE="{kernel}"', f'-DROUTE_FILE="{route}"', f"-DKERNEL={pack.id}_gather"]
        flags = [*files, "-I", str(folder / "include")]
        self.library = host_library("prefill_host.cpp", folder, ROOT / "include", *flags)
        self.library.run_route.restype = self.library.run_gather.restype = ctypes.c_char_p
        sizes = self.library.route_bytes(), self.library.gather_bytes()
        if sizes != (ctypes.sizeof(_Route), ctypes.sizeof(_Gather)):
            raise AssertionError("parameters of route or gather have changed")

    def run(self, a: dict[str, Any], *, ctas: int = 5, seed: int = 0) -> Made:
        """By the operator's arguments, by name, and ``left``, ``right``, ``k_value``, ``v_value`` of its numbers."""
        q, k, v, table, ends = a["q"], a["k"], a["v"], a["page_table"], a["cu_seqlens_q"]
        pages, size, kv_heads, _ = k.shape
        sequences, most, capacity = len(a["lengths"]), a["most"], a["capacity"]
        entries = 1 if table is None else table.shape[1]
        columns = (-(-capacity // BLOCK) + most) * BLOCK
        words = {"count": 1, "sequence": most, "first": most, "cu_q": most + 1, "used_q": most, "cu_k": most + 1}
        tables = {name: torch.full((n,), -77, dtype=torch.int32) for name, n in words.items()}
        members = _Members(*(x.data_ptr() for x in tables.values()), most)
        batch = _Batch(
            a["lengths"].data_ptr(), None if ends is None else ends.data_ptr(), q.shape[0], sequences, entries * size,
            q.shape[1], kv_heads, _divisor(q.shape[1] // kv_heads), _divisor(kv_heads), a["left"], a["right"],
            q.shape[0] // sequences, 0,
        )  # fmt: skip
        rest = a["rest"]
        route = _Route(batch, a["least"], capacity, members, rest.data_ptr())
        self._check(self.library.run_route(ctypes.byref(route), seed))
        made = Made(
            rest, tables, torch.full((kv_heads, columns, self.head_dim), 0xA5, dtype=torch.uint8),
            torch.full((kv_heads, self.head_dim, columns), 0xA5, dtype=torch.uint8),
            *(torch.full((kv_heads, columns // BLOCK), torch.nan) for _ in range(2)),
        )  # fmt: skip
        places = [_Places(x.data_ptr(), *x.stride()[:3]) for x in (k, v)]
        token, page = a["k_token_descale"], a["v_page_descale"]
        places.append(_Places() if token is None else _Places(token.data_ptr(), *(4 * s for s in token.stride())))
        places.append(
            _Places() if page is None else _Places(page.data_ptr(), 4 * page.stride(0), 0, 4 * page.stride(1))
        )
        heads = []
        for d, value in ((a["k_descale"], a["k_value"]), (a["v_descale"], a["v_value"])):
            if d is None or d.numel() == 1:
                heads.append(_HeadDescale(None if d is None else d.data_ptr(), 0, 0, value))
            else:
                heads.append(_HeadDescale(d.data_ptr(), *([0] * (2 - d.dim())), *d.stride(), 0.0))
        gather = _Gather(
            *places, *heads, *((None, 0) if table is None else (table.data_ptr(), table.stride(0))), _divisor(size),
            entries, pages, members,
            rest.data_ptr(), kv_heads, columns, made.k.data_ptr(), made.v.data_ptr(), made.k_scales.data_ptr(),
            made.v_scales.data_ptr(),
        )  # fmt: skip
        self._check(self.library.run_gather(ctypes.byref(gather), ctas, seed))
        return made

    def _check(self, failure: bytes | None) -> None:
        if failure is not None:
            raise AssertionError(failure.decode())
