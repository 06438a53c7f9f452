"""How the work of a step is cut, once for all layers: what ``plan_attention`` returns, and when it serves a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..choose.target import target
from ..errors import UnsupportedError
from ..native.decode import cut, work_bytes
from .kvlaunch import kernel_of
from .operators import register

# What a plan and a call have in common, and what an error calls it.
SHARED = {
    "device": "on",
    "sequences": "sequences",
    "tokens": "query tokens",
    "heads": "heads of q",
    "kv_heads": "heads of the cache",
    "head_dim": "head_dim",
    "room": "keys that a row of page_table has room for",
    "left": "keys that a row sees before its own",
    "right": "keys that a row sees after its own",
    "whole": "num_splits=1",
}


class Form(NamedTuple):
    """What of a call its plan depends on, lengths aside."""

    device: torch.device
    sequences: int
    tokens: int  # of q
    heads: int
    kv_heads: int
    head_dim: int
    room: int  # keys that a row of the page table has room for
    left: int  # keys before a row's own that it sees, -1 for all
    right: int
    whole: bool  # num_splits=1: no sequence is cut


@dataclass(frozen=True)
class AttentionPlan:
    """How the work of calls of one form and of one set of lengths is cut. ``plan_attention`` makes it.

    It lies on the device, in memory of its own. Calls that share it run one after the other.
    """

    form: Form
    max_seqlen_q: int | None
    work: torch.Tensor  # uint8; empty where torch operations attend
    lengths: torch.Tensor | None  # a copy where values are looked at: keys of each sequence

    def __repr__(self) -> str:
        f = self.form
        return (
            f"AttentionPlan({f.sequences} sequences, {f.tokens} query tokens, heads {f.heads} on {f.kv_heads}, "
            f"head_dim {f.head_dim}, {self.work.numel():,} bytes on {f.device})"
        )


def differs(plan: object, form: Form, used: torch.Tensor | None) -> list[str]:
    """Why a plan does not serve a call of ``form``, whose keys are ``used`` where they can be looked at."""
    if not isinstance(plan, AttentionPlan):
        return [f"plan must be what plan_attention returns, got {type(plan).__name__}"]
    wrong = [
        f"plan was made for {words} {getattr(plan.form, name)}, the call has {getattr(form, name)}"
        for name, words in SHARED.items()
        if getattr(plan.form, name) != getattr(form, name)
    ]
    if not wrong and used is not None and plan.lengths is not None and not torch.equal(plan.lengths, used):
        wrong.append(f"plan was made for {plan.lengths.tolist()} keys, the call has {used.tolist()}")
    return wrong


def planned(form: Form, lengths: torch.Tensor, cu_q: torch.Tensor | None, max_seqlen_q: int | None) -> torch.Tensor:
    """``AttentionPlan.work``."""
    return _operator(
        lengths, cu_q, form.tokens, form.room, form.heads, form.kv_heads, form.head_dim, form.left, form.right,
        form.whole, max_seqlen_q,
    )  # fmt: skip


def _is_empty(lengths: torch.Tensor, tokens: int, room: int) -> bool:
    return not (lengths.is_cuda and lengths.shape[0] and tokens and room)


def _plan(
    lengths: torch.Tensor,
    cu_q: torch.Tensor | None,
    tokens: int,
    room: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    left: int,
    right: int,
    whole: bool,
    most_q: int | None,
) -> torch.Tensor:
    if _is_empty(lengths, tokens, room):
        return lengths.new_empty(0, dtype=torch.uint8)
    at = target(lengths.device)
    kernel, number = kernel_of(at, head_dim, heads, kv_heads, tokens, lengths.shape[0], most_q)
    work = cut(
        kernel, number, at.sm_count, lengths.contiguous(), None if cu_q is None else cu_q.contiguous(), tokens=tokens,
        most_keys=room, heads=heads, kv_heads=kv_heads, left=left, right=right, share=not whole,
    )  # fmt: skip
    if work.memory is None:
        raise UnsupportedError("the work was not cut")
    return work.memory


def _fake(
    lengths: torch.Tensor, cu_q: object, tokens: int, room: int, heads: int, kv_heads: int, head_dim: int, *rest: object
) -> torch.Tensor:
    if _is_empty(lengths, tokens, room):
        return lengths.new_empty(0, dtype=torch.uint8)
    at, most_q = target(lengths.device), rest[-1]
    bound = most_q if isinstance(most_q, int) else None
    kernel, _ = kernel_of(at, head_dim, heads, kv_heads, tokens, lengths.shape[0], bound)
    return lengths.new_empty(work_bytes(kernel, at.sm_count * kernel.ctas_per_sm), dtype=torch.uint8)


_operator = register(
    "plan_attention(Tensor lengths, Tensor? cu_seqlens_q, SymInt tokens, SymInt room, int heads, int kv_heads, "
    "int head_dim, int left, int right, bool whole, SymInt? max_seqlen_q) -> Tensor",
    _plan,
    _fake,
)
