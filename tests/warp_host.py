"""The attention kernels of family sm89 on the host: built with g++ from the sources that nvcc gets, with instructions
that do the same on the CPU (tests/host/device)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from calls import plan_of
from compilers import ROOT, host_library
from reference import Operands

from codegen.render import environment, render_kernel
from codegen.variant import parse_id
from fp8cutlass.call.call import Call, Tensors
from fp8cutlass.call.launch import fp8_operands
from fp8cutlass.dtypes import OUT_DTYPES
from fp8cutlass.manifest import generated_dir, load_manifest

# Of `Call` in tests/host/warp_host.cpp, in its order; `*` a pointer, `!` a double.
FIELDS = (
    "q* k* v* q_batch q_head q_row k_batch k_head k_row q_descale* k_descale* v_descale* q_descale_head q_descale_row "
    "k_descale_head k_descale_block v_descale_head v_descale_block out_descale* o* o_batch o_head o_row lse* amax* "
    "batch heads kv_heads seqlen_q seqlen_k padded causal_offset window_offset sinks* scale! cap! readable* "
    "readable_count items ctas late seed"
).split()
_TYPES = {"*": ctypes.c_void_p, "!": ctypes.c_double}
_LOG2E = 1.4426950408889634


class _Call(ctypes.Structure):
    _fields_ = [(name.rstrip("*!"), _TYPES.get(name[-1], ctypes.c_int64)) for name in FIELDS]


@dataclass(frozen=True)
class Result:
    """What a kernel wrote; without an LSE the last two are as they were."""

    out: torch.Tensor
    lse: torch.Tensor
    amax: torch.Tensor


def _steps(descale: torch.Tensor, heads: int) -> tuple[int, int]:
    """From head to head and from part to part of a head, as csrc/arguments.cpp has them."""
    parts = descale.numel() // heads
    return (0, 0) if descale.numel() == 1 else (parts, int(parts > 1))


def _address(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


class Kernel:
    """A kernel that was built in ``folder``, from other ``headers`` where some are given."""

    def __init__(self, name: str, folder: Path, headers: Path = ROOT / "include", source: str | None = None) -> None:
        variant = parse_id(name)
        self.manifest = load_manifest(generated_dir())
        self.variant = self.manifest.find(name)
        (folder / "kernel.cu").write_text(source or render_kernel(variant, environment()))
        flags = f"-DKERNEL={name}", '-DKERNEL_FILE="kernel.cu"', f"-I{folder}"
        self._library = host_library("warp_host.cpp", folder, headers, *flags)
        self._library.run.restype = ctypes.c_char_p

    def run(
        self,
        operands: Operands,
        *,
        scale: float,
        scaling: str | None = None,
        causal_offset: int = 0,
        window_offset: int = 0,
        out_descale: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        softcap: float = 0.0,
        wants_lse: bool = True,
        ctas: int = 3,
        late: bool = True,
        seed: int = 0,
    ) -> Result:
        """Runs the CTAs of a launch one after the other. late: copies arrive when they are waited for; else at once.
        seed: of the order of CTAs and threads. RuntimeError says what went wrong."""
        v = self.variant
        call = Call("fp8", OUT_DTYPES[v.out], scale, scaling=scaling or v.scaling, kernel=v.id)
        plan = plan_of(call, v, self.manifest)
        made = fp8_operands(plan.call, plan.variant, Tensors(*operands.fp8, *operands.descales))
        descales = [d.contiguous() for d in (made.q_descale, made.k_descale, made.v_descale)]
        (batch, heads, rows, head_dim), (kv_heads, keys) = made.q.shape, made.k.shape[1:3]
        out = torch.full((batch, heads, rows, head_dim), torch.nan).to(OUT_DTYPES[v.out])
        lse, amax = torch.full((batch, heads, rows), torch.nan), torch.zeros(1)
        read = [made.q, made.k, made.v, *descales]
        ends = [end for x in read for end in (x.data_ptr(), x.data_ptr() + x.untyped_storage().nbytes())]
        readable = (ctypes.c_uint64 * len(ends))(*ends)
        items = -(-rows // v.tile_m) * batch * heads
        given: dict[str, Any] = {
            "v": made.v.data_ptr(), "padded": made.v.shape[3], "out_descale": _address(out_descale),
            "lse": _address(lse) if wants_lse else None, "amax": _address(amax) if wants_lse else None,
            "batch": batch, "heads": heads, "kv_heads": kv_heads, "seqlen_q": rows, "seqlen_k": keys,
            "causal_offset": causal_offset, "window_offset": window_offset, "sinks": _address(sinks),
            "scale": scale / softcap if softcap else scale, "cap": softcap * _LOG2E,
            "readable": ctypes.addressof(readable), "readable_count": len(ends) // 2,
            "items": items, "ctas": min(ctas, items), "late": late, "seed": seed,
        }  # fmt: skip
        for name, x in (("q", made.q), ("k", made.k), ("o", out)):
            steps = (f"{name}_batch", f"{name}_head", f"{name}_row")
            given |= {name: x.data_ptr()} | dict(zip(steps, x.stride()[:3], strict=True))
        for name, d, of in zip("qkv", descales, (heads, kv_heads, kv_heads), strict=True):
            head, part = _steps(d, batch * of)
            given[f"{name}_descale"], given[f"{name}_descale_head"] = d.data_ptr(), head
            given["q_descale_row" if name == "q" else f"{name}_descale_block"] = part
        failed = self._library.run(ctypes.byref(_Call(**given)))
        if failed is not None:
            raise RuntimeError(failed.decode())
        return Result(out, lse, amax)
