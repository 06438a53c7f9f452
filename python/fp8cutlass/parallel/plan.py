"""A call over several ranks, checked and agreed on: who has which tokens, and for which kernel keys are packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .._version import __version__
from ..api.pack import chosen_kernel, pack_kv, packed_alike
from ..cache.packed import PackedKV, key_grid
from ..call.request import request_of
from ..call.settle import settle
from ..choose.target import target
from ..errors import UnsupportedError
from ..manifest import load_manifest
from .agree import Groups, compare
from .shards import Shards, contiguous, zigzag

METHODS = ("gather", "ulysses", "ring")
WORDS = ("contiguous", "zigzag")
SHORT = 8  # a shard of fewer grids than this is packed for a kernel of finer blocks


@dataclass(frozen=True)
class Asked:
    """The arguments of a call that are no tensors. ``held`` are those of ``pack_kv`` and ``attention`` alike."""

    method: str
    shards: str | Shards
    key_shards: str | Shards | None
    causal: bool
    scale: float | None
    return_lse: bool
    kernel: str | None
    out_dtype: torch.dtype | None
    head_groups: int | None
    scaling: str
    precision: str
    smooth_k: bool
    hadamard: bool

    @property
    def held(self) -> dict[str, Any]:
        """What packing settles."""
        return {name: getattr(self, name) for name in ("scaling", "precision", "smooth_k", "hadamard")}


@dataclass(frozen=True)
class Plan:
    """``rows`` and ``keys`` are over the ranks that exchange keys: all, or with two groups those of the outer one, each
    with what its inner group has."""

    asked: Asked
    groups: Groups
    every_row: Shards  # over all ranks
    every_key: Shards
    rows: Shards
    keys: Shards
    cut: Shards  # of ``keys``, as they are packed
    kernel: str
    key_block: int
    forms: list[PackedKV] = field(default_factory=list, compare=False)  # what was packed first, without its tensors

    @property
    def grid(self) -> int:
        """Keys that packed ones can be cut between."""
        return key_grid(self.asked.scaling, self.key_block)

    def pack(self, k: torch.Tensor, v: torch.Tensor) -> PackedKV:
        """Keys and values of a shard for the kernel of all ranks."""
        if not self.forms:
            asked = self.asked
            made: dict[str, Any] = {"is_causal": asked.causal, "out_dtype": asked.out_dtype, "kernel": self.kernel}
            packed = pack_kv(k, v, query_shape=k.shape, **made, **asked.held)
            nothing = {name: x.new_empty(0) for name, x in packed.tensors().items()}
            self.forms.append(replace(packed, **nothing))  # type: ignore[arg-type]
            return packed
        return packed_alike(self.forms[0], k, v)


def plan_of(
    groups: Groups, asked: Asked, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, wrong: Sequence[str]
) -> Plan:
    """Compare the call with those of the other ranks: two exchanges of small objects. ``wrong`` is what this rank has
    found already.

    Raises:
        UnsupportedError: the same on each rank.
    """
    wrong = list(wrong) or _refused(groups, asked, q, k)
    call, facts = None, {}
    if not wrong:
        facts = _facts(groups, asked, q, k)
        given = {"return_lse": asked.return_lse, "out_dtype": asked.out_dtype, **asked.held}
        try:
            call, _ = settle(request_of(q, k, v, None, 0.0, False, asked.scale, True, **given), reshape=False)
        except UnsupportedError as error:
            wrong = list(error.reasons)
    told = compare(groups, facts, wrong)
    lengths: list[Any] = [theirs["local"] for theirs in told]
    problem: list[str] = []
    made: Plan | None = None
    try:
        if call is None:
            raise UnsupportedError("query, key and value cannot be attended to")
        every_row = _shards("shards", asked.shards, [rows for rows, _ in lengths], groups)
        every_key = _shards("key_shards", asked.key_shards or asked.shards, [keys for _, keys in lengths], groups)
        if asked.causal and every_row != every_key:
            raise UnsupportedError("with is_causal=True query and key have the same tokens on each rank")
        made = _made(groups, asked, call, every_row, every_key, q, k)
    except UnsupportedError as error:
        problem = list(error.reasons)
    chosen = (None, None) if made is None else (made.kernel, made.cut)
    compare(groups, dict(zip(("kernel", "shards of packed keys"), chosen, strict=True)), problem)
    if made is None:  # `compare` has raised
        raise UnsupportedError(*problem)
    return made


def _made(
    groups: Groups, asked: Asked, call: Any, every_row: Shards, every_key: Shards, q: torch.Tensor, k: torch.Tensor
) -> Plan:
    rows, keys, heads, kv_heads = every_row, every_key, q.shape[1], k.shape[1]
    if groups.outer is not None:
        inner = groups.inner.size()
        rows, keys = _grouped(every_row, inner), _grouped(every_key, inner)
        heads, kv_heads = heads // inner, kv_heads // inner
    if asked.method == "ulysses":
        heads, kv_heads, most, seen = heads // groups.size, kv_heads // groups.size, rows.tokens, keys.tokens
    else:
        most = max(rows.lengths)
        seen = max(keys.lengths) if asked.method == "ring" else keys.tokens
    sizes = (q.shape[0], heads, most, q.shape[3]), (k.shape[0], kv_heads, seen, k.shape[3])
    right = 0 if asked.causal else None

    def choose(key_block: int) -> tuple[str, int]:
        if asked.kernel is not None:
            return asked.kernel, load_manifest(target(q.device).directory).find(asked.kernel).key_block
        return chosen_kernel(q.device.type, q.device.index, *sizes, call.text(), right, key_block)[:2]

    kernel, block = choose(0)
    grid, cut = key_grid(asked.scaling, block), keys
    if not keys.fits(grid):
        shortest = min((n for n in keys.lengths if n), default=0)
        if shortest < SHORT * grid and asked.kernel is None and asked.scaling == "block":
            kernel, block = choose(128)
        cut = keys.snapped(key_grid(asked.scaling, block))
    return Plan(asked, groups, every_row, every_key, rows, keys, cut, kernel, block)


def _refused(groups: Groups, asked: Asked, q: torch.Tensor, k: torch.Tensor) -> list[str]:
    """What no group serves."""
    wrong: list[str] = []
    if asked.method not in METHODS:
        wrong.append(f"method must be one of {', '.join(METHODS)}, got {asked.method!r}")
    for name in ("shards", "key_shards"):
        given = getattr(asked, name)
        if not isinstance(given, Shards) and given not in (*WORDS, *(() if name == "shards" else (None,))):
            wrong.append(f"{name} must be one of {', '.join(WORDS)}, or Shards, got {given!r}")
    if groups.outer is not None and asked.method == "ulysses":
        wrong.append("of two groups the inner one runs ulysses, and method is that of the outer one: ring or gather")
    if asked.method != "ring":
        if asked.scaling != "block":
            wrong.append(
                f"method={asked.method!r} needs scaling='block', whose descales no shards share, got {asked.scaling!r}"
            )
        if asked.smooth_k:
            wrong.append(f"method={asked.method!r} cannot serve smooth_k, whose mean is one for all keys; 'ring' does")
    ways = groups.inner.size() if groups.outer is not None or asked.method == "ulysses" else 1
    wrong += [
        f"{name} has {x.shape[1]} heads, which the {ways} ranks of ulysses must divide"
        for name, x in (("query", q), ("key", k))
        if x.shape[1] % ways
    ]
    return wrong


def _shards(name: str, asked: str | Shards, lengths: list[int], groups: Groups) -> Shards:
    if isinstance(asked, str):
        if asked == "contiguous":
            return contiguous(lengths)
        inner = groups.inner.size() if groups.outer is not None else 1
        found = zigzag(sum(lengths), groups.size // inner)
        asked, name = found if inner == 1 else found.split(inner), f"{name}='zigzag'"
    if list(asked.lengths) != lengths:
        raise UnsupportedError(f"{name} has {list(asked.lengths)} tokens on the ranks, the tensors have {lengths}")
    return asked


def _grouped(every: Shards, inner: int) -> Shards:
    """With the tokens of each inner group as those of one rank."""
    rows = [every.segments[i : i + inner] for i in range(0, every.ranks, inner)]
    return Shards(tuple(tuple(segment for mine in row for segment in mine) for row in rows))


def _facts(groups: Groups, asked: Asked, q: torch.Tensor, k: torch.Tensor) -> dict[str, object]:
    return {
        "version": __version__,
        "number of ranks": groups.size,
        "query": _but_tokens(q),
        "key": _but_tokens(k),
        "dtype": q.dtype,
        "device": q.device.type,
        **vars(asked),
        "local": (q.shape[2], k.shape[2]),
    }


def _but_tokens(x: torch.Tensor) -> str:
    return f"({', '.join('S' if i == 2 else str(size) for i, size in enumerate(x.shape))})"
