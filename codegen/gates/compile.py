"""Compiles kernels to cubins and measures them, a few at a time; unchanged kernels are not compiled again."""

from __future__ import annotations

import hashlib
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

from codegen.gates import flow, machine, sass
from codegen.gates.subject import Failure, Kernel, Listing, Loop, Measured, Resources
from codegen.gates.toolbox import Toolbox

_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_EACH = re.compile(r"^(?=.*Compiling entry function)", re.M)
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(.*)")
_STATIC = re.compile(r"(\d+) bytes smem")
_ADVICE = re.compile(r"^.*(?:Potential Performance Loss|\(C751[0-4]\)).*$", re.M)
_STORAGE = re.compile(r"static_assert\((?:sizeof\(SharedStorage\)|Stage::kBytes) == (\d+)[,)]")


class CompileError(RuntimeError):
    """nvcc or nvdisasm refused a kernel; the message is what they said."""


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


SHOWN_LINES = 20  # of a compiler's complaint; the first error is the one that counts


def _head(text: str) -> str:
    lines = text.strip().splitlines()
    more = [f"... {len(lines) - SHOWN_LINES} more lines"] if len(lines) > SHOWN_LINES else []
    return "\n".join(lines[:SHOWN_LINES] + more)


def _run_nvcc(command: list[str], environment: dict[str, str]) -> tuple[str, float, float]:
    """Output, seconds, and MiB of the largest process of nvcc's tree (its compilers run one after the other)."""
    with tempfile.TemporaryFile("w+") as output:
        started = time.monotonic()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - started
        output.seek(0)
        text = output.read()
    if process.returncode != 0:
        raise CompileError(f"nvcc failed with status {process.returncode}:\n{_head(text)}")
    return text, seconds, usage.ru_maxrss / 1024


def _disassemble(tools: Toolbox, cubin: Path) -> str:
    result = subprocess.run([str(tools.nvdisasm), "-c", str(cubin)], capture_output=True, text=True)
    if result.returncode != 0:
        raise CompileError(f"nvdisasm failed with status {result.returncode}: {result.stderr.strip()}")
    return result.stdout


def _listing(text: str, entry: str) -> Listing:
    try:
        return sass.parse(text, entry)
    except sass.SassError as error:
        raise CompileError(str(error)) from error


def _digest(code: bytes, entry: str) -> str:
    try:
        return machine.digest(code, entry)
    except machine.MachineError as error:
        raise CompileError(str(error)) from error


def _storage(source: str, named: str) -> int | None:
    pattern = re.compile(rf"static_assert\({re.escape(named)} == (\d+)[,)]") if named else _STORAGE
    match = pattern.search(source)
    return int(match[1]) if match else None


def measure(kernels: Sequence[Kernel], tools: Toolbox, work: Path) -> list[Measured]:
    """Compiles the source that these kernels share, for their target, and takes it apart; `work` gets the cubin.

    Raises CompileError.
    """
    target, source = kernels[0].target, kernels[0].source
    cubin = work / f"{source.stem}.cubin"
    cubin.parent.mkdir(parents=True, exist_ok=True)
    partial = cubin.with_suffix(f".{os.getpid()}.cubin")  # two runs may share the folder
    text, seconds, peak = _run_nvcc(tools.command(target, source, partial), tools.environment)
    partial.replace(cubin)
    code, stated, machine_code = _disassemble(tools, cubin), source.read_text(), cubin.read_bytes()
    return [
        Measured(
            resources=parse_resources(text, kernel.entry),
            listing=_listing(code, kernel.entry),
            storage_bytes=_storage(stated, kernel.storage),
            code=_digest(machine_code, kernel.entry),
            seconds=round(seconds, 2),
            peak_mib=round(peak),
        )
        for kernel in kernels
    ]


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
    partial = path.with_suffix(f".{os.getpid()}.json")
    partial.write_text(json.dumps({"key": key, "measured": asdict(measured)}, indent=1))
    partial.replace(path)


def measure_all(
    kernels: Iterable[Kernel], tools: Toolbox, out: Path, jobs: int, say: Callable[[str], None]
) -> tuple[dict[Kernel, Measured], list[Failure]]:
    """Measures every kernel, `jobs` sources at a time, with a line for each that is compiled.

    out: gets `<target>/<source>.cubin`, and of each kernel `<target>/<id>.json`, which a later run with unchanged
    inputs reads instead of compiling.
    A kernel that does not compile is a failure of gate COMPILE and missing from the results.
    """
    results: dict[Kernel, Measured] = {}
    failures: list[Failure] = []
    keys: dict[Kernel, str] = {}
    todo: dict[tuple[str, Path], list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        keys[kernel] = f"{tools.digest(kernel.target, kernel.source)} {_READER} {kernel.entry}"
        known = _load(_record(out, kernel), keys[kernel])
        if known is None:
            todo[kernel.target, kernel.source].append(kernel)
        else:
            results[kernel] = known
    say(
        f"{len(results)} kernels unchanged since an earlier run, {sum(map(len, todo.values()))} to compile "
        f"from {len(todo)} files, {jobs} at a time"
    )
    started = time.monotonic()
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(measure, group, tools, out / target): group for (target, _), group in todo.items()}
        try:
            for done, future in enumerate(as_completed(running), 1):
                group = running[future]
                name = f"[{done}/{len(todo)}] {group[0].target} {group[0].source.stem}"
                try:
                    measured = dict(zip(group, future.result(), strict=True))
                except CompileError as error:
                    failures += [
                        Failure(gate="COMPILE", kernel=k.id, target=k.target, message=str(error)) for k in group
                    ]
                    say(f"{name}  does not compile")
                    continue
                results |= measured
                for kernel, m in measured.items():
                    _store(_record(out, kernel), keys[kernel], m)
                left = (time.monotonic() - started) / done * (len(todo) - done)
                say(f"{name}  {measured[group[0]].seconds:.1f} s, {left:.0f} s left")
        except BaseException:  # an interrupt as well: without this the pool would first compile all the rest
            pool.shutdown(cancel_futures=True)
            raise
    return results, failures
