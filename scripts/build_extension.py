"""Compiles the extension: generate a profile, its kernels to cubins and the library by CMake, both beside the package.

    python scripts/build_extension.py --profile ci --arch sm89 --dest python/fp8cutlass

`dest` gets `_C.so`, `_built/kernels-<target>.bin`, which it loads kernels from, and in `_built/` the manifest and the
tables, which describe exactly these kernels. Work files stay in `build/<profile>-<archs>`, so a second run compiles
only what changed; `cubins/` in it has each kernel with what the compiler said of it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from scripts import cubins, kernel_file, toolchain  # noqa: E402  (needs the path above when run as a file)
from scripts.progress import Progress, duration, forecast  # noqa: E402

PROFILES = ("dev", "ci", "release")
DEFAULT_ARCH = "sm89"
LIBRARY = "fp8cutlass_C"  # python/fp8cutlass/_ops.py looks for the operators there
TABLES = ("manifest.json", "table.txt", "times.txt")  # of the generator's files, those that a package is shipped with


class BuildError(RuntimeError):
    """A step of the build failed; its own output has been printed."""


def _say(text: str) -> None:
    print(text, flush=True)


def _run(command: Sequence[str | Path], *, env: dict[str, str] | None = None) -> None:
    """Runs a step; its output is shown only when it fails."""
    result = subprocess.run(
        [str(part) for part in command], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if result.returncode != 0:
        sys.stderr.write(result.stdout)
        raise BuildError(f"{command[0]} failed with status {result.returncode}")


def generate(
    out: Path, *, profile: str, archs: Sequence[str], emulated: bool = False, candidates: Sequence[str] = ()
) -> None:
    """Renders `profile` for `archs` into `out` (files that did not change keep their time stamps).

    emulated: also the kernels that are only emulated on one of the targets. candidates: also decode kernels of other
    shapes with these head_dims, to be timed.
    """
    command: list[str | Path] = [sys.executable, "-m", "codegen", "--profile", profile, "--out", out]
    for arch in archs:
        command += ["--arch", arch]
    if emulated:
        command.append("--emulated")
    for head_dim in candidates:
        command += ["--candidates", head_dim]
    _run(command)


def _configure(work: Path, generated: Path, nvcc: toolchain.Nvcc, identity: str, library: str) -> None:
    ninja = toolchain.find_ninja()
    settings = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_MAKE_PROGRAM": ninja,
        "CMAKE_CUDA_COMPILER": nvcc.path,
        "FP8CUTLASS_GENERATED": generated,
        "FP8CUTLASS_CUTLASS_INCLUDE": toolchain.find_cutlass(),
        "FP8CUTLASS_TORCH": toolchain.find_torch(),
    }
    defines = [f"-D{name}={value}" for name, value in settings.items()]
    defines += [f"-DFP8CUTLASS_BUILD={identity}", f"-DFP8CUTLASS_LIBRARY={library}"]
    configure: list[str | Path] = [toolchain.find_cmake(), "-G", "Ninja", "-S", ROOT, "-B", work, *defines]
    # CMake refuses to change a compiler in place, and would keep paths of an environment that is gone.
    stamp = work / "settings.json"
    text = json.dumps({name: str(value) for name, value in settings.items()}, indent=1)
    if stamp.is_file() and stamp.read_text() != text:
        shutil.rmtree(work)
    _run(configure, env=nvcc.environment())
    stamp.write_text(text)


def _link(work: Path, nvcc: toolchain.Nvcc, jobs: int) -> None:
    """Compiles the host's code, and links the library."""
    _run([toolchain.find_ninja(), "-C", work, "-j", str(jobs), "_C.so"], env=nvcc.environment())


def build_identity(generated: Path) -> str:
    """What a library and a file of kernels must have in common: the manifest, whose rows tell the library how to launch
    them, and the headers, whose structs both read. 64 hex digits."""
    digest = hashlib.sha256((generated / "manifest.json").read_bytes())
    digest.update(cubins.digest_of(cubins.INCLUDE, cubins.files_in(cubins.INCLUDE, ".")).encode())
    return digest.hexdigest()


def _kernels(manifest: dict[str, Any], generated: Path) -> dict[str, dict[str, cubins.Job]]:
    """What is to be compiled, by target and id."""
    found: dict[str, dict[str, cubins.Job]] = {arch: {} for arch in manifest["archs"]}
    for entry in (
        *manifest["plans"],
        *manifest["packs"],
        *manifest["decodes"],
        *manifest["residents"],
        *manifest["variants"],
    ):
        for arch in entry["targets"]:
            job = cubins.Job(target=arch, gencode=manifest["gencode"][arch], source=generated / entry["file"])
            found[arch][entry["id"]] = job
    return found


def _compile(
    kernels: Mapping[str, Mapping[str, cubins.Job]], folder: Path, jobs: int
) -> dict[cubins.Job, cubins.Cubin]:
    compiler = cubins.open_compiler()
    wanted = [job for of_target in kernels.values() for job in of_target.values()]
    wanted.sort(key=lambda job: -job.source.stat().st_size)  # the longest first, so that none is left for the end
    missing = sum(cubins.stored(job, compiler, folder) is None for job in wanted)
    progress = Progress(missing, _say)

    def done(job: cubins.Job, cubin: cubins.Cubin) -> None:
        progress.done(f"{job.target} {job.source.stem}", cubin.log)

    try:
        return cubins.make_all(wanted, compiler, folder, jobs, done)
    except cubins.CompileError as error:
        raise BuildError(str(error)) from error


def _install(source: Path, target: Path) -> None:
    """Copies a file under its final name in one step: a process that has the old library loaded keeps the old one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    shutil.copyfile(source, partial)
    partial.replace(target)


def build(
    dest: Path,
    *,
    profile: str,
    archs: Sequence[str],
    build_dir: Path | None = None,
    generated: Path | None = None,
    emulated: bool = False,
    candidates: Sequence[str] = (),
    jobs: int | None = None,
    library: str = LIBRARY,
) -> Path:
    """Builds the extension into `dest` and returns the path of `_C.so`.

    profile, archs, emulated, candidates: what to generate. generated: a directory that codegen wrote earlier, to be
    built as it is instead. build_dir: work files, default `build/<profile>-<archs>`, with `-emulated` behind it if that
    is asked for.
    jobs: compilers at once, default `toolchain.job_count()`. library: the operators' namespace in torch.ops.
    Raises ToolchainError when something needed is missing, BuildError when a step fails.
    """
    started = time.monotonic()
    nvcc = toolchain.find_nvcc()
    for reason in nvcc.passed_over:
        _say(f"passing over {reason}: nvcc >= {toolchain.dotted(toolchain.MIN_NVCC)} is needed")
    name = "-".join([profile, *archs, *(["emulated"] if emulated else [])])
    work = (build_dir or ROOT / "build" / name).resolve()
    if generated is None:
        generated = work / "generated"
        generate(generated, profile=profile, archs=archs, emulated=emulated, candidates=candidates)
    generated = generated.resolve()
    manifest = json.loads((generated / "manifest.json").read_text())
    jobs = jobs or toolchain.job_count()
    kernels = _kernels(manifest, generated)
    _say(f"nvcc {toolchain.dotted(nvcc.version)}; {forecast(manifest, kernels, jobs)}")
    identity = build_identity(generated)
    _configure(work / "cmake", generated, nvcc, identity, library)
    _link(work / "cmake", nvcc, jobs)
    made = _compile(kernels, work / "cubins", jobs)
    built = dest / "_built"
    for arch, of_target in kernels.items():
        code = {name: made[job].path.read_bytes() for name, job in of_target.items()}
        (work / kernel_file.name_of(arch)).write_bytes(kernel_file.pack(arch, identity, code))
    for name in (*map(kernel_file.name_of, kernels), *TABLES):
        _install((generated if name in TABLES else work) / name, built / name)
    for stale in {*built.glob(kernel_file.name_of("*"))} - {built / kernel_file.name_of(arch) for arch in kernels}:
        stale.unlink()
    made_library = dest / "_C.so"
    _install(work / "cmake" / "_C.so", made_library)
    size = made_library.stat().st_size + sum((built / kernel_file.name_of(arch)).stat().st_size for arch in kernels)
    _say(f"built {made_library} ({size / 1e6:.1f} MB with its kernels) in {duration(time.monotonic() - started)}")
    return made_library


def card_archs() -> list[str]:
    """Targets that this machine's cards need, of those that the generator knows. Empty without such a card."""
    present = toolchain.card_capabilities()
    if not present:
        return []
    capability_of = json.loads((ROOT / "generated" / "manifest.json").read_text())["capability"]
    return [arch for arch, capability in capability_of.items() if tuple(capability) in present]


def requested_archs() -> list[str]:
    """Targets to build for: FP8CUTLASS_ARCHS ("sm89;sm90a"), else those of the cards here, else sm89 without a card.

    Raises BuildError for an empty FP8CUTLASS_ARCHS, and when there are cards but no kernels for any of them.
    """
    text = os.environ.get("FP8CUTLASS_ARCHS")
    if text is not None:
        archs = [part for part in re.split(r"[;,\s]+", text) if part]
        if not archs:
            raise BuildError(f"FP8CUTLASS_ARCHS is {text!r}: expected target names such as 'sm89;sm90a'")
        return archs
    found = card_archs()
    capabilities = toolchain.card_capabilities()
    if capabilities and not found:
        named = ", ".join(map(toolchain.dotted, capabilities))
        raise BuildError(
            f"there are no kernels for compute capability {named}. Set FP8CUTLASS_ARCHS to build for other machines, "
            "or FP8CUTLASS_SKIP_BUILD=1 to install without kernels (CPU emulator only)."
        )
    if not found:
        print(
            f"no card found: building for {DEFAULT_ARCH} (L4, L40S, RTX 4090), which is a guess. "
            "For an H100 or H200 set FP8CUTLASS_ARCHS=sm90a, for both FP8CUTLASS_ARCHS='sm89;sm90a'",
            file=sys.stderr,
        )
    return found or [DEFAULT_ARCH]


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", choices=PROFILES, default="ci")
    parser.add_argument("--arch", action="append", help="repeatable (default: FP8CUTLASS_ARCHS, the cards here, sm89)")
    parser.add_argument("--dest", type=Path, default=ROOT / "python" / "fp8cutlass", help="where _C.so goes")
    parser.add_argument("--build-dir", type=Path, help="work files (default: build/<profile>-<archs>)")
    parser.add_argument("--generated", type=Path, help="build this generated directory instead of generating a profile")
    parser.add_argument(
        "--emulated", action="store_true", help="also the kernels that are only emulated on a target, for tests there"
    )
    parser.add_argument(
        "--candidates", action="append", default=[], metavar="HEAD_DIM", help="also decode kernels of other shapes"
    )
    parser.add_argument("--jobs", type=int, help="compilers at once (default: FP8CUTLASS_JOBS, cores, memory)")
    options = parser.parse_args()
    if options.jobs is not None and options.jobs < 1:
        parser.error(f"--jobs must be >= 1, got {options.jobs}")
    if options.emulated and options.generated:
        parser.error("--emulated chooses what to generate, --generated is there already")
    try:
        build(
            options.dest,
            profile=options.profile,
            archs=options.arch or ([] if options.generated else requested_archs()),
            build_dir=options.build_dir,
            generated=options.generated,
            emulated=options.emulated,
            candidates=options.candidates,
            jobs=options.jobs,
        )
    except (BuildError, toolchain.ToolchainError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
