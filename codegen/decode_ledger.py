"""What became of the declared shapes of decode: the end of the ledger, and why one kernel serves a call."""

from __future__ import annotations

from codegen.arch import TARGETS
from codegen.boxes import Box, boxes
from codegen.decode import (
    ALL,
    CTAS,
    DECLARED,
    HEAD_DIMS,
    KEYS,
    ROWS,
    RULES,
    WARPS_TRIED,
    WIDE_KEYS,
    WIDE_ROWS,
    Decode,
    emitted_as,
    profile_of,
    refusal,
)

AXES = ("target", "head_dim", "rows", "keys", "ctas", "warps")
VALUES = (tuple(TARGETS), HEAD_DIMS, (*ROWS, WIDE_ROWS), (*KEYS, WIDE_KEYS), CTAS, WARPS_TRIED)
CANDIDATE = "DECODE-CANDIDATE"
CANDIDATE_WHY = "legal; no measurement says that it is faster, and `--candidates` builds it to be timed"


def verdict(d: Decode) -> tuple[str, str]:
    """The rule that a declared shape is rejected by, and its message; ("", id) for an emitted one."""
    if (kernel := emitted_as(d)) is not None:
        return "", kernel.id
    broken = refusal(d)
    return (CANDIDATE, _emitted(d)) if broken is None else (broken[0].name, broken[1])


def _emitted(d: Decode) -> str:
    kernel = next(x for x in ALL if (x.target, x.head_dim, x.rows) == (d.target, d.head_dim, d.rows))
    return f"emitted is {_shape(kernel.slice, kernel.ctas_per_sm, kernel.warps)}"


def _shape(keys: int, ctas: int, warps: int) -> str:
    return f"k{keys}c{ctas}w{warps}"


def rows_of_ledger() -> list[tuple[str, str, str, int]]:
    """(rule, where, message, count): each stands for a full product of values."""
    by: dict[tuple[str, str], list[Decode]] = {}
    for d in DECLARED:
        rule, message = verdict(d)
        if rule:
            by.setdefault((rule, message), []).append(d)
    found = []
    for (rule, message), members in by.items():
        points = [tuple(getattr(d, axis) for axis in AXES) for d in members]
        for box in boxes(points, AXES):
            count = 1
            for values in box.values():
                count *= len(values)
            found.append((rule, _where(box), message, count))
    return found


def _where(box: Box) -> str:
    parts = [
        f"{axis}={'|'.join(map(str, box[axis]))}"
        for axis, values in zip(AXES, VALUES, strict=True)
        if len(box[axis]) < len(values)
    ]
    return " ".join(parts) or "everything"


def render() -> str:
    """The ledger's last section. Points: target, head_dim, rows of a unit, keys of a slice, CTAs an SM, warps."""
    rows = rows_of_ledger()
    lines = [
        "",
        f"## decode: declared {len(DECLARED):,} = emitted {len(ALL):,} + rejected {sum(r[3] for r in rows):,}",
    ]
    whys = {rule.name: rule.why for rule in RULES} | {CANDIDATE: CANDIDATE_WHY}
    for rule, why in whys.items():
        mine = sorted(row for row in rows if row[0] == rule)
        lines += ["", f"### {rule} ({sum(r[3] for r in mine):,}): {why}"]
        lines += [f"{count:6,}  {where}: {message}" for _, where, message, count in mine]
    return "\n".join(lines) + "\n"


def _few(own: list[Decode], kernel: Decode, rows: int) -> list[str]:
    smaller = [d for d in own if d.rows < kernel.rows]
    if not smaller or 2 * rows > kernel.rows:
        return []
    return [f"few      {max(smaller).id}, where sequences times heads of K and V are fewer than SMs"]


def explain(target: str, head_dim: int, rows: int) -> str:
    """Which kernel a call with so many rows a unit gets, why, and what became of the other shapes."""
    own = [d for d in ALL if (d.target, d.head_dim) == (target, head_dim)]
    if not own:
        return f"kernel   none: decode has head_dim {', '.join(map(str, HEAD_DIMS))}, got {head_dim}"
    enough = [d for d in own if d.rows >= rows]
    kernel = min(enough) if enough else max(own)
    each, of = (kernel.key_tile_bytes, kernel.warps // 4) if kernel.wide else (kernel.slot_bytes, kernel.warps)
    more = kernel.smem_bytes - kernel.stages * of * each
    takes = "a warpgroup" if kernel.wide else "a warp"
    because = (
        f"the fewest rows a unit that hold {rows}"
        if enough
        else f"the most rows a unit; keys are read {-(-rows // kernel.rows)} times for {rows}"
    )
    lines = [
        f"problem  {target} ({', '.join(TARGETS[target].cards)}), head_dim {head_dim}, {rows} rows: query tokens of a "
        "sequence times heads that share a head of K and V",
        f"kernel   {kernel.id}",
        f"because  {because}",
        "others   " + ", ".join(f"{d.rows} rows" for d in own if d != kernel),
        f"shape    {kernel.tile} keys a tile, {kernel.slice} {takes}; {kernel.stages} stages of {of} x "
        f"{each:,} bytes and {more:,} more: {kernel.smem_bytes:,} of shared memory",
        f"CTAs     {kernel.ctas_per_sm} an SM, {kernel.threads} threads, about {kernel.registers} registers a thread",
        *_few(own, kernel, rows),
        f"profile  {profile_of(kernel)}",
        "evidence rule, no measurement",
        "",
        "other shapes: none" if kernel.wide else "other shapes:",
    ]
    for d in DECLARED:
        if (d.target, d.head_dim, d.rows) == (target, head_dim, kernel.rows) and emitted_as(d) is None:
            rule, message = verdict(d)
            lines.append(f"  {_shape(d.keys, d.ctas, d.warps)} {rule}: {message}")
    return "\n".join(lines)
