"""Which kernel serves a call of ``attention_with_kvcache``, and why, in words."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..choose.target import Target, target
from ..errors import NoKernelError, UnsupportedError
from ..manifest import Decode, load_manifest
from ..native.decode import kernel_for
from .kvlaunch import rows_of


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

    @property
    def group(self) -> int:
        """Heads of Q that share one of K and V."""
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        """That a unit of work has use for."""
        return rows_of(self.tokens, self.sequences, self.group, self.most_q)


def chosen(problem: KVProblem, at: Target) -> Decode:
    """NoKernelError where there is none."""
    return kernel_for(at.directory, at.arch, problem.head_dim, problem.rows)[0]


def answer(problem: KVProblem, device: torch.device) -> str:
    """The kernel in one line. UnsupportedError with the reasons where there is none."""
    if device.type == "cpu":
        return "the emulator of decode"
    kernel = chosen(problem, _target(device))
    return f"{kernel.id} ({_reason(problem, kernel)})"


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
    lines = [
        f"kernel:    {kernel.id}",
        f"for:       {at.arch}, {at.sm_count} SMs, list in {at.directory}",
        f"why:       {_reason(problem, kernel)}",
        "evidence:  a rule; no time was measured for this choice",
        f"others:    {_others(problem, kernel, at)}",
        f"shape:     {kernel.tile} keys a tile, {kernel.stages} stages, {kernel.threads // 32} warps, "
        f"CTAs an SM: {kernel.ctas_per_sm}, {kernel.smem_bytes:,} bytes of shared memory",
        f"work:      {_work(problem, kernel, at)}",
        *_call(problem),
    ]
    return True, "\n".join([*lines, built])


def _target(device: torch.device, *, shipped: bool = False) -> Target:
    """Names the device as this function's own words do."""
    if device.type != "cuda":
        raise NoKernelError(f"attention_with_kvcache has no kernel for {device.type}")
    return target(device, shipped=shipped)


def _reason(problem: KVProblem, kernel: Decode) -> str:
    per_token = f"{problem.group} head{'s share' if problem.group > 1 else ' has'} a head of K and V"
    tokens = problem.rows // problem.group
    bound = "by max_seqlen_q" if problem.most_q is not None else "on average"
    use = f"{problem.rows} rows: {tokens} query token{'s' if tokens > 1 else ''} a sequence {bound}, {per_token}"
    if kernel.rows >= problem.rows:
        return f"{kernel.rows} rows a unit are the fewest that hold {use}"
    return f"{kernel.rows} rows a unit are the most at head_dim {kernel.head_dim}, the call has {use}"


def _others(problem: KVProblem, kernel: Decode, at: Target) -> str:
    rows = [
        d.rows
        for d in load_manifest(at.directory).decodes
        if (d.arch, d.head_dim) == (at.arch, problem.head_dim) and not d.candidate and d.id != kernel.id
    ]
    return f"units of {', '.join(map(str, sorted(rows)))} rows" if rows else "none of this head_dim"


def _work(problem: KVProblem, kernel: Decode, at: Target) -> str:
    ctas = at.sm_count * kernel.ctas_per_sm
    times = -(-problem.rows // kernel.rows)
    read = "once" if times == 1 else f"{times} times"
    by = (
        "before, by its plan"
        if problem.planned
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
