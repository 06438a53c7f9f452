"""The operators of the extension that serve whole calls, with the CPU's specification in the place of the kernels.

``card(monkeypatch)`` makes tensors say that they lie on a card, and these the operators. What Python does of a call on
a card, from its arguments to the operator and back, then runs without one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8cutlass import BlockMask
from fp8cutlass.call import launch
from fp8cutlass.call.call import Call, Tensors
from fp8cutlass.call.masks import for_emulator, packed
from fp8cutlass.dtypes import OUT_DTYPES
from fp8cutlass.emulator.emulate import emulate
from fp8cutlass.manifest import generated_dir, load_manifest
from fp8cutlass.masks.bits import pack as bits_of
from fp8cutlass.native import extension
from fp8cutlass.native.fused import Operands
from fp8cutlass.quant.descale import accepted_shapes, to_canonical
from fp8cutlass.quant.quantize import GRANULARITIES
from fp8cutlass.quant.v_layout import unpack_v

FIELDS = tuple(
    re.findall(r"^X\(\w+, (\w+),", (Path(__file__).parents[1] / "csrc" / "call.def").read_text(), flags=re.MULTILINE)
)
Operator = Callable[..., torch.Tensor]


class Numbers:
    """The first argument of an operator."""

    def __init__(self, constants: torch.Tensor) -> None:
        assert constants.dtype == torch.float64 and constants.shape == (len(FIELDS),)
        self.of = dict(zip(FIELDS, constants.tolist(), strict=True))
        manifest = load_manifest(generated_dir())
        self.variant = manifest.variants[int(self.of["variant"])]
        self.granularity = {name: GRANULARITIES[int(self.of[f"{name}_granularity"])] for name in "qkv"}
        self.scaling = next(mode for mode, shared in manifest.scaling.items() if shared == self.granularity)
        self.scale = self.of["scale"]

    def call(self, kind: str, **more: Any) -> Call:
        hadamard = bool(self.of["hadamard"])
        return Call(kind, OUT_DTYPES[self.variant.out], self.scale, scaling=self.scaling, hadamard=hadamard, **more)

    def attend(
        self, made: Operands, out_descale: Any, lse: Any, amax: Any, sinks: Any, mask: BlockMask | None, bias: Any
    ) -> torch.Tensor:
        """What the attention kernel makes of its operands, dense in the order that the numbers say. Its LSE is that of
        the keys alone."""
        variant = self.variant
        softcap = self.of["softcap"]
        assert (softcap > 0) == (variant.kind == "capped"), "a cap has kernels of its own"
        assert (mask is not None) == (variant.mask == "blocks"), "lists of tiles have kernels of their own"
        assert (bias is not None) == (variant.kind == "biased"), "biases have kernels of their own"
        assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous())
        assert made.q is not None and made.k is not None and made.v is not None and made.k_descale is not None
        keys, dtype = made.k.shape[2], torch.float8_e5m2 if variant.dtype == "e5m2" else torch.float8_e4m3fn
        k_descale = made.k_descale[:, :, :keys] if self.scaling == "token" else made.k_descale
        run = partial(
            emulate,
            made.q.view(dtype),
            made.k.view(dtype),
            unpack_v(made.v.view(dtype), keys),
            made.q_descale,
            k_descale,
            made.v_descale,
            variant=variant,
            scale=abs(self.scale),
            scaling=self.scaling,
            causal_offset=int(self.of["causal_offset"]),
            window_offset=int(self.of["window_offset"]) if variant.mask == "window" else None,
            mask=for_emulator(mask),
            bias=bias,
            out_descale=out_descale,
            softcap=softcap,
            return_lse=lse is not None,
        )
        result = run(sinks=sinks)
        if lse is not None:
            lse.copy_(result.lse if sinks is None else run().lse)
        if amax is not None:
            amax.copy_(torch.maximum(amax, result.amax))
        out = result.out.to(OUT_DTYPES[variant.out])
        return out.transpose(1, 2).contiguous().transpose(1, 2) if self.of["seq_major"] else out.contiguous()


def mask_of(q: Any, k: Any, tiles: Any = None, counts: Any = None, bits: Any = None) -> BlockMask | None:
    """The mask that an operator gets for q and k, whose tensors must be contiguous."""
    if tiles is None:
        return None
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in (tiles, counts, bits) if x is not None)
    return packed(None, {"tiles": tiles, "counts": counts, "bits": bits}, q.shape[2], k.shape[2])


def pack_mask(seen: Any, keys: int, tiles: Any, counts: Any, bits: Any) -> None:
    """What the kernel writes, by torch operations."""
    made = bits_of(seen, keys)
    for room, x in ((tiles, made.tiles), (counts, made.counts), (bits, made.bits)):
        assert room.shape == x.shape and room.dtype == x.dtype
        room.copy_(x)


def attend(
    constants: torch.Tensor, q: Any, k: Any, v: Any, out_descale: Any = None, lse: Any = None, amax: Any = None,
    sinks: Any = None, k_mean: Any = None, bias: Any = None, **lists: Any,
) -> torch.Tensor:  # fmt: skip
    n = Numbers(constants)
    assert k_mean is None, "keys are not smoothed here"
    call = n.call("half")
    made = launch.quantised(call, n.variant, n.granularity, Tensors(q, k, v))
    made = launch.fp8_operands(call, n.variant, made)
    return n.attend(made, out_descale, lse, amax, sinks, mask_of(q, k, **lists), bias)


def attend_fp8(
    constants: torch.Tensor, q: Any, k: Any, v: Any, q_descale: Any, k_descale: Any, v_descale: Any,
    out_descale: Any = None, lse: Any = None, amax: Any = None, sinks: Any = None, bias: Any = None, **lists: Any,
) -> torch.Tensor:  # fmt: skip
    n = Numbers(constants)
    for x in (q, k, v):
        assert x.element_size() == 1 and x.stride(3) == 1 and x.shape[3] % 16 == 0 and x.data_ptr() % 16 == 0
    descales = {}
    for name, x, given in zip("qkv", (q, k, v), (q_descale, k_descale, v_descale), strict=True):
        number = n.of[f"{name}_descale"]
        assert (given is None) == (number > 0), "a tensor or a number"
        # Columns that were added for the kernel have a descale as well, which nothing is multiplied by.
        shape = x.shape if given is None or given.dim() < 3 or name != "v" else (*x.shape[:3], given.shape[2])
        if given is not None:
            if given.dtype != torch.float32:
                raise RuntimeError(f"fp8cutlass: {name}_descale must be float32")
            if tuple(given.shape) not in accepted_shapes(n.granularity[name], shape, n.variant.key_block):
                raise RuntimeError(f"fp8cutlass: {name}_descale has shape {tuple(given.shape)}")
        value = number if given is None else given
        value = to_canonical(value, n.granularity[name], shape, x.device, n.variant.key_block)
        if n.granularity[name] == "channel":
            value = torch.nn.functional.pad(value, (0, x.shape[3] - value.shape[2]), value=1.0)
        descales[name] = value
    tensors = Tensors(q, k, v, *descales.values())
    if n.of["score_amax"] < 448 and q.dtype == torch.float8_e4m3fn:
        tensors = launch.lowered_operands(n.variant, tensors)
    made = launch.fp8_operands(n.call("fp8"), n.variant, tensors)
    return n.attend(made, out_descale, lse, amax, sinks, mask_of(q, k, **lists), bias)


def attend_packed(
    constants: torch.Tensor, q: Any, k: Any, v: Any, k_descale: Any, v_descale: Any, out_descale: Any = None,
    lse: Any = None, amax: Any = None, sinks: Any = None, bias: Any = None, out: Any = None, **lists: Any,
) -> torch.Tensor:  # fmt: skip
    n = Numbers(constants)
    call = n.call("packed")
    fp8, q_descale = launch.quantised_query(call, n.variant, n.granularity, q)
    q8 = launch._query(fp8, n.variant, n.scale).view(torch.uint8)
    made = Operands(q8, k, v, q_descale, k_descale, v_descale)
    result = n.attend(made, out_descale, lse, amax, sinks, mask_of(q, k, **lists), bias)
    return result if out is None else out.copy_(result)


OPERATORS: dict[str, Operator] = {"attend": attend, "attend_fp8": attend_fp8, "attend_packed": attend_packed}


def card(monkeypatch: pytest.MonkeyPatch, operators: dict[str, Operator] = OPERATORS) -> list[str]:
    """Returns the names of the operators that are called from now on, as they are."""
    asked: list[str] = []

    def counted(name: str, run: Operator) -> Any:
        def operator(*arguments: Any, **lists: Any) -> torch.Tensor:
            asked.append(name)
            return run(*arguments, **lists)

        return SimpleNamespace(default=SimpleNamespace(_op=operator))

    made: dict[str, Any] = {name: counted(name, run) for name, run in operators.items()} | {"pack_mask": pack_mask}
    monkeypatch.setattr(torch.ops, "fp8cutlass_C", SimpleNamespace(**made), raising=False)
    monkeypatch.setattr(extension, "load", lambda: None)
    monkeypatch.setattr(extension, "load_kernels", lambda *arguments: None)
    monkeypatch.setattr(extension, "call_fields", lambda: FIELDS)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    return asked
