"""Runs compiled forward kernels, and those that make operands, on small problems under compute-sanitizer. Needs a card
and a built extension; the planted bugs also nvcc.

    python scripts/sanitize.py                          # four tools, all kernels
    python scripts/sanitize.py --tool racecheck --each --seconds 60 --jobs 4
    python scripts/sanitize.py --planted                # is each tool able to see its kind of bug here?
    python scripts/sanitize.py --run                    # the problems alone, without a sanitizer

A subset is chosen by --profile, --only and --each; --seconds ends a tool's run early, which is said with what was
left out. racecheck found a descale overwritten by the next tile's copy while the softmax still read it, which no result
ever showed.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from scripts import toolchain  # noqa: E402  (needs the path above when run as a file)
from scripts.build_extension import PROFILES  # noqa: E402

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
KERNELS = "kns=sm89_,kns=sm90a_,kns=pack_d,kns=planning"  # parts of their names
CLUSTERS = {"solo": 1, "split2": 2, "split4": 4}
FOUND = 9  # exit status of compute-sanitizer when it has something to say
PLANTED = ROOT / "tests" / "planted"
PROGRAM_SECONDS = 120  # a planted barrier error may also hang
_DONE = re.compile(r"^(\d+) launches of (\d+) kernels of (\d+) kinds, (\d+) left out$", re.M)
_KIND = re.compile(r"^no kernel of its kind: (\S+)$", re.M)


@dataclass(frozen=True)
class Outcome:
    """What a tool said: clean, found (its words in ``text``), or error where it did not run through. ``kernels`` ran
    ``launches`` times, ``left_out`` did not for want of time. ``kinds`` is how many kinds of kernel ran; of each of the
    others a kernel is named."""

    tool: str
    status: str
    kernels: int = 0
    launches: int = 0
    left_out: int = 0
    kinds: int = 0
    kinds_left_out: tuple[str, ...] = ()
    seconds: float = 0.0
    text: str = ""


def problems(
    tile_m: int, tile_n: int, stages: int, cluster: str, unrolled: Sequence[tuple[int, int]]
) -> tuple[tuple[int, int, int, int], ...]:
    """Heads, KV heads, queries, keys: every slot of the pipeline used more than twice by every CTA, with a tail; more
    items than CTAs, of more than one tile; one full tile; and more items than CTAs for each form of ``unrolled``."""
    share = (2 * stages + 1) * tile_n * CLUSTERS[cluster]
    forms = [(300, 150, 70, most - 5) for _, most in unrolled]
    return (2, 1, tile_m + 6, share + 37), (600, 300, 70, tile_n + 6), (1, 1, tile_m, tile_n), *forms


def chosen(profile: str, only: Sequence[str], each: bool) -> list[Any]:
    """The built variants and pack kernels of a selection: ``only`` these ids, or one of ``each`` head_dim, schedule,
    form of its loop and cluster; the first of every kind first, so that what time leaves out is more of the same."""
    gpu = importlib.import_module("gpu")
    profiles = PROFILES[: PROFILES.index(profile) + 1]
    forward = [v for kind in ("fwd", "window", "ragged") for v in gpu.built_variants(kind)]
    variants = [v for v in forward if v.profile in profiles and (not only or v.id in only)]
    packs = [p for p in gpu.built_packs() if p["profile"] in profiles and (not only or p["id"] in only)]
    first = {(v.family, v.kind, v.head_dim, v.schedule, gpu.loop_form(v), v.cluster): v for v in reversed(variants)}
    first_packs = {(p["head_dim"], p["key_block"]): p for p in reversed(packs)}
    leading = [*first_packs.values(), *first.values()]
    ids = {_id(k) for k in leading}
    return leading if each else leading + [k for k in (*packs, *variants) if _id(k) not in ids]


def _id(kernel: Any) -> str:
    return str(kernel["id"] if isinstance(kernel, dict) else kernel.id)


def run_problems(kernels: Sequence[Any], seconds: float | None) -> tuple[int, int]:
    """Launches the kernels one after the other; returns launches, and kernels that were not begun in time."""
    import torch

    started, launched = time.monotonic(), 0
    for number, kernel in enumerate(kernels):
        if seconds is not None and time.monotonic() - started >= seconds:
            return launched, len(kernels) - number
        for _ in _launches(kernel):
            torch.cuda.synchronize()
            launched += 1
    return launched, 0


def _launches(kernel: Any) -> Iterator[None]:
    if isinstance(kernel, dict):
        return run_pack(kernel)
    return {"window": run_window, "ragged": run_ragged}.get(kernel.kind, run_variant)(kernel)


def run_part(profile: str, only: Sequence[str], each: bool, part: str, seconds: float | None) -> None:
    """Runs the part "number/parts" of a selection, and says what ``sanitise`` reads."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "python")]
    number, parts = map(int, part.split("/"))
    kernels = chosen(profile, only, each)[number::parts]
    launches, left = run_problems(kernels, seconds)
    kinds = {_id(k) for k in chosen(profile, only, True)}
    ran, late = kernels[: len(kernels) - left], kernels[len(kernels) - left :]
    for kernel in late:
        if _id(kernel) in kinds:
            print(f"no kernel of its kind: {_id(kernel)}")
    reached = sum(_id(kernel) in kinds for kernel in ran)
    print(f"{launches} launches of {len(ran)} kernels of {reached} kinds, {left} left out")


def run_variant(variant: Any) -> Iterator[None]:
    """Launches a forward kernel, once a turn. Operands are made on the CPU, so that initcheck sees them arrive."""
    import torch

    gpu, reference = importlib.import_module("gpu"), importlib.import_module("reference")
    for heads, kv_heads, seqlen_q, seqlen_k in problems(
        variant.tile_m, variant.tile_n, variant.stages, variant.cluster, variant.unrolled
    ):
        q = reference.randn(1, heads, seqlen_q, variant.head_dim, seed=1)
        k, v = (reference.randn(1, kv_heads, seqlen_k, variant.head_dim, seed=s) for s in (2, 3))
        offset = seqlen_k - seqlen_q if variant.causal else 0
        out_descale = torch.full((1,), 0.02) if variant.out == "e4m3" else None
        for scaling in variant.scalings:
            call = gpu.call_of(
                reference.operands_of(variant, q, k, v, scaling),
                variant,
                scale=0.125,
                scaling=scaling,
                causal_offset=offset,
                out_descale=out_descale,
            )
            gpu.run_from_host(call, variant)
            yield
        if variant.quantises_q:
            shapes = (heads, seqlen_q), (kv_heads, seqlen_k), (kv_heads, seqlen_k)
            halves = [reference.randn(1, *x, variant.head_dim, seed=s, device="cuda") for s, x in enumerate(shapes)]
            on_card = {"causal_offset": offset, "out_descale": gpu.out_descale_for(variant)}
            for hand_over in (False, True):
                gpu.attend_source(variant, *halves, **on_card, hand_over=hand_over)
                yield


def run_window(variant: Any) -> Iterator[None]:
    """Launches a kernel of windows, once a turn: bands that begin and end inside tiles, or hide whole rows."""
    import torch

    gpu, launch = importlib.import_module("gpu"), importlib.import_module("fp8cutlass.launch")
    manifest = gpu.built_manifest()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[variant.out]
    for heads, kv_heads, rows, keys in problems(variant.tile_m, variant.tile_n, variant.stages, variant.cluster, ()):
        q, k, v = (
            torch.randn(1, h, tokens, variant.head_dim).to(dtype).cuda()
            for h, tokens in ((heads, rows), (kv_heads, keys), (kv_heads, keys))
        )
        options = (None, dtype, "block", "fast", True, 0, 0.125, True, False, "")
        call = launch.Call(q, k, v, None, None, None, *options)
        o = launch.kernel_operands(call, variant, manifest.scaling["block"])
        for left, right in ((variant.tile_n + 5, 0), (3, 40)):
            out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device=q.device)
            torch.ops.fp8cutlass_C.forward(
                manifest.index[variant.id], o.q, o.k, o.v, o.q_descale, o.k_descale, o.v_descale, None, out, lse, None,
                0.125, keys - rows + right, keys - rows - left,
            )  # fmt: skip
            yield


def run_ragged(variant: Any) -> Iterator[None]:
    """Launches a kernel of ragged batches with its plan, once a turn: sequences without rows or keys, of one token, of
    whole tiles; more items than CTAs."""
    import torch

    gpu, ragged = importlib.import_module("gpu"), importlib.import_module("fp8cutlass.ragged")
    m, n = variant.tile_m, variant.tile_n
    window = {"full": (-1, -1), "causal": (-1, 0), "window": (n + 5, 3)}[variant.mask]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[variant.out]
    for rows, keys in (
        ([m + 6, 0, 1, m], [(2 * variant.stages + 1) * n + 37, 5, 0, n]),
        ([70, m + 1] * 30, [n, 9] * 30),
    ):
        q, k, v = (
            torch.randn(sum(tokens), heads, variant.head_dim).to(dtype).cuda()
            for tokens, heads in ((rows, 4), (keys, 2), (keys, 2))
        )
        ends = [torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32).cuda() for x in (rows, keys)]
        call = ragged.RaggedCall(
            q, k, v, *ends, None, None, max(rows), max(keys), (), 0.125, *window, True, dtype, "fast", True, variant.id
        )
        out, lse = torch.empty_like(q), torch.empty(q.shape[1::-1], device=q.device)
        ragged.launch(call, variant, gpu.built_manifest().index[variant.id], out, lse)
        yield


def run_pack(pack: dict[str, Any]) -> Iterator[None]:
    """Launches a kernel that quantises and packs, once a turn, with tails of rows, of packed keys and of head_dim."""
    import torch

    gpu, reference = importlib.import_module("gpu"), importlib.import_module("reference")
    fused = importlib.import_module("fp8cutlass.fused")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[pack["source"]]
    head_dim, block = pack["head_dim"], pack["key_block"]
    for width, keys in ((head_dim, 2 * block + 130), (head_dim - 8, 3)):
        q = reference.randn(2, 4, keys + 7, width, seed=1).to(dtype).cuda()
        k = reference.randn(2, 2, keys, width, seed=2).to(dtype).cuda()
        for granularity, both in itertools.product(gpu.built_manifest().scaling.values(), (False, True)):
            options = {"head_dim": head_dim, "key_block": block, "amax": 14.0, "negate_q": True}
            options |= {"smooth_k": both, "hadamard": both, "granularity": granularity}
            fused.quantise_and_pack(q, k, k, **options)
            yield


def under(tool: str, command: Sequence[str | Path], *, filtered: bool, seconds: float | None = None) -> tuple[str, str]:
    """Status and output of a command under a tool of compute-sanitizer; ``seconds`` is when it is given up."""
    names = ["--kernel-name", KERNELS] if filtered else []
    # Each allocation of its own, so that memcheck sees the ends of tensors.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    line = ["compute-sanitizer", "--tool", tool, *names, "--error-exitcode", str(FOUND), *map(str, command)]
    try:
        done = subprocess.run(
            line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds
        )
    except FileNotFoundError:
        return "error", "compute-sanitizer is not on PATH"
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        return "found" if " Error" in output or "hazard" in output else "error", f"{output}\nover {seconds} s"
    status = {0: "clean", FOUND: "found"}.get(done.returncode, "error")
    return status, done.stdout


def sanitise(tool: str, selection: Sequence[str], jobs: int) -> Outcome:
    """One tool over a selection of kernels, in ``jobs`` processes that share them."""
    started = time.monotonic()

    def part(number: int) -> tuple[str, str]:
        command = [sys.executable, __file__, "--run", "--part", f"{number}/{jobs}", *selection]
        # initcheck has to see torch's kernels as well, or what they wrote counts as never written.
        return under(tool, command, filtered=tool != "initcheck")

    with ThreadPoolExecutor(jobs) as pool:
        parts = list(pool.map(part, range(jobs)))
    counts = [match for _, text in parts for match in _DONE.findall(text)]
    launches, kernels, kinds, left = (sum(int(match[i]) for match in counts) for i in range(4))
    unreached = tuple(sorted(name for _, text in parts for name in _KIND.findall(text)))
    statuses = {status for status, _ in parts}
    status = next((s for s in ("found", "error") if s in statuses), "clean")
    if status == "clean" and (len(counts) != jobs or launches == 0):
        status = "error"
    text = "" if status == "clean" else "\n".join(text for s, text in parts if s != "clean" or not launches)
    seconds = time.monotonic() - started
    return Outcome(tool, status, kernels, launches, left, kinds, unreached, seconds, text)


def planted(tool: str, folder: Path) -> Outcome:
    """Builds the tool's program and runs it as it is, where the tool must be silent, and with its bug, where it must
    not: found is what is wanted."""
    started = time.monotonic()
    nvcc = toolchain.find_nvcc()
    program = folder / tool
    command = [nvcc.path, "-arch=native", "-lineinfo", PLANTED / f"{tool}.cu", "-o", program]
    built = subprocess.run([str(x) for x in command], env=nvcc.environment(), capture_output=True, text=True)
    if built.returncode != 0:
        return Outcome(tool, "error", text=built.stderr)
    clean, text = under(tool, [program], filtered=False, seconds=PROGRAM_SECONDS)
    if clean != "clean":
        return Outcome(tool, "error", text=f"the program without its bug is not clean:\n{text}")
    status, text = under(tool, [program, "broken"], filtered=False, seconds=PROGRAM_SECONDS)
    return Outcome(tool, status, 1, 2, seconds=time.monotonic() - started, text=text)


def main() -> int:
    """The command line; returns 0 when every tool is clean, or saw what was planted for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", action="append", choices=TOOLS, help="repeatable (default: all)")
    parser.add_argument("--profile", choices=PROFILES, default=PROFILES[-1], help="default: everything that is built")
    parser.add_argument("--only", action="append", default=[], metavar="ID", help="only this kernel; repeatable")
    parser.add_argument("--each", action="store_true", help="one kernel of each head_dim, schedule and cluster")
    parser.add_argument("--seconds", type=float, help="begin no kernel after this time of a tool's run")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share a tool's kernels")
    parser.add_argument("--planted", action="store_true", help="run the programs with planted bugs instead")
    parser.add_argument("--json", type=Path, help="write what was found")
    parser.add_argument("--run", action="store_true", help="run the problems without a sanitizer")
    parser.add_argument("--part", default="0/1", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run_part(options.profile, options.only, options.each, options.part, options.seconds)
        return 0
    wanted = "found" if options.planted else "clean"
    outcomes = []
    selection = ["--profile", options.profile, *(x for name in options.only for x in ("--only", name))]
    selection += ["--each"] if options.each else []
    selection += [] if options.seconds is None else ["--seconds", str(options.seconds)]
    with tempfile.TemporaryDirectory() as folder:
        for tool in options.tool or TOOLS:
            o = planted(tool, Path(folder)) if options.planted else sanitise(tool, selection, options.jobs)
            outcomes.append(o)
            if o.status != wanted:
                print(o.text, flush=True)
            ran = f"{o.kernels} kernels of {o.kinds} kinds, {o.launches} launches"
            left = f"{o.left_out} kernels and {len(o.kinds_left_out)} kinds left out"
            what = "its planted bug" if options.planted else f"{ran}, {left}"
            print(f"{tool}: {o.status}, {what}, {o.seconds:.0f} s", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(o) for o in outcomes], indent=1), encoding="utf-8")
    return 0 if all(o.status == wanted for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
