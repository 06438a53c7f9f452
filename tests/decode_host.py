"""The decode kernels on the host: built with g++ from the sources that nvcc gets, with instructions that do the same on
the CPU (tests/host/device). And attention over a paged cache in float64, which they are held to."""

from __future__ import annotations

import ctypes
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compilers import ROOT, host_library, planted

from codegen.arch import TARGETS
from codegen.decode import ALL, HEAD_DIMS, candidates
from codegen.render import environment, render_decode, render_single

FAR = 1 << 30
LIMITS = (2.0**-126, 2.0**126)  # of descales
# Of `Call` in tests/host/decode_host.cpp, in its order; `*` a pointer, `!` a double.
FIELDS = (
    "lengths* cu_q* total_q sequences most_keys heads kv_heads left right each ctas overhead whole q* q_row q_head "
    "q_bf16 k* v* k_page k_token k_head v_page v_token v_head readable* readable_count token_descale* descale_page "
    "descale_token descale_head page_descale* v_descale_page v_descale_head k_descale* v_descale* k_descale_sequence "
    "k_descale_step v_descale_sequence v_descale_step k_value! v_value! page_table* table_row page_size pages sinks* "
    "sink_head sink_token sink_type scale! softcap! o* o_row o_head lse* late seed routed cuts*"
).split()
_TYPES = {"*": ctypes.c_void_p, "!": ctypes.c_double}


class _Call(ctypes.Structure):
    _fields_ = [(name.rstrip("*!"), _TYPES.get(name[-1], ctypes.c_int64)) for name in FIELDS]


@dataclass(frozen=True)
class Batch:
    """A call. Caches are (pages, page_size, Hkv, D) uint8; queries are (tokens, H, D)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor | None  # None: page s is all of sequence s
    lengths: torch.Tensor
    cu_q: torch.Tensor | None  # None: all sequences have as many queries
    k_descale: torch.Tensor | float  # (sequences, Hkv), any strides, or a number
    v_descale: torch.Tensor | float
    k_token: torch.Tensor | None = None  # (pages, page_size, Hkv)
    v_page: torch.Tensor | None = None  # (pages, Hkv)
    sinks: torch.Tensor | None = None
    left: int = FAR
    right: int = 0
    softcap: float = 0.0
    scale: float = 0.125
    routed: bool = False  # sequences of negative length have no queries here

    @property
    def room(self) -> int:
        """Keys of a row of the table."""
        return self.k.shape[1] * (1 if self.table is None else self.table.shape[1])

    def pages_of(self, s: int) -> torch.Tensor:
        """Page numbers of sequence s, in the cache."""
        row = torch.tensor([s]) if self.table is None else self.table[s].long()
        return row.clamp(0, self.k.shape[0] - 1)

    def queries_of(self, s: int) -> slice:
        """Of sequence s."""
        each = self.q.shape[0] // len(self.lengths)
        begin, end = (s * each, s * each + each) if self.cu_q is None else self.cu_q[s : s + 2].tolist()
        return slice(begin, end)


SINKS = (torch.float32, torch.bfloat16, torch.float16)  # Sink of decode/params.h


@dataclass(frozen=True)
class Result:
    out: torch.Tensor
    lse: torch.Tensor
    cuts: torch.Tensor


def batch(
    lengths: Sequence[int],
    queries: Sequence[int],
    heads: tuple[int, int],
    head_dim: int,
    page_size: int = 16,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    **rest: Any,
) -> Batch:
    """Random operands. Bytes of K and V that belong to no key are NaN, and table entries past a sequence's end lie."""
    random = torch.Generator().manual_seed(seed)
    used = [-(-n // page_size) for n in lengths]
    pages, places = sum(used) + 2, iter(torch.randperm(sum(used) + 2, generator=random).tolist())
    cache = torch.full((2, pages, page_size, heads[1], head_dim), 0x7F, dtype=torch.uint8)
    table = torch.full((len(lengths), max(used) + 1), -5, dtype=torch.int32)
    for s, n in enumerate(lengths):
        for i in range(used[s]):
            table[s, i] = page = next(places)
            count = min(page_size, n - i * page_size)
            keys = torch.randn(2, count, heads[1], head_dim, generator=random) * 1.5
            cache[:, page, :count] = keys.to(torch.float8_e4m3fn).view(torch.uint8)
    ends = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    descales = [torch.rand(len(lengths), heads[1], generator=random) + 0.5 for _ in range(2)]
    q = torch.randn(int(ends[-1]), heads[0], head_dim, generator=random).to(dtype)
    return Batch(
        q, cache[0], cache[1], table, torch.tensor(lengths, dtype=torch.int32), ends, *descales,
        scale=1 / math.sqrt(head_dim), **rest,
    )  # fmt: skip


class Kernel:
    """One decode kernel. ``edits`` replace texts in the headers: (file, text, other text)."""

    def __init__(self, name: str, folder: Path, edits: Sequence[tuple[str, str, str]] = ()) -> None:
        self.spec = next(d for d in (*ALL, *candidates(HEAD_DIMS, tuple(TARGETS))) if d.id == name)
        folder.mkdir(parents=True, exist_ok=True)
        headers, env = folder / "include", environment()
        shutil.copytree(ROOT / "include" / "fp8cutlass" / "decode", headers / "fp8cutlass" / "decode")
        for replaced in ("instructions.cuh", "warpgroup.cuh"):
            (headers / "fp8cutlass" / "decode" / replaced).unlink()
        shutil.copy(ROOT / "include" / "fp8cutlass" / "host_device.h", headers / "fp8cutlass")
        source, cut = folder / "kernel.cu", folder / "cut.cu"
        source.write_text(render_decode(self.spec, env))
        cut.write_text(render_single("cut.cu", env))
        for file, old, new in edits:
            planted(source if file == "kernel.cu" else headers / "fp8cutlass" / "decode" / file, old, new)
        flags = [f"-DKERNEL={name}", f'-DKERNEL_FILE="{source}"', f'-DCUT_FILE="{cut}"']
        self.library = host_library("decode_host.cpp", folder, headers, *flags)
        self.library.run.restype = ctypes.c_char_p

    def run(
        self, b: Batch, *, ctas: int = 7, overhead: int = 2, whole: bool = False, late: bool = True, seed: int = 0
    ) -> Result:
        out = torch.full_like(b.q, math.nan)
        lse = torch.full((b.q.shape[1], b.q.shape[0]), math.nan)
        cuts = torch.zeros(ctas + 1, 12, dtype=torch.int32)
        page, token, head = b.k.stride()[:3]
        copied = (b.q, b.k, b.v, b.table, b.lengths, b.cu_q, b.k_descale, b.v_descale, b.k_token, b.v_page)
        read = [x.untyped_storage() for x in copied if isinstance(x, torch.Tensor)]
        ends = [end for x in read for end in (x.data_ptr(), x.data_ptr() + x.nbytes())]
        readable = (ctypes.c_void_p * len(ends))(*ends)
        numbers: dict[str, Any] = {
            "lengths": b.lengths, "cu_q": b.cu_q, "total_q": b.q.shape[0], "sequences": len(b.lengths),
            "most_keys": b.room, "heads": b.q.shape[1], "kv_heads": b.k.shape[2], "left": b.left,
            "right": b.right, "each": b.q.shape[0] // len(b.lengths), "ctas": ctas,
            "overhead": overhead, "whole": int(whole), "q": b.q, "q_row": b.q.stride(0), "q_head": b.q.stride(1),
            "q_bf16": int(b.q.dtype == torch.bfloat16), "k": b.k, "v": b.v, "k_page": page,
            "k_token": token, "k_head": head, "v_page": b.v.stride(0), "v_token": b.v.stride(1),
            "v_head": b.v.stride(2), "readable": ctypes.addressof(readable), "readable_count": len(read),
            "token_descale": b.k_token, "page_descale": b.v_page, "page_table": b.table,
            "table_row": 0 if b.table is None else b.table.stride(0), "page_size": b.k.shape[1],
            "pages": b.k.shape[0], "sinks": b.sinks, "sink_head": 1,
            "sink_type": 0 if b.sinks is None else SINKS.index(b.sinks.dtype), "scale": b.scale,
            "softcap": b.softcap, "o": out, "o_row": out.stride(0), "o_head": out.stride(1), "lse": lse,
            "late": int(late), "seed": seed, "routed": int(b.routed), "cuts": cuts,
        }  # fmt: skip
        for name, x in (("k", b.k_descale), ("v", b.v_descale)):
            if isinstance(x, torch.Tensor):
                sequence, head = x.stride()
                numbers |= {f"{name}_descale": x, f"{name}_descale_sequence": sequence, f"{name}_descale_step": head}
            else:
                numbers[f"{name}_value"] = x
        if b.k_token is not None:
            numbers |= dict(zip(("descale_page", "descale_token", "descale_head"), _bytes(b.k_token), strict=True))
        if b.v_page is not None:
            numbers |= dict(zip(("v_descale_page", "v_descale_head"), _bytes(b.v_page), strict=True))
        call = _Call(**{n: x.data_ptr() if torch.is_tensor(x) else x for n, x in numbers.items()})
        if (failure := self.library.run(ctypes.byref(call))) is not None:
            raise AssertionError(failure.decode())
        return Result(out, lse, cuts)


def _bytes(descales: torch.Tensor) -> list[int]:
    return [4 * step for step in descales.stride()]


def exact(b: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and LSE in float64."""
    tokens, heads, head_dim = b.q.shape
    group = heads // b.k.shape[2]
    out = torch.zeros(tokens, heads, head_dim, dtype=torch.float64)
    lse = torch.full((heads, tokens), -math.inf, dtype=torch.float64)
    for s, keys in enumerate(b.lengths.tolist()):
        of = b.queries_of(s)
        rows = of.stop - of.start
        if not rows or not keys:
            continue
        at = b.pages_of(s)
        k, v = (x[at].flatten(0, 1)[:keys].view(torch.float8_e4m3fn).double() for x in (b.k, b.v))
        if b.k_token is not None:
            k = k * b.k_token[at].flatten(0, 1)[:keys, :, None].double()
        if b.v_page is not None:
            v = v * b.v_page[at].repeat_interleave(b.k.shape[1], 0)[:keys, :, None].double()
        k_descale, v_descale = (
            (x[s] if isinstance(x, torch.Tensor) else torch.full((b.k.shape[2],), x)).double()[:, None].clamp(*LIMITS)
            for x in (b.k_descale, b.v_descale)
        )
        k, v = k * k_descale, v * v_descale
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        x = torch.einsum("qhd,khd->hqk", b.q[of].double(), k) * b.scale
        if b.softcap:
            x = b.softcap * torch.tanh(x / b.softcap)
        own, key = torch.arange(rows)[:, None] + keys - rows, torch.arange(keys)
        seen = (key >= own - b.left) & (key <= own + b.right)
        x = x.masked_fill(~seen, -math.inf)
        with_sink = x
        if b.sinks is not None:
            with_sink = torch.cat([x, b.sinks.double()[:, None, None].expand(heads, rows, 1)], -1)
        total = torch.logsumexp(with_sink, -1)
        p = torch.exp(x - total[..., None]).masked_fill(~seen, 0.0)
        result = torch.einsum("hqk,khd->qhd", p, v.nan_to_num(0.0))
        broken = torch.einsum("qk,khd->qhd", seen.double(), v.isnan().double()) > 0
        some = seen.any(-1)
        out[of] = result.masked_fill(broken, math.nan).masked_fill(~some[:, None, None], 0.0)
        lse[:, of] = total.masked_fill(~some, -math.inf)
    return out, lse


def wrong(b: Batch, result: Result) -> str:
    """What is wrong with a result, empty where nothing: besides its rounding to 16 bits, it is exact to 2^-10 of the
    largest element of a row."""
    out, lse = exact(b)
    if not torch.equal(result.out.isnan(), out.isnan()):
        return "NaN is elsewhere"
    if not torch.equal(result.lse.isinf(), lse.isinf()) or not torch.equal(result.lse.isnan(), lse.isnan()):
        return "the rows without a key are others"
    rounding = 2.0**-8 if b.q.dtype == torch.bfloat16 else 2.0**-11
    difference, size = (result.out.double() - out).nan_to_num(0.0), out.nan_to_num(0.0)
    largest = size.abs().amax(-1, keepdim=True)
    off = difference.abs() - (size.abs() * rounding + largest * 2.0**-10 + 1e-30)
    if bool((off > 0).any()):
        return f"an element is off by {off.max().item():.2g} more than rounding"
    finite = lse.isfinite()
    apart = (result.lse.double() - lse)[finite].abs()
    if apart.numel() and apart.max() > 2e-5 * lse[finite].abs().max().clamp_min(1.0):
        return f"an LSE is off by {apart.max().item():.2g}"
    return ""
