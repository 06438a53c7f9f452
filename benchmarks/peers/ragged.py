"""Contenders of ragged batches and windows: our kernels with their plan, our whole call, our dense kernels where
lengths are equal, and FlashAttention-3."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch

from fp8cutlass import attention_varlen, quantize
from fp8cutlass.call import ragged as walk
from fp8cutlass.call.ragged import FAR, RaggedCall
from fp8cutlass.choose.target import target
from fp8cutlass.errors import UnsupportedError
from fp8cutlass.manifest import Variant, load_manifest
from fp8cutlass.native import extension

from ..data import Data
from ..shapes import Shape
from ..walk import Mix, RaggedData, Way, cells
from .fa3 import MODULE
from .own import OUT_DTYPE, Own, launcher, make_operands

OURS, CALLER, CALL, DENSE = "fp8cutlass", "fp8cutlass_e4m3", "fp8cutlass_call", "fp8cutlass_dense"
Descaled = tuple[torch.Tensor, torch.Tensor]


def call_of(data: RaggedData) -> RaggedCall:
    """The arguments of the operator for a batch, from bf16."""
    mix = data.mix
    longest, right = max(mix.lengths), 0 if mix.causal else -1
    lengths = (data.cu, data.cu, None, None, longest, longest)
    return RaggedCall(
        data.q, data.k, data.v, *lengths, (), data.scale, mix.left, right, True, OUT_DTYPE, "fast", False, ""
    )  # fmt: skip


def kernel_launch(call: RaggedCall, variant: Variant, number: int) -> Callable[[], torch.Tensor]:
    """The plan and the kernel on operands that are ready."""
    made = walk.by_torch(call, variant)
    sequences = call.cu_q.shape[0] - 1
    words = torch.ops.fp8cutlass_C.ragged_plan_words(number, call.q.shape[0], sequences)
    plan = torch.empty(words, dtype=torch.int32, device=call.q.device)
    out = torch.zeros(call.q.shape, dtype=OUT_DTYPE, device=call.q.device)
    ends = (FAR if end < 0 else end for end in (call.left, call.right))
    tables = (call.cu_q, call.cu_k, None, None, plan)
    operands = (made.q, made.k, made.v, *made.descales)
    arguments = (number, *operands, *tables, out, None, call.scale, *ends, True, made.in_blocks)

    def launch() -> torch.Tensor:
        torch.ops.fp8cutlass_C.forward_ragged(*arguments)
        return out

    return launch


def by_sequence(data: RaggedData) -> list[Descaled]:
    """FP8 operands and a descale for each sequence and KV head, as FlashAttention-3 takes them. Of normal values one a
    tensor is as good."""
    sequences, kv_heads = len(data.mix.lengths), data.mix.kv_heads
    pairs = (quantize(x.transpose(0, 1)[None], granularity="tensor") for x in (data.q, data.k, data.v))
    return [(x[0].transpose(0, 1).contiguous(), d.expand(sequences, kv_heads).contiguous()) for x, d in pairs]


def item_rows(variant: Variant, mix: Mix) -> int:
    """Rows of an item: of a window half the tile, where the heads that share K and V come in pairs (walk/item.h)."""
    pairs = mix.left >= 0 and mix.heads // mix.kv_heads % 2 == 0
    return variant.tile_m // 2 if pairs else variant.tile_m


def _own(data: RaggedData, name: str) -> Way:
    call = call_of(data)
    variant, number = walk.choose(target(data.q.device), call)
    if variant.head_dim != data.mix.head_dim:
        raise UnsupportedError(f"{variant.id} would need head_dim {data.mix.head_dim} to be padded")
    extension.load()
    launch = kernel_launch(call, variant, number)
    visited = cells(data.mix, item_rows(variant, data.mix), variant.tile_n)
    return Way(name, "fp8", data.mix, launch, kernel=variant.id, cells=visited)


def _callers(data: RaggedData) -> Way:
    """The call on e4m3 operands that a caller brings, with all that is made of them."""
    (q, q_descale), (k, k_descale), (v, v_descale) = by_sequence(data)
    mix, longest = data.mix, max(data.mix.lengths)
    q_descale = q_descale.repeat_interleave(mix.heads // mix.kv_heads, 1)  # ours has one for each head
    lengths = (data.cu, data.cu, longest, longest)
    options: dict[str, Any] = {"causal": mix.causal, "window_size": (mix.left, -1)}
    options |= {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    return Way(CALLER, "fp8", mix, lambda: cast(torch.Tensor, attention_varlen(q, k, v, *lengths, **options)))


def ours(data: RaggedData) -> list[Way]:
    """The kernel on operands as a call from bf16 makes them, a call on FP8 operands that a caller brings, and one on
    bf16 tensors."""

    def whole() -> torch.Tensor:
        mix, longest = data.mix, max(data.mix.lengths)
        lengths = (data.cu, data.cu, longest, longest)
        window = (mix.left, -1)
        out = attention_varlen(data.q, data.k, data.v, *lengths, causal=mix.causal, window_size=window)
        return cast(torch.Tensor, out)

    return [_own(data, OURS), _callers(data), Way(CALL, "fp8", data.mix, whole)]


def _dense_data(data: RaggedData) -> Data:
    """The same tensors as a dense batch, contiguous (B, H, S, D); its own reference is not used."""
    mix = data.mix
    count, n = len(mix.lengths), mix.lengths[0]
    q, k, v = (x.view(count, n, *x.shape[1:]).transpose(1, 2).contiguous() for x in (data.q, data.k, data.v))
    shape = Shape(mix.head_dim, mix.causal, n, n, count, mix.heads, mix.kv_heads)
    return Data(shape, q, k, v, data.scale, data.cu, (), ())


def _as_tokens(out: torch.Tensor) -> torch.Tensor:
    return out.transpose(1, 2).flatten(0, 1)


def dense(data: RaggedData) -> list[Way]:
    """Where lengths are equal: the dense kernel of the ragged one's tile if it is built, else the table's choice."""
    if len(set(data.mix.lengths)) > 1:
        return []
    as_dense, at = _dense_data(data), target(data.q.device)
    twin = walk.choose(at, call_of(data))[0].id.removesuffix("_ragged")
    built = {v.id for v in load_manifest(at.directory).variants}
    variant, number = Own().choose(as_dense, at, twin if twin in built else "")
    extension.load()
    out = torch.empty_like(as_dense.q)
    launch = launcher(number, make_operands(as_dense, variant, at, "block"), out, data.scale)
    visited = cells(data.mix, variant.tile_m, variant.tile_n)
    return [Way(DENSE, "fp8", data.mix, launch, _as_tokens, variant.id, visited)]


def windowed(data: RaggedData) -> list[Way]:
    """The dense kernel with a window of one sequence, (1, H, S, D)."""
    at, mix = target(data.q.device), data.mix
    manifest = load_manifest(at.directory)
    wanted = {"kind": "window", "head_dim": mix.head_dim, "out": "bf16", "softmax": "linear"}
    found = [
        v for v in manifest.variants if at.arch in v.targets and all(getattr(v, a) == x for a, x in wanted.items())
    ]
    if not found:
        raise UnsupportedError(f"no kernel with a window of head_dim {mix.head_dim} is built")
    variant, as_dense = found[0], _dense_data(data)
    extension.load()
    o, out = make_operands(as_dense, variant, at, "block"), torch.empty_like(as_dense.q)
    operands = (manifest.index[variant.id], o.q, o.k, o.v, o.q_descale, o.k_descale, o.v_descale)

    def launch() -> torch.Tensor:
        torch.ops.fp8cutlass_C.forward(*operands, None, out, None, None, data.scale, 0, -mix.left)
        return out

    visited = cells(mix, item_rows(variant, mix), variant.tile_n)
    return [Way(DENSE, "fp8", mix, launch, _as_tokens, variant.id, visited)]


def windows(sizes: tuple[int, ...]) -> Callable[[RaggedData], list[Way]]:
    """Of one sequence with a causal mask: our kernels without a window, and with one of each of ``sizes`` keys."""

    def source(data: RaggedData) -> list[Way]:
        found = [_own(data, OURS), *dense(data)]
        for size in sizes:
            of = replace(data, mix=replace(data.mix, left=size - 1))
            found += [_own(of, OURS), *windowed(of)]
        return found

    return source


def fa3(precision: str) -> Callable[[RaggedData], list[Way]]:
    """FlashAttention-3, FP8 operands with a descale for each sequence and KV head, or bf16."""

    def source(data: RaggedData) -> list[Way]:
        attention = importlib.import_module(MODULE).flash_attn_varlen_func
        tensors = [(x, None) for x in (data.q, data.k, data.v)] if precision == "bf16" else by_sequence(data)
        names = ("q_descale", "k_descale", "v_descale")
        descales = {} if precision == "bf16" else {n: d for n, (_, d) in zip(names, tensors, strict=True)}
        mix, longest = data.mix, max(data.mix.lengths)
        options = {"causal": mix.causal, "softmax_scale": data.scale, **descales}

        def launch() -> torch.Tensor:
            out = attention(*(x for x, _ in tensors), data.cu, data.cu, longest, longest, **options)
            return cast(torch.Tensor, out[0] if isinstance(out, tuple) else out)

        return [Way(f"fa3_{precision}", precision, mix, launch)]

    return source
