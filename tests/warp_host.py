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
from reference import Operands, relative_l2

from codegen.render import environment, render_kernel
from codegen.variant import parse_id
from fp8cutlass.call.call import FAR, Call, Tensors
from fp8cutlass.call.launch import fp8_operands
from fp8cutlass.call.ragged import Made
from fp8cutlass.call.ragged_call import RaggedCall
from fp8cutlass.dtypes import OUT_DTYPES
from fp8cutlass.emulator.emulate import Emulation
from fp8cutlass.manifest import generated_dir, load_manifest
from fp8cutlass.masks.block_mask import BlockMask

# Of `Call` in tests/host/warp_host.cpp, in its order; `*` a pointer, `!` a double.
FIELDS = (
    "q* k* v* q_batch q_head q_row k_batch k_head k_row q_descale* k_descale* v_descale* q_descale_head q_descale_row "
    "k_descale_head k_descale_block v_descale_head v_descale_block out_descale* o* o_batch o_head o_row lse* amax* "
    "batch heads kv_heads seqlen_q seqlen_k padded causal_offset window_offset sinks* scale! cap! tiles* count* "
    "bottom_right q_descale_sequence k_descale_sequence v_descale_sequence readable* readable_count items ctas late "
    "seed mask_tiles* mask_counts* mask_bits* list_batch list_head list_row key_tiles bit_tiles "
    "bias* bias_batch bias_head bias_row bias_key bias_type bias_pairs"
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


def spans(call: RaggedCall) -> list[tuple[slice, slice]]:
    """The tokens of Q and of K that count of each sequence."""
    found = []
    for s in range(len(call.cu_q) - 1):
        of = []
        for cu, used in ((call.cu_q, call.used_q), (call.cu_k, call.used_k)):
            begin, end = int(cu[s]), int(cu[s + 1])
            of.append(slice(begin, end if used is None else min(end, begin + int(used[s]))))
        found.append((of[0], of[1]))
    return found


def _row_tiles(call: RaggedCall, tile_m: int, key_block: int, in_blocks: bool) -> torch.Tensor:
    """What the plan lists (include/fp8cutlass/params.h, RowTile), in some order."""
    entries = []
    for s, (q, k) in enumerate(spans(call)):
        rows, block = q.stop - q.start, k.start // key_block + s
        key = block * key_block if in_blocks else k.start
        entries += [(s, row, rows, k.stop - k.start, q.start, key, block, 0) for row in range(0, rows, tile_m)]
    return torch.tensor(entries, dtype=torch.int32)


def _lists(mask: BlockMask) -> dict[str, Any]:
    """As csrc/masks.cpp has them. Past a count lie entries that are out of range."""
    batch, heads, rows, keys = mask.tiles.shape
    there = torch.arange(keys) < mask.counts[..., None]
    mask.tiles.copy_(torch.where(there, mask.tiles, 1 << 30))
    return {
        "mask_tiles": mask.tiles.data_ptr(), "mask_counts": mask.counts.data_ptr(), "mask_bits": _address(mask.bits),
        "list_batch": heads * rows if batch > 1 else 0, "list_head": rows if heads > 1 else 0,
        "list_row": int(rows > 1), "key_tiles": keys, "bit_tiles": keys if mask.bits is None else mask.bits.shape[3],
    }  # fmt: skip


def _bias(bias: torch.Tensor, sizes: tuple[int, ...]) -> dict[str, Any]:
    """As csrc/masks.cpp has it."""
    steps = [step if size > 1 else 0 for step, size in zip(bias.stride(), bias.shape, strict=True)]
    assert all(size in (1, whole) for size, whole in zip(bias.shape, sizes, strict=True))
    even = steps[3] == 1 and not any(step % 2 for step in steps[:3]) and bias.data_ptr() % 4 == 0
    names = ("bias_batch", "bias_head", "bias_row", "bias_key")
    return {
        "bias": bias.data_ptr(), "bias_type": [torch.float32, torch.bfloat16, torch.float16].index(bias.dtype),
        "bias_pairs": even and bias.dtype != torch.float32,
    } | dict(zip(names, steps, strict=True))  # fmt: skip


class Kernel:
    """A kernel that was built in ``folder``, from other ``headers`` where some are given."""

    def __init__(self, name: str, folder: Path, headers: Path = ROOT / "include", source: str | None = None) -> None:
        variant = parse_id(name)
        self.manifest = load_manifest(generated_dir())
        self.variant = self.manifest.find(name)
        (folder / "kernel.cu").write_text(source or render_kernel(variant, environment()))
        own = ["-DLISTED"] * variant.listed + ["-DBIASED"] * variant.change.biased
        flags = f"-DKERNEL={name}", '-DKERNEL_FILE="kernel.cu"', f"-I{folder}", *own
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
        mask: BlockMask | None = None,
        bias: torch.Tensor | None = None,
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
        items = -(-rows // v.tile_m) * batch * heads
        given: dict[str, Any] = {
            "v": made.v.data_ptr(), "padded": made.v.shape[3], "out_descale": _address(out_descale),
            "lse": _address(lse) if wants_lse else None, "amax": _address(amax) if wants_lse else None,
            "batch": batch, "heads": heads, "kv_heads": kv_heads, "seqlen_q": rows, "seqlen_k": keys,
            "causal_offset": causal_offset, "window_offset": window_offset, "sinks": _address(sinks),
            "scale": scale / softcap if softcap else scale, "cap": softcap * _LOG2E,
            "items": items, "ctas": min(ctas, items), "late": late, "seed": seed,
        }  # fmt: skip
        if mask is not None:
            given |= _lists(mask)
        for name, x in (("q", made.q), ("k", made.k), ("o", out)):
            steps = (f"{name}_batch", f"{name}_head", f"{name}_row")
            given |= {name: x.data_ptr()} | dict(zip(steps, x.stride()[:3], strict=True))
        for name, d, of in zip("qkv", descales, (heads, kv_heads, kv_heads), strict=True):
            head, part = _steps(d, batch * of)
            given[f"{name}_descale"], given[f"{name}_descale_head"] = d.data_ptr(), head
            given["q_descale_row" if name == "q" else f"{name}_descale_block"] = part
        read = [made.q, made.k, made.v, *descales]
        if bias is not None:
            given |= _bias(bias, (batch, heads, rows, keys))
            read.append(bias)
        self._launch(given, read)
        return Result(out, lse, amax)

    def run_ragged(self, call: RaggedCall, made: Made, *, ctas: int = 3, late: bool = True, seed: int = 0) -> Result:
        """The same of a ragged batch. Rows of no sequence stay NaN, which the kernel that packs would make zeros."""
        v = self.variant
        descales = [d.contiguous() for d in made.descales]
        (rows, heads, head_dim), (keys, kv_heads) = made.q.shape, made.k.shape[:2]
        out = torch.full((rows, heads, head_dim), torch.nan).to(OUT_DTYPES[v.out])
        lse = torch.full((heads, rows), torch.nan)
        tiles = _row_tiles(call, v.tile_m, v.key_block, made.in_blocks)
        count = torch.tensor([len(tiles)], dtype=torch.int32)
        none = torch.tensor([[0, 0, 1, 1, rows - 1, 0, 0, 0]] * 3, dtype=torch.int32)
        room = torch.cat((tiles, none))  # there are fewer than the launch is for
        given: dict[str, Any] = {
            "v": made.v.data_ptr(), "padded": made.v.shape[2], "lse": _address(lse),
            "batch": 1, "heads": heads, "kv_heads": kv_heads, "seqlen_q": rows, "seqlen_k": keys,
            "causal_offset": FAR if call.right < 0 else call.right,
            "window_offset": -(FAR if call.left < 0 else call.left), "sinks": _address(call.sinks),
            "scale": call.scale / call.softcap if call.softcap else call.scale, "cap": call.softcap * _LOG2E,
            "tiles": room.data_ptr(), "count": count.data_ptr(), "bottom_right": call.bottom_right,
            "items": len(room) * heads, "ctas": ctas, "late": late, "seed": seed,
        }  # fmt: skip
        for name, x in (("q", made.q), ("k", made.k), ("o", out)):
            given |= {name: x.data_ptr(), f"{name}_row": x.stride(0), f"{name}_head": x.stride(1)}
        for name, d in zip("qkv", descales, strict=True):
            sequence, head, part = {1: (0, 0, 0), 2: (d.shape[-1], 1, 0), 3: (0, d.shape[-1], 1)}[d.dim()]
            given |= {f"{name}_descale": d.data_ptr(), f"{name}_descale_sequence": sequence}
            given |= {f"{name}_descale_head": head, "q_descale_row" if name == "q" else f"{name}_descale_block": part}
        self._launch(given, [made.q, made.k, made.v, *descales])
        return Result(out, lse, torch.zeros(1))

    def _launch(self, given: dict[str, Any], read: list[torch.Tensor]) -> None:
        """read: what copies and loads may read."""
        ends = [end for x in read for end in (x.data_ptr(), x.data_ptr() + x.untyped_storage().nbytes())]
        readable = (ctypes.c_uint64 * len(ends))(*ends)
        of = {"readable": ctypes.addressof(readable), "readable_count": len(ends) // 2}
        failed = self._library.run(ctypes.byref(_Call(**given, **of)))
        if failed is not None:
            raise RuntimeError(failed.decode())


def same(got: Result, expected: Emulation) -> bool:
    """Bits, but where the last one of an exponential or of a sum differs: then P of a key may round the other way."""
    out, other = got.out.float(), expected.out.float()
    return (
        float((out != other).float().mean()) <= 2e-3
        and relative_l2(out, other) <= 3e-4
        and float((got.lse - expected.lse)[expected.lse.isfinite()].abs().max()) <= 2e-6
        and abs(float(got.amax / expected.amax) - 1) <= 1e-6
    )
