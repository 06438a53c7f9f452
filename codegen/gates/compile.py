"""Measures kernels, a few at a time: those of a build, or compiled here. What is unchanged is not done again."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from codegen.arch import TARGETS
from codegen.gates import flow, machine, sass
from codegen.gates.subject import Failure, Kernel, Listing, Loop, Measured, Resources
from codegen.gates.toolbox import Toolbox
from scripts.cubins import CompileError, Cubin, Job, make, stored

TOGETHER = 16  # cubins that one process takes apart
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_EACH = re.compile(r"^(?=.*Compiling entry function)", re.M)
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(.*)")
_STATIC = re.compile(r"(\d+) bytes smem")
_ADVICE = re.compile(r"^.*(?:Potential Performance Loss|\(C751[0-4]\)).*$", re.M)
_STORAGE = re.compile(r"static_assert\((?:sizeof\(SharedStorage\)|Stage::kBytes) == (\d+)[,)]")


def parse_resources(text: str, entry: str = "") -> Resources:
    """What `ptxas -v` reports about the one kernel whose mangled name holds `entry`.

    Raises CompileError for a report with none or several.

    Functions that were not inlined report too: their spills are added, their stack is part of the kernel's call chain.
    """
    advice = [x for x in _ADVICE.findall(text) if entry in x or "in the function" not in x]  # stands before its kernel
    if entry:
        text = "".join(part for part in _EACH.split(text) if (found := _ENTRY.search(part)) and entry in found[1])
    entries, frames, used = _ENTRY.findall(text), _FRAME.findall(text), _USED.findall(text)
    if len(entries) != 1 or not frames or not used:
        raise CompileError(f"ptxas reports {len(entries)} kernels, expected 1:\n{text.strip()}")
    stacks, stores, loads = ([int(frame[i]) for frame in frames] for i in range(3))
    static = _STATIC.search(used[0][1])
    return Resources(
        registers=int(used[0][0]),
        stack=sum(stacks),
        spill_stores=sum(stores),
        spill_loads=sum(loads),
        static_smem=int(static[1]) if static else 0,
        advice=tuple(advice),
    )


def _disassemble(tools: Toolbox, target: str, cubins: Sequence[bytes]) -> list[list[sass.Function]]:
    """The functions of each cubin. One process takes them all: to start it takes as long as it works for five."""
    if not cubins:
        return []
    code = [machine.functions(cubin) for cubin in cubins]
    with tempfile.NamedTemporaryFile(suffix=".bin") as raw:
        raw.write(b"".join(data for of_cubin in code for data in of_cubin.values()))
        raw.flush()
        command = [str(tools.nvdisasm), "-b", target.replace("sm", "SM"), raw.name]
        result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise CompileError(f"nvdisasm failed with status {result.returncode}: {result.stderr.strip()}")
    sizes = [(name, len(data)) for of_cubin in code for name, data in of_cubin.items()]
    found = iter(sass.functions(result.stdout, sizes))
    return [list(itertools.islice(found, len(of_cubin))) for of_cubin in code]


def _storage(source: str, named: str) -> int | None:
    pattern = re.compile(rf"static_assert\({re.escape(named)} == (\d+)[,)]") if named else _STORAGE
    match = pattern.search(source)
    return int(match[1]) if match else None


def job_of(kernel: Kernel) -> Job:
    """What has to be compiled for a kernel."""
    return Job(target=kernel.target, gencode=TARGETS[kernel.target].gencode, source=kernel.source)


def _cubin(kernels: Sequence[Kernel], tools: Toolbox, folder: Path, built: bool) -> Cubin | CompileError:
    job = job_of(kernels[0])
    cubin = stored(job, tools, folder)
    if cubin is None and built:
        return CompileError(f"{folder} has no cubin of this source, these headers, this compiler and its options")
    try:
        return cubin or make(job, tools, folder)
    except CompileError as error:
        return error


def measure(
    groups: Sequence[Sequence[Kernel]], tools: Toolbox, folder: Path, *, built: bool = False
) -> list[list[Measured] | CompileError]:
    """Takes the cubins apart that the kernels of each group share: one in `folder` that is up to date, else compiled
    into it. All are of one target. Of a group, what is wrong takes the place of what was measured.

    built: compile nothing.
    """
    cubins = [_cubin(kernels, tools, folder, built) for kernels in groups]
    there = [cubin for cubin in cubins if isinstance(cubin, Cubin)]
    try:
        code = iter(_disassemble(tools, groups[0][0].target, [cubin.path.read_bytes() for cubin in there]))
    except (CompileError, machine.MachineError, sass.SassError) as error:
        return [CompileError(str(error)) if isinstance(cubin, Cubin) else cubin for cubin in cubins]
    return [
        _read(kernels, cubin, next(code)) if isinstance(cubin, Cubin) else cubin
        for kernels, cubin in zip(groups, cubins, strict=True)
    ]


def _read(kernels: Sequence[Kernel], cubin: Cubin, code: list[sass.Function]) -> list[Measured] | CompileError:
    stated, machine_code = kernels[0].source.read_text(), cubin.path.read_bytes()
    try:
        return [
            Measured(
                resources=parse_resources(cubin.log, kernel.entry),
                listing=sass.parse(code, kernel.entry),
                storage_bytes=_storage(stated, kernel.storage),
                code=machine.digest(machine_code, kernel.entry),
                seconds=cubin.seconds,
                peak_mib=cubin.peak_mib,
            )
            for kernel in kernels
        ]
    except (CompileError, machine.MachineError, sass.SassError) as error:
        return CompileError(str(error))


# What this code reads out of a cubin is part of a result as well.
_READER = hashlib.sha256(
    b"".join(Path(f).read_bytes() for f in (__file__, sass.__file__, flow.__file__, machine.__file__))
).hexdigest()


def _load(path: Path, key: str) -> Measured | None:
    """An earlier result under the same key; None when there is none."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    if record.get("key") != key:
        return None
    m = record["measured"]
    loop = m["listing"].pop("loop")
    listing = Listing(**m.pop("listing"), loop=Loop(**loop) if loop else None)
    resources = Resources(**{**m["resources"], "advice": tuple(m["resources"]["advice"])})
    return Measured(**{**m, "resources": resources, "listing": listing})


def _record(out: Path, kernel: Kernel) -> Path:
    return out / kernel.target / f"{kernel.id}.json"


def _store(path: Path, key: str, measured: Measured) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.json")
    partial.write_text(json.dumps({"key": key, "measured": asdict(measured)}, indent=1))
    partial.replace(path)


def _batches(groups: Iterable[list[Kernel]], size: int) -> list[list[list[Kernel]]]:
    """At most so many groups together, of one target."""
    found: dict[str, list[list[Kernel]]] = defaultdict(list)
    for group in groups:
        found[group[0].target].append(group)
    return [of_target[i : i + size] for of_target in found.values() for i in range(0, len(of_target), size)]


def measure_all(
    kernels: Iterable[Kernel],
    tools: Toolbox,
    out: Path,
    jobs: int,
    say: Callable[[str], None],
    *,
    built: Path | None = None,
) -> tuple[dict[Kernel, Measured], list[Failure]]:
    """Measures every kernel, `jobs` sources at a time, with a line for each that is compiled.

    built: a build's folder of cubins, which are read as they are; what is missing there is a failure. None: cubins are
    compiled into `out`. There, `<target>/<id>.json` also keeps what was measured of each kernel.
    A kernel that does not compile is a failure of gate COMPILE and missing from the results.
    """
    results: dict[Kernel, Measured] = {}
    failures: list[Failure] = []
    keys: dict[Kernel, str] = {}
    todo: dict[Job, list[Kernel]] = defaultdict(list)
    of_source: dict[Job, str] = {}
    folder = out if built is None else built
    for kernel in kernels:
        job = job_of(kernel)
        if job not in of_source:
            of_source[job] = tools.key(job.gencode, job.source)
        keys[kernel] = f"{of_source[job]} {_READER} {kernel.entry}"
        known = _load(_record(out, kernel), keys[kernel])
        if known is None or (built is not None and stored(job, tools, built) is None):
            todo[job].append(kernel)
        else:
            results[kernel] = known
    verb = "compile" if built is None else "read"
    say(
        f"{len(results)} kernels unchanged since an earlier run, {sum(map(len, todo.values()))} to {verb} "
        f"from {len(todo)} files, {jobs} at a time"
    )
    started, done = time.monotonic(), 0
    with ThreadPoolExecutor(jobs) as pool:
        running = {
            pool.submit(measure, batch, tools, folder, built=built is not None): batch
            for batch in _batches(todo.values(), 1 if built is None else TOGETHER)
        }
        try:
            for future in as_completed(running):
                for group, found in zip(running[future], future.result(), strict=True):
                    done += 1
                    name = f"[{done}/{len(todo)}] {group[0].target} {group[0].source.stem}"
                    if isinstance(found, CompileError):
                        failures += [
                            Failure(gate="COMPILE", kernel=k.id, target=k.target, message=str(found)) for k in group
                        ]
                        say(f"{name}  does not compile" if built is None else f"{name}  is not in the build")
                        continue
                    measured = dict(zip(group, found, strict=True))
                    results |= measured
                    for kernel, m in measured.items():
                        _store(_record(out, kernel), keys[kernel], m)
                    if built is None:
                        left = (time.monotonic() - started) / done * (len(todo) - done)
                        say(f"{name}  {measured[group[0]].seconds:.1f} s, {left:.0f} s left")
        except BaseException:  # an interrupt as well: without this the pool would first compile all the rest
            pool.shutdown(cancel_futures=True)
            raise
    return results, failures
