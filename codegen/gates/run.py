"""`python -m codegen gates`: compile, check every gate, then write the report or compare with the committed one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from codegen.decode import Decode
from codegen.gates import decodes as decoding
from codegen.gates import packs as packing
from codegen.gates import report
from codegen.gates import residents as keeping
from codegen.gates.compile import measure_all
from codegen.gates.rules import applicable, check
from codegen.gates.subject import Failure, Kernel, Measured, render
from codegen.gates.toolbox import open_toolbox
from codegen.pack import Pack
from codegen.resident import Resident
from codegen.variant import Variant
from scripts.cubins import ROOT

REPORT = str(ROOT / "generated" / "gates" / "{arch}_{profile}.txt")
SHOWN = 40  # changes listed in full; the numbers are all in the fresh report


def _path(pattern: str, arch: str, profile: str) -> Path:
    return Path(pattern.replace("{arch}", arch).replace("{profile}", profile))


def _summary(target: str, results: dict[Kernel, Measured], say: Callable[[str], None]) -> None:
    """Compile times and memory: for people, and different on every machine, so not part of a report."""
    of_source = {k.source: m for k, m in results.items()}
    slowest = max(of_source, key=lambda source: of_source[source].seconds)
    total, peak = sum(m.seconds for m in of_source.values()), max(m.peak_mib for m in of_source.values())
    say(
        f"{target}: {len(results)} kernels, {total:.0f} s of compilation, the longest "
        f"{of_source[slowest].seconds:.1f} s ({slowest.stem}), largest compiler process {peak:.0f} MiB"
    )


def gate_counts(results: Iterable[Kernel], failures: Iterable[Failure]) -> str:
    """Of each gate: by how many of the kernels that it applies to it is passed."""
    kernels = list(results)
    failed = {(f.gate, f.target, f.kernel) for f in failures}
    parts = []
    for gate in applicable(kernels):
        held = [k for k in kernels if gate.applies(k)]
        passed = sum((gate.name, k.target, k.id) not in failed for k in held)
        parts.append(f"{gate.name} {passed} of {len(held)}")
    return ", ".join(parts)


def _ratchet(committed: Path, part: str, fresh: str, say: Callable[[str], None]) -> bool:
    """Whether a part of the committed report still says what is true."""
    try:
        known = report.split(committed.read_text()).get(part)
        if known is None:
            say(f"{committed} has no part about {part} kernels: write it with `python -m codegen gates`")
            return False
        was_compiler, was = report.parse(known)
    except OSError:
        say(f"{committed} does not exist: write it with `python -m codegen gates`")
        return False
    except ValueError as error:
        say(f"{committed}: {error}")
        return False
    compiler, now = report.parse(fresh)
    if compiler != was_compiler:
        say(
            f"{committed} is for {was_compiler}; this is {compiler}: the numbers are not compared, the gates above hold"
        )
        return True
    changes = report.compare(was, now)
    for change in changes[:SHOWN]:
        say(str(change))
    if len(changes) > SHOWN:
        say(f"... and {len(changes) - SHOWN} more")
    if not changes:
        say(f"{committed} is true of this compilation: {len(now)} {part} kernels")
        return True
    worse = sum(c.worse for c in changes)
    say(
        f"{committed}: {worse} numbers worse, {len(changes) - worse} better. If that is meant, "
        "write the report anew with `python -m codegen gates` and commit it."
    )
    return False


def run(
    chosen: Mapping[str, tuple[Variant, ...]],
    *,
    packs: Mapping[str, tuple[Pack, ...]],
    decodes: Mapping[str, tuple[Decode, ...]],
    residents: Mapping[str, tuple[Resident, ...]],
    profile: str,
    jobs: int,
    out: Path,
    built: Path | None,
    pattern: str | None,
    check_only: bool,
    say: Callable[[str], None],
) -> bool:
    """Measures variants, packs, kernels of decode and those that keep K and V, chosen for each target, and returns
    whether every gate, and the baseline, holds.

    A report has a part about each of these; what is not measured keeps its part.
    check_only: compare with the committed report, the baseline, instead of writing it.
    built: work files of a build, whose cubins are read; None compiles.
    out: work files, and `<out>/gates_<arch>_<profile>.txt`, the fresh report in any case.
    pattern: path of the committed report, with `{arch}` and `{profile}` filled in, written only when all its kernels
    pass; None writes none.
    Raises ToolboxError when a tool is missing.
    """
    tools = open_toolbox()
    out = out.resolve()
    kernels = render(chosen, out / "generated") + packing.render(packs, out / "generated")
    kernels += decoding.render(decodes, out / "generated") + keeping.render(residents, out / "generated")
    cubins = None if built is None else built / "cubins"
    results, failures = measure_all(kernels, tools, out, jobs, say, built=cubins)
    for kernel in sorted(results, key=lambda k: (k.target, k.id)):
        failures += check(kernel, results[kernel])
    for failure in failures:
        say(str(failure))

    good = not failures
    compiler = f"nvcc {tools.version} {' '.join(tools.options)}"
    for arch in dict.fromkeys([*chosen, *packs, *decodes, *residents]):
        of_arch = {k: m for k, m in results.items() if k.target == arch}
        if not of_arch:
            continue
        _summary(arch, of_arch, say)
        say(f"{arch}: gates passed: {gate_counts(of_arch, failures)}")
        parts: dict[str, str] = {}
        for part in report.PARTS:
            if mine := {k: m for k, m in of_arch.items() if report.part_of(k.family) == part}:
                parts[part] = report.render(arch, profile, compiler, mine)
        fresh = out / f"gates_{arch}_{profile}.txt"
        fresh.write_text(report.join(parts))
        failed = len({f.kernel for f in failures if f.target == arch})
        if failed:
            say(f"{arch}: {failed} kernels fail; numbers in {fresh}")
            continue
        if pattern is None:
            say(f"{arch}: all gates hold; numbers in {fresh}")
            continue
        committed = _path(pattern, arch, profile)
        if check_only:
            for part, text in parts.items():
                good = _ratchet(committed, part, text, say) and good
        else:
            before = report.split(committed.read_text()) if committed.is_file() else {}
            committed.parent.mkdir(parents=True, exist_ok=True)
            committed.write_text(report.join(before | parts))
            say(f"{arch}: all gates hold; {committed} written")
    return good
