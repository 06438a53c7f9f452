"""The command of masks, and its table."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .options import commit_option, need_card, out_option, results_folder, stop
from .report import heading, table
from .results import FAILED, WRONG
from .walk_commands import budget_option, head_dim_option, quick_option

if TYPE_CHECKING:
    from .masks import MaskTime

HEAD_DIMS = (64, 128)


def _us(row: MaskTime | None) -> str:
    return "" if row is None or row.median_us is None else f"{row.median_us:.1f}"


def _ratio(one: MaskTime | None, other: MaskTime | None, share: float | None = 1.0) -> str:
    first, second = (None if row is None else row.median_us for row in (one, other))
    return f"{first / second / share:.2f}" if first and second and share else ""


def markdown(stamp: Mapping[str, str], rows: Sequence[MaskTime]) -> str:
    """A row for each problem: whole calls from bf16 beside those without a mask and beside FlexAttention."""
    from .masks import DENSE, FLEX, OURS, PACK, SDPA, SEEN

    by_problem: dict[tuple[object, ...], dict[str, MaskTime]] = {}
    for row in rows:
        key = (row.head_dim, row.mask, row.batch, row.rows, row.keys)
        by_problem.setdefault(key, {})[row.contender] = row
    lines = [*heading("Masks", stamp), ""]
    lines += [
        f"`{OURS}`: the whole of `attention` from bf16 with a `BlockMask`; `{SEEN}`: with a boolean tensor, packed in",
        f"the call; `{DENSE}`: without a mask. `of its share`: the time over that without a mask times the share of",
        f"visited tiles. `{PACK}`: a boolean tensor to lists and bits. `{FLEX}`: compiled, bf16; ours wins above 1.",
        f"With a bias ours is the kernel that adds one, and `{SDPA}` torch's attention with the bias in bf16.",
        "",
    ]
    header = ["head_dim", "mask", "rows x keys", "visited", f"{OURS}, us", "useful TFLOPS", f"{DENSE}, us"]
    header += ["of its share", f"{SEEN}, us", f"{PACK}, GB/s", f"{FLEX}, us", f"{FLEX} / ours", f"{SDPA} / ours"]
    body = []
    for (head_dim, mask, batch, of_rows, keys), cell in by_problem.items():
        ours, packing = cell.get(OURS), cell.get(PACK)
        speed = "" if packing is None or packing.gbytes_s is None else f"{packing.gbytes_s:.0f}"
        visited, tflops = (None, None) if ours is None else (ours.visited, ours.tflops)
        body.append([
            str(head_dim), str(mask), f"{batch} x {of_rows} x {keys}", "" if visited is None else f"{visited:.1%}",
            _us(ours), "" if tflops is None else f"{tflops:.0f}", _us(cell.get(DENSE)),
            _ratio(ours, cell.get(DENSE), visited), _us(cell.get(SEEN)), speed, _us(cell.get(FLEX)),
            _ratio(cell.get(FLEX), ours), _ratio(cell.get(SDPA), ours),
        ])  # fmt: skip
    lines += table(header, body)
    reasons = dict.fromkeys(
        f"* {row.contender} on {row.mask}, head_dim {row.head_dim}: {row.status}: {row.reason}"
        for row in rows
        if row.median_us is None
    )
    return "\n".join([*lines, *([""] if reasons else []), *reasons]) + "\n"


@click.command()
@head_dim_option(HEAD_DIMS)
@click.option("--mask", "names", multiple=True, help="Only masks with this text in their name; repeat for more.")
@click.option("--no-peers", is_flag=True, help="Without FlexAttention and torch's attention.")
@click.option("--tiny", is_flag=True, help="Tiny sizes, without a card on the CPU: does it run? Needs --out.")
@quick_option
@budget_option
@out_option
@commit_option
def masks(
    head_dims: tuple[str, ...],
    names: tuple[str, ...],
    no_peers: bool,
    tiny: bool,
    quick: bool,
    budget: float,
    out: Path | None,
    commit: str,
) -> None:
    """Time calls with masks against those without, and against FlexAttention in bf16; write CSV and table.

    Ends with 2 where nothing can be measured, with 1 where a contender failed, a result was wrong or time ran out.
    """
    if tiny and out is None:
        stop("--tiny measures nothing that is worth keeping beside results: name a folder with --out")
    if not tiny:
        need_card("timing masks", "; `masks --tiny` runs anywhere")
    import torch

    from . import machine
    from .grid import QUICK, Settings
    from .mask_problems import problems
    from .masks import CONTENDERS, PEERS, record

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = problems([int(d) for d in head_dims] or list(HEAD_DIMS), tiny)
    wanted = [p for p in found if not names or any(name in p.name for name in names)]
    if not wanted:
        stop(f"no mask has {' or '.join(map(repr, names))} in its name; there are {', '.join(p.name for p in found)}")
    stamp = machine.stamp(commit)
    path = results_folder(out, stamp) / "masks.csv"
    chosen = [name for name in CONTENDERS if not (no_peers and name in PEERS)]
    rows, left = record(
        path, stamp, wanted, chosen, device, QUICK if quick or tiny else Settings(), budget, click.echo
    )  # fmt: skip
    text = markdown(stamp, rows)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    click.echo(text)
    click.echo(f"{len(rows)} rows: {path}")
    sys.exit(1 if left or any(row.status in (FAILED, WRONG) for row in rows) else 0)
