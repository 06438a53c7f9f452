"""Which kernel serves a call of ``attention_with_kvcache``, and why, in words."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..choose.target import Target, target
from ..errors import NoKernelError, UnsupportedError
from ..manifest import Decode, load_manifest
from .kvlaunch import kernel_of, rows_of
from .kvprefill import LEAST, Chunks, Prefill, prefill_for


@dataclass(frozen=True)
class KVProblem:
    """What of a call decides, and what else is told of it."""

    sequences: int
    tokens: int  # of q
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    most_q: int | None = None  # an upper bound of the tokens of a sequence
    left: int = -1
    right: int = 0
    splits: int = 0
    inline: bool = True  # whether descales are in the pages
    planned: bool = False  # whether plan_attention has cut the work
    room: int | None = None  # keys that a row of the page table has room for
    dtype: str = "bf16"  # of q
    softcap: bool = False
    sinks: bool = False

    @property
    def group(self) -> int:
        """Heads of Q that share one of K and V."""
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        """That a unit of work has use for, where all is decode."""
        return rows_of(self.tokens, self.sequences, self.group, self.most_q)

    @property
    def chunks(self) -> Chunks:
        return Chunks(
            self.tokens, self.sequences, self.most_q, self.room, self.kv_heads, self.head_dim, self.dtype, self.left,
            self.right, self.softcap, self.sinks, self.splits,
        )  # fmt: skip


def chosen(problem: KVProblem, at: Target) -> Decode:
    """NoKernelError where there is none."""
    p = problem
    routed = prefill_for(at, p.chunks)[0] is not None
    return kernel_of(at, p.head_dim, p.heads, p.kv_heads, p.tokens, p.sequences, p.most_q, routed)[0]


def answer(problem: KVProblem, device: torch.device) -> str:
    """The kernel in one line. UnsupportedError with the reasons where there is none."""
    if device.type == "cpu":
        return "the emulator of decode"
    at = _target(device)
    kernel, (part, _) = chosen(problem, at), prefill_for(at, problem.chunks)
    if part is not None:
        return f"{part.kernel.id} for sequences of {LEAST} queries and more, {kernel.id} for the others"
    return f"{kernel.id} ({_reason(problem, kernel, at)})"


def describe(problem: KVProblem, device: torch.device) -> tuple[bool, str]:
    """Whether some kernel serves the problem, built or not; and the lines of ``explain_kvcache``."""
    if device.type == "cpu":
        lines = ["kernel:    the emulator of decode, for CPU tensors", *_call(problem), *_parts(problem)]
        return True, "\n".join(lines)
    built = "built: yes"
    try:
        at = _target(device)
        kernel = chosen(problem, at)
    except UnsupportedError as error:
        built = "built: no; " + "; ".join(error.reasons)
        try:
            at = _target(device, shipped=True)
            kernel = chosen(problem, at)
        except UnsupportedError as refused:
            return False, "no kernel: " + "\n           ".join(dict.fromkeys((*error.reasons, *refused.reasons)))
    part, why = prefill_for(at, problem.chunks)
    lines = [
        f"kernel:    {kernel.id}",
        f"for:       {at.arch}, {at.sm_count} SMs, list in {at.directory}",
        f"prefill:   {_prefill(problem, part) if part else 'by the same kernel: ' + why}",
        f"why:       {_reason(problem, kernel, at, part is not None)}",
        "evidence:  a rule; no time was measured for this choice",
        f"others:    {_others(problem, kernel, at)}",
        f"shape:     {kernel.tile} keys a tile, {kernel.stages} stages, {kernel.threads // 32} warps, "
        f"CTAs an SM: {kernel.ctas_per_sm}, {kernel.smem_bytes:,} bytes of shared memory",
        f"work:      {_work(problem, kernel, at, part is not None)}",
        *_call(problem),
    ]
    return True, "\n".join([*lines, built])


def _target(device: torch.device, *, shipped: bool = False) -> Target:
    """Names the device as this function's own words do."""
    if device.type != "cuda":
        raise NoKernelError(f"attention_with_kvcache has no kernel for {device.type}")
    return target(device, shipped=shipped)


def _prefill(problem: KVProblem, part: Prefill) -> str:
    size = 2 * part.capacity * problem.kv_heads * problem.head_dim
    return (
        f"{part.kernel.id}, for sequences of {LEAST} queries and more; at most {part.most} of them, "
        f"{part.capacity:,} keys in all, whose K and V are copied to {size / (1 << 20):,.1f} MiB"
    )


def _reason(problem: KVProblem, kernel: Decode, at: Target, routed: bool = False) -> str:
    fewer = any(d.rows > kernel.rows for d in _same_head_dim(problem, at))
    per_token = f"{problem.group} head{'s share' if problem.group > 1 else ' has'} a head of K and V"
    if routed:
        return f"{kernel.rows} rows a unit are the fewest that hold a token of what is left: {per_token}"
    tokens = problem.rows // problem.group
    bound = "by max_seqlen_q" if problem.most_q is not None else "on average"
    use = f"{problem.rows} rows: {tokens} query token{'s' if tokens > 1 else ''} a sequence {bound}, {per_token}"
    if kernel.rows >= problem.rows:
        return f"{kernel.rows} rows a unit are the fewest that hold {use}"
    if fewer:
        return (
            f"{kernel.rows} rows a unit, as there are few units: {problem.sequences} sequences on {problem.kv_heads} "
            f"heads of K and V. The call has {use}"
        )
    return f"{kernel.rows} rows a unit are the most at head_dim {kernel.head_dim}, the call has {use}"


def _same_head_dim(problem: KVProblem, at: Target) -> list[Decode]:
    return [
        d
        for d in load_manifest(at.directory).decodes
        if (d.arch, d.head_dim) == (at.arch, problem.head_dim) and not d.candidate
    ]


def _others(problem: KVProblem, kernel: Decode, at: Target) -> str:
    rows = [d.rows for d in _same_head_dim(problem, at) if d.id != kernel.id]
    return f"units of {', '.join(map(str, sorted(rows)))} rows" if rows else "none of this head_dim"


def _work(problem: KVProblem, kernel: Decode, at: Target, routed: bool) -> str:
    ctas = at.sm_count * kernel.ctas_per_sm
    times = 1 if routed else -(-problem.rows // kernel.rows)
    read = "once" if times == 1 else f"{times} times"
    read = f"{read} for each token" if routed else read
    by = (
        "before, by its plan"
        if problem.planned and not routed
        else "first, by a kernel of its own; plan_attention does it once a step"
    )
    if problem.splits == 1:
        return f"{ctas} CTAs take whole units (num_splits=1), dealt {by}; keys are read {read}"
    return f"{ctas} CTAs take equal shares of all units, cut on the device {by}; keys are read {read}"


def _call(problem: KVProblem) -> list[str]:
    ends = ("all" if end < 0 else str(end) for end in (problem.left, problem.right))
    where = "in the pages" if problem.inline else "one a head, beside the cache"
    return [
        f"cache:     pages of {problem.page_size} tokens, descales {where}",
        "mask:      {} keys before and {} after a row's own".format(*ends),
    ]


def _parts(problem: KVProblem) -> list[str]:
    parts = max(problem.splits, 1)
    by = ", by its plan" if problem.planned else ""
    return [f"work:      sequence by sequence, keys in {parts} part{'s' if parts > 1 else ''}{by}"]
