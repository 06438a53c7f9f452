"""Where numbers come from: card, clocks, driver, toolchain, versions, commit."""

from __future__ import annotations

import hashlib
import platform
import re
import shutil
import statistics
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

from fp8cutlass import __version__
from fp8cutlass.errors import UnsupportedError
from fp8cutlass.native import extension

ROOT = Path(__file__).resolve().parent.parent
SMI_FIELDS = {
    "driver": "driver_version",
    "clock_max_mhz": "clocks.max.sm",
    "clock_memory_mhz": "clocks.max.mem",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
    "ecc": "ecc.mode.current",
}
DISTRIBUTIONS = ("triton", "numpy", "nvidia-cutlass")


def card_slug(name: str) -> str:
    """A folder name for a card: ``NVIDIA H100 80GB HBM3`` is ``h100``, ``NVIDIA GeForce RTX 4090`` is ``rtx4090``."""
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word and word not in ("nvidia", "geforce")]
    end = next((i for i, word in enumerate(words) if any(c.isdigit() for c in word)), len(words) - 1)
    return "".join(words[: end + 1]) or "unknown"


def _run(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=30)
    return result.stdout.strip() if result.returncode == 0 else ""


def version_of(distribution: str) -> str:
    """The installed version of a distribution, "" where there is none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def commit() -> str:
    """The commit of the checkout, ``+`` behind it where files differ from it; "" outside a repository."""
    revision = _run("git", "rev-parse", "HEAD")
    return revision + ("+" if revision and _run("git", "status", "--porcelain", "--untracked-files=no") else "")


def _nvcc() -> str:
    lines = (_run("nvcc", "--version") or _run("/usr/local/cuda/bin/nvcc", "--version")).splitlines()
    return next((line.split("release ")[1] for line in lines if "release " in line), "")


def _library() -> str:
    """What identifies the compiled kernels: profile, targets and a digest of the manifest beside the library."""
    try:
        path = extension.built_dir() / "manifest.json"
    except UnsupportedError:
        return ""
    return f"manifest sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"


def stamp(revision: str = "") -> dict[str, str]:
    """Everything that a reader needs to judge or repeat a run; values that cannot be found are left out."""
    found = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": revision or commit(),
        "fp8cutlass": __version__,
        "library": _library(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda or ""),
        "nvcc": _nvcc(),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["card"] = properties.name
        found["sms"] = str(properties.multi_processor_count)
        found["cudnn"] = str(torch.backends.cudnn.version() or "")
        answer = _run("nvidia-smi", "-i", "0", f"--query-gpu={','.join(SMI_FIELDS.values())}", "--format=csv,noheader")
        values = [value.strip() for value in answer.split(",")]
        if len(values) == len(SMI_FIELDS):
            found |= dict(zip(SMI_FIELDS, values, strict=True))
    found |= {name: version_of(name) for name in DISTRIBUTIONS}
    return {name: value for name, value in found.items() if value}


class Monitor:
    """Clock (MHz) and power (W) of the card while kernels run; None where the driver's library cannot be asked."""

    def __init__(self) -> None:
        self._clocks: list[float] = []
        self._watts: list[float] = []

    def sample(self) -> None:
        try:
            self._clocks.append(float(torch.cuda.clock_rate()))
            self._watts.append(torch.cuda.power_draw() / 1e3)
        except (ModuleNotFoundError, RuntimeError):  # no bindings of the driver's library, or they refuse
            return

    @property
    def clock_mhz(self) -> float | None:
        return statistics.median(self._clocks) if self._clocks else None

    @property
    def power_w(self) -> float | None:
        return statistics.median(self._watts) if self._watts else None
