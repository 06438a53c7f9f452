"""Helpers of the GPU tests: which kernels are compiled in, and calls that go straight to one of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import plan_of
from reference import Operands

from codegen.families.warpgroup.derive import derive as derive_warpgroup
from codegen.variant import parse_id
from fp8cutlass import supports
from fp8cutlass.call.call import Call, Outputs, Tensors
from fp8cutlass.call.card import prepared_call
from fp8cutlass.call.launch import fp8_operands, run, run_operands
from fp8cutlass.call.plan import Plan
from fp8cutlass.dtypes import DTYPE_NAMES, OUT_DTYPES
from fp8cutlass.emulator.emulate import Diagnostics
from fp8cutlass.errors import UnsupportedError
from fp8cutlass.manifest import Decode, Manifest, Resident, Variant, generated_dir, load_manifest
from fp8cutlass.native import extension
from fp8cutlass.native.attend import Way
from fp8cutlass.native.fused import Operands as Packed
from fp8cutlass.native.fused import readable
from fp8cutlass.quant.v_layout import pack_v, pad_token_descale

ROOT = Path(__file__).resolve().parent.parent


def built_manifest() -> Manifest:
    """What the library holds; without one the shipped list, so that the tests are collected and skipped by name."""
    try:
        return load_manifest(extension.built_dir())
    except UnsupportedError:
        return load_manifest(generated_dir())


def card_arch() -> str | None:
    """The architecture of the card, None where there is none or nothing is built for it."""
    try:
        return extension.device_arch(torch.device("cuda")) if torch.cuda.is_available() else None
    except UnsupportedError:
        return None


def built_variants(kind: str, **axes: object) -> list[Variant]:
    """The compiled variants of a kind ("fwd" or "diag") that the card runs, with these values, e.g. ``head_dim=64``. Of
    those for ragged batches, which only a call reaches, the ones of head_dims that calls on the card have."""
    arch, manifest = card_arch(), built_manifest()
    wanted = axes | {"kind": kind}
    return [
        variant
        for variant in manifest.variants
        if (arch is None or arch in variant.targets)
        and all(getattr(variant, a) == x for a, x in wanted.items())
        and (arch is None or variant.walk == "dense" or variant.head_dim in manifest.head_dims[arch])
    ]


def fp8_variants() -> list[Variant]:
    """Those of kind "fwd" that take what a caller has in FP8; operands of integers are made of bf16 and fp16 alone."""
    return [v for v in built_variants("fwd") if v.dtype in DTYPE_NAMES.values()]


def built_packs(*, fp8: bool = False) -> list[dict[str, Any]]:
    """The compiled kernels that quantise to FP8 and pack, as the manifest has them, that the card runs; with ``fp8``
    those of FP8 operands."""
    rows = json.loads((built_manifest().directory / "manifest.json").read_text())["packs"]
    arch = card_arch()
    mine = [row for row in rows if not row["id"].endswith(("_s8", "_s8u8")) and (row["source"] == "fp8") == fp8]
    return [row for row in mine if arch is None or arch in row["targets"]]


def built_decodes() -> list[Decode]:
    """The compiled kernels of decode that the card runs."""
    arch = card_arch()
    return [d for d in built_manifest().decodes if arch in (None, d.arch)]


def built_residents() -> list[Resident]:
    """The compiled kernels that keep a head's K and V in shared memory, where the card runs them."""
    return list(built_manifest().residents) if card_arch() in (None, "sm90a") else []


def is_emulated(variant: Variant) -> bool:
    """True where the card's compiler emulates the kernel's matrix instructions: sm89 kernels on a Hopper card."""
    return variant.family != card_arch()


def chosen(*args: Any, **kwargs: Any) -> Variant:
    """The kernel that ``attention(*args, **kwargs)`` runs."""
    served, text = supports(*args, **kwargs)
    if not served:
        raise UnsupportedError(text)
    return built_manifest().find(text.split()[0])


def needs(*args: Any, **kwargs: Any) -> None:
    """Skips a test whose ``attention(*args, **kwargs)`` has no kernel in what is built, which may be a profile. Another
    reason not to serve it fails."""
    served, reason = supports(*args, **kwargs)
    if not served:
        assert "NOT-BUILT" in reason or "profile" in reason, reason
        pytest.skip(reason)


def call_of(
    operands: Operands,
    variant: Variant,
    *,
    scale: float,
    scaling: str | None = None,
    causal_offset: int = 0,
    out_descale: torch.Tensor | None = None,
    return_lse: bool = True,
    return_amax: bool = True,
) -> tuple[Plan, Tensors]:
    """A call of one kernel on operands in its own blocks."""
    call = Call(
        "fp8",
        OUT_DTYPES[variant.out],
        scale,
        scaling=scaling or variant.scaling,
        precision={"linear": "fast", "quadratic": "balanced"}.get(variant.softmax, "accurate"),
        right=causal_offset if variant.causal else None,
        return_lse=return_lse,
        return_amax=return_amax,
        kernel=variant.id,
    )
    return plan_of(call, variant, built_manifest()), Tensors(*operands.fp8, *operands.descales, out_descale)


def as_the_kernel_reads(plan: Plan, t: Tensors) -> Packed:
    """The operands of a call, padded and packed by torch operations on the device where they are."""
    return fp8_operands(plan.call, plan.variant, t)


def run_from_host(plan: Plan, t: Tensors) -> Outputs:
    """Launch a kernel on operands that are on the CPU: packed there, and copied to the card as they are."""
    made = {name: None if x is None else x.cuda() for name, x in vars(as_the_kernel_reads(plan, t)).items()}
    out_descale = None if t.out_descale is None else t.out_descale.cuda()
    on_card = t._replace(q=t.q.new_empty(t.q.shape, device="cuda"), out_descale=out_descale)
    return run_operands(plan, on_card, Packed(**made))


def attend_source(
    variant: Variant,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    leave_q: bool = True,
    hand_over: bool = False,
    scaling: str | None = None,
    scale: float = 0.125,
    causal_offset: int = 0,
    out_descale: torch.Tensor | None = None,
    smooth_k: bool = False,
    return_lse: bool = True,
    return_amax: bool = True,
) -> tuple[torch.Tensor, ...]:
    """One kernel on bf16 or fp16 operands on a card; with ``leave_q`` it quantises Q by itself, with ``hand_over`` it
    runs while K and V are packed, if it can. Out, LSE and amax, where these are asked for."""
    call = Call(
        "half",
        OUT_DTYPES[variant.out],
        scale,
        scaling=scaling or variant.scaling,
        right=causal_offset if variant.causal else None,
        return_lse=return_lse,
        return_amax=return_amax,
        kernel=variant.id,
        smooth_k=smooth_k,
    )
    plan = plan_of(call, variant, built_manifest())
    ready = prepared_call(plan, Tensors(q, k, v), way=Way(leave_q, hand_over))
    outputs = ready(readable(q), readable(k), readable(v), out_descale)
    return tuple(x for x in outputs if x is not None)


def out_descale_for(variant: Variant) -> torch.Tensor | None:
    """What a kernel with e4m3 output is given; others take none."""
    return torch.tensor([0.02], device="cuda") if variant.out == "e4m3" else None


def loop_form(variant: Variant) -> tuple[bool, int, bool]:
    """What tells the loops of kernels of one schedule apart: a softmax prepared ahead, tiles in halves, forms with
    unrolled tiles beside the loop."""
    if variant.family != "sm90a":
        return False, 1, False
    derived = derive_warpgroup(parse_id(variant.id))
    return derived.prepares, derived.halves, bool(derived.unrolled)


def run_kernel(
    operands: Operands,
    variant: Variant,
    *,
    scale: float,
    scaling: str | None = None,
    causal_offset: int = 0,
    out_descale: torch.Tensor | None = None,
    return_lse: bool = True,
    return_amax: bool = True,
) -> Outputs:
    """One kernel on operands in its own blocks, which the registered operator takes in blocks of 128 keys only; returns
    out, LSE and amax, where these are asked for."""
    options = {"scale": scale, "scaling": scaling, "causal_offset": causal_offset, "out_descale": out_descale}
    asked = {"return_lse": return_lse, "return_amax": return_amax}
    return run(*call_of(operands, variant, **asked, **options))  # type: ignore[arg-type]


def diagnose(
    operands: Operands, variant: Variant, *, scale: float, causal_offset: int = 0
) -> tuple[torch.Tensor, Diagnostics]:
    """Runs a diagnostic kernel; returns its output and everything it wrote on the way.

    What it does not visit keeps the value that the emulator gives to hidden tiles: -inf, 0, -1e30, 0.
    """
    extension.load()
    q, k, v = operands.fp8
    q_descale, k_descale, v_descale = operands.descales
    batch, heads, seqlen_q, head_dim = q.shape
    tiles = -(-k.shape[2] // variant.tile_n)
    keys = tiles * variant.tile_n
    if variant.scaling == "token":
        k_descale = pad_token_descale(k_descale)
    wrote: dict[str, Any] = {
        "scores": torch.full((batch, heads, seqlen_q, keys), -torch.inf, device="cuda"),
        "p": torch.zeros((batch, heads, seqlen_q, keys), dtype=torch.uint8, device="cuda"),
        "weight": torch.full((batch, heads, seqlen_q, tiles), -1e30, device="cuda"),
        "tile_o": torch.zeros((batch, heads, tiles, seqlen_q, head_dim), device="cuda"),
    }
    out = torch.full((batch, heads, seqlen_q, head_dim), torch.nan, dtype=OUT_DTYPES[variant.out], device="cuda")
    torch.ops.fp8cutlass_C.diagnose(
        built_manifest().index[variant.id],
        q.contiguous().view(torch.uint8),
        k.contiguous().view(torch.uint8),
        pack_v(v).view(torch.uint8),
        q_descale,
        k_descale,
        v_descale,
        None,
        out,
        None,
        None,
        scale,
        causal_offset,
        *wrote.values(),
    )
    return out, Diagnostics(**wrote)
