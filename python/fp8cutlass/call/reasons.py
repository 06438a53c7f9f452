"""Why tensors are refused: sentences that ``attention``, ``pack_kv`` and ``attention_varlen`` share, each with its own
names of arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

BHSD = ("batch", "heads", "tokens", "head_dim")
NO_BACKWARD = "requires_grad=True and there is no backward: detach it, or torch.no_grad()"
NO_TANGENTS = "forward-mode AD is active and there are no tangents: leave its level, or detach the inputs"

Named = Sequence[tuple[str, Any]]


def wrong_tensors(named: Named, order: Sequence[str]) -> list[str]:
    """What is no dense tensor with the dimensions ``order``."""
    wrong = []
    for name, x in named:
        if not isinstance(x, torch.Tensor):
            wrong.append(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        elif x.is_nested or x.layout != torch.strided:
            kind = "nested" if x.is_nested else str(x.layout)
            wrong.append(f"{name} must be a dense tensor, got a {kind} one")
        elif x.dim() != len(order):
            wrong.append(f"{name} must have {len(order)} dimensions ({', '.join(order)}), got shape {tuple(x.shape)}")
    return wrong


def wrong_dtypes(named: Named, accepted: Sequence[torch.dtype], wide: Sequence[torch.dtype] = ()) -> list[str]:
    """Tensors of a dtype that is neither accepted nor ``wide``; else of more than one."""
    first, dtype, device = named[0][0], named[0][1].dtype, named[0][1].device
    if dtype in accepted and all(x.dtype == dtype and x.device == device for _, x in named):
        return []
    wrong = [wrong_dtype(name, x, accepted) for name, x in named if x.dtype not in (*accepted, *wide)]
    if not wrong and any(x.dtype != dtype for _, x in named):
        names, got = [name for name, _ in named], ", ".join(f"{name} {x.dtype}" for name, x in named)
        wrong.append(f"{', '.join(names[:-1])} and {names[-1]} must share one dtype, got {got}")
    return wrong + wrong_devices(named[1:], first, device)


def wrong_dtype(name: str, x: torch.Tensor, accepted: Iterable[torch.dtype]) -> str:
    """The sentence for a tensor of a dtype that is none of these."""
    return f"{name} has dtype {x.dtype}; accepted are {', '.join(map(str, accepted))}"


def wrong_devices(named: Named, first: str, device: torch.device) -> list[str]:
    """Tensors that are not where ``first`` is."""
    return [f"{name} is on {x.device}, {first} is on {device}" for name, x in named if x.device != device]


def differing(first: str, second: str, sizes: Iterable[tuple[str, int, int]]) -> list[str]:
    """Sizes, by name, that two tensors have to share."""
    return [f"{first} and {second} differ in {what}: {a} and {b}" for what, a, b in sizes if a != b]


def wrong_groups(first: str, second: str, heads: int, kv_heads: int) -> list[str]:
    """Heads of queries that cannot share those of keys in groups of one size."""
    if kv_heads == 0 or heads % kv_heads:
        return [f"the heads of {first} must be a multiple of those of {second}, got {heads} and {kv_heads}"]
    return []


def for_fp8(names: Iterable[str], dtype: torch.dtype) -> list[str]:
    """Descales that were given with operands of another kind."""
    return [f"{name} is for FP8 operands; {dtype} ones are quantised inside" for name in names]


def missing(name: str, dtype: torch.dtype, shape: object) -> str:
    """The sentence for a descale that is not there."""
    return f"{name} is missing: {dtype} operands need the float32 factor that multiplies back, {shape}"


def forward_mode() -> bool:
    """Whether a level of forward-mode AD is entered, as in ``torch.func.jvp``: an operator would drop the tangents."""
    return torch.autograd.forward_ad._current_level >= 0


def vectorised(named: Named) -> list[str]:
    """Why there is no result under ``torch.vmap``: an operator takes all of a batch."""
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return []
    return [
        f"{name} is mapped over by torch.vmap: pass all of the batch at once"
        for name, x in named
        if isinstance(x, torch.Tensor) and torch._C._functorch.is_batchedtensor(x)
    ]


def wanted(named: Named) -> list[str]:
    """The names of the tensors that want a gradient."""
    if not torch.is_grad_enabled():
        return []
    return [name for name, x in named if isinstance(x, torch.Tensor) and x.requires_grad]


def no_derivatives(named: Named, otherwise: str = "") -> list[str]:
    """Why there is no result for tensors that want a gradient, or tangents; ``otherwise`` ends the sentences."""
    wrong = [f"{name} has {NO_BACKWARD}{otherwise}" for name in wanted(named)]
    return [*wrong, NO_TANGENTS] if forward_mode() else wrong
