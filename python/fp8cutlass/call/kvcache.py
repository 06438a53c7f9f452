"""Attention over a paged cache from tensors to its outputs. The CPU runs the specification, sequence by sequence.

What only the device knows is clamped, here by :func:`clamped`, on a card by the kernels: lengths to what the page table
holds, page numbers to the cache, ends of queries to their tensor. So nothing outside the tensors is read or written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..cache.checks import limited
from ..choose.target import Target, target
from ..dtypes import widened
from ..emulator.decode import Keys, decode
from ..errors import NoKernelError
from ..quant.prepare import prepared
from .kvlaunch import launch, unserved

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class KVCall:
    """What ``attention_with_kvcache`` has checked. Keys to be appended are in the pages already."""

    q: torch.Tensor  # (T, H, D), bf16 or fp16: the tokens of all sequences
    k: torch.Tensor  # (pages, page_size, Hkv, D) uint8, the bytes of e4m3, any strides
    v: torch.Tensor
    # Float32: (pages, page_size, Hkv) of the pages; or (), (1,), (Hkv,) or (sequences, Hkv); or a number.
    k_descale: torch.Tensor | float
    v_descale: torch.Tensor | float  # (pages, Hkv) where K's is of the pages; or as K's
    page_table: torch.Tensor | None  # (sequences, most pages) int32; None: page s is sequence s
    used: torch.Tensor  # (sequences,) int32: keys of each
    cu_q: torch.Tensor | None  # (sequences + 1,) int32; None: all sequences have as many tokens
    sinks: torch.Tensor | None  # (H,) float32, bf16 or fp16
    mean: torch.Tensor | None  # (Hkv, D) float32, what keys lack
    scale: float
    left: int  # keys before a row's own that it sees, -1 for all
    right: int
    softcap: float
    splits: int  # 0: the kernel chooses
    hadamard: bool
    return_lse: bool
    most_q: int | None = None  # upper bound of the tokens of a sequence, to choose a kernel by
    work: torch.Tensor | None = None  # of a plan for such a call with this most_q

    @property
    def inline(self) -> bool:
        """Whether descales are in the pages."""
        return isinstance(self.k_descale, torch.Tensor) and self.k_descale.dim() == 3

    @property
    def columns(self) -> int:
        """Pages of a row of the table."""
        return 1 if self.page_table is None else self.page_table.shape[1]


def clamped(call: KVCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Page table, lengths and ends of the queries, with numbers that lead nowhere outside the call's tensors."""
    last, sequences, tokens = call.k.shape[0] - 1, call.used.shape[0], call.q.shape[0]
    table, ends = call.page_table, call.cu_q
    if table is None:
        table = torch.arange(sequences, device=call.used.device)[:, None]
    if ends is None:
        ends = torch.arange(sequences + 1, device=call.used.device) * (tokens // max(sequences, 1))
    ends = torch.cummax(ends.clamp(0, tokens), 0).values
    return table.clamp(0, last), call.used.clamp(0, call.columns * call.k.shape[1]), ends


def refuse_device(device: torch.device, head_dim: int) -> None:
    """NoKernelError where no kernel serves the device."""
    reasons = unserved(device.type, device.index, head_dim)
    if reasons:
        raise NoKernelError(*reasons)


def run(call: KVCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Out (T, H, D) and LSE (H, T): 0 and -inf where a token belongs to no sequence; the LSE (0,) where it is not
    wanted."""
    tokens, heads, head_dim = call.q.shape
    refuse_device(call.q.device, head_dim)
    nothing = not (tokens and call.used.shape[0] and call.columns)
    if call.q.is_cuda and not nothing:
        return on_card(call, target(call.q.device))
    out = torch.zeros_like(call.q, memory_format=torch.contiguous_format)
    lse = call.q.new_full((heads, tokens), -torch.inf, dtype=torch.float32)
    table, used, cu_q = clamped(call)
    ends, lengths = ([], []) if nothing else (cu_q.tolist(), used.tolist())
    for s, keys in enumerate(lengths):
        of = slice(ends[s], ends[s + 1])
        if of.start < of.stop and keys:
            result, log_sum = _one(call, call.q[of], gathered(call, s, table[s], keys))
            out[of], lse[:, of] = result.to(out.dtype), log_sum.t()
    return out, lse if call.return_lse else lse.new_empty(0)


def on_card(call: KVCall, at: Target) -> tuple[torch.Tensor, torch.Tensor]:
    """``run`` by the kernels of a target. They clamp numbers themselves."""
    q, shift = turned(call, call.q)
    sinks = call.sinks
    if sinks is not None and shift is not None:
        sinks = (sinks - shift).t().contiguous()
    out, lse = launch(
        at, q, call.k, call.v, (call.k_descale, call.v_descale), call.page_table, call.used, call.cu_q, sinks,
        most_q=call.most_q, scale=call.scale, left=call.left, right=call.right, softcap=call.softcap,
        share=call.splits != 1, return_lse=call.return_lse, work=call.work,
    )  # fmt: skip
    if lse is None:
        return out.to(call.q.dtype), out.new_empty(0, dtype=torch.float32)
    return out.to(call.q.dtype), lse if shift is None else lse + shift.t()


def turned(call: KVCall, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Q (T, H, D) as the scores need it, and what each logit lacks, (T, H) or None."""
    shift = None
    if call.mean is not None:
        shared = call.mean.repeat_interleave(q.shape[1] // call.mean.shape[0], 0)
        shift = (q.float() * shared).sum(-1) * call.scale
    q = prepared(q.transpose(0, 1)[None], None, head_dim=q.shape[2], hadamard=call.hadamard)[0].transpose(0, 1)
    return q, shift


def _one(call: KVCall, q: torch.Tensor, keys: Keys) -> tuple[torch.Tensor, torch.Tensor]:
    q, shift = turned(call, q)
    out, lse = decode(
        q, keys, scale=call.scale, left=call.left, right=call.right, softcap=call.softcap,
        sinks=None if call.sinks is None else call.sinks.float(), shift=shift, splits=max(call.splits, 1),
    )  # fmt: skip
    return out.to(q.dtype), lse


def gathered(call: KVCall, s: int, table: torch.Tensor, keys: int) -> Keys:
    """The keys of sequence s, from its pages in ``table``: what lies behind the last of them is not read."""
    size, heads = call.k.shape[1:3]
    at = table[: -(-keys // size)].long()
    k, v = (widened(x[at].flatten(0, 1)[:keys].view(torch.uint8).view(E4M3)).transpose(0, 1) for x in (call.k, call.v))
    inside = (call.k_descale, call.v_descale)
    if call.inline and isinstance(inside[0], torch.Tensor) and isinstance(inside[1], torch.Tensor):
        k_descale = inside[0][at].flatten(0, 1)[:keys].t()
        return Keys(k, v, k_descale, inside[1][at].repeat_interleave(size, 0)[:keys].t())
    static = (torch.as_tensor(x, dtype=torch.float32, device=k.device) for x in inside)
    given = (limited(x[s] if x.dim() == 2 else x).expand(heads)[:, None] for x in static)
    return Keys(k, v, *given)
