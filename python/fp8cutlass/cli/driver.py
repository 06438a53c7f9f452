"""The NVIDIA driver and the cards, from the driver's tool, its libraries, and torch."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

TIMEOUT_S = 30
MIB = 1 << 20
PROC = Path("/proc/driver/nvidia/version")
LIBRARY = "libcuda.so.1"


class Unknown(Exception):
    """Something that cannot be found out, or is not there; its text is the reason."""


def _query(fields: str) -> list[list[str]]:
    """Rows of nvidia-smi's answer; Unknown when there is no nvidia-smi or it fails."""
    path = shutil.which("nvidia-smi")
    if path is None:
        raise Unknown("there is no nvidia-smi on PATH")
    command = [path, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False)
    if result.returncode != 0:
        raise Unknown(f"nvidia-smi ended with {result.returncode}: {(result.stdout + result.stderr).strip()}")
    return [[value.strip() for value in line.split(",")] for line in result.stdout.splitlines() if line.strip()]


def version() -> str:
    """The version of the driver, "580.65.06"."""
    try:
        rows = _query("driver_version")
        if rows:
            return rows[0][0]
        missing = "nvidia-smi lists no card"
    except (Unknown, OSError, subprocess.SubprocessError) as error:
        missing = str(error)
    try:
        match = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", PROC.read_text(errors="replace"))
    except OSError:
        match = None
    if match is None:
        raise Unknown(f"no NVIDIA driver answers: {missing}")
    return match[0]


def cuda_version() -> str:
    """The newest CUDA that the driver serves, "13.0"."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise Unknown(f"no NVIDIA driver answers: {error}") from error
    number = ctypes.c_int(0)
    status = library.cuDriverGetVersion(ctypes.byref(number))
    if status != 0 or number.value <= 0:
        raise Unknown(f"{LIBRARY} does not tell its version: error {status}")
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def torch_cards(torch: Any) -> list[dict[str, Any]]:
    """The cards that torch can use."""
    cards: list[dict[str, Any]] = []
    if not torch.cuda.is_available():
        return cards
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        cards.append(
            {
                "index": index,
                "name": str(properties.name),
                "capability": f"{properties.major}.{properties.minor}",
                "arch": None,
                "multiprocessors": int(properties.multi_processor_count),
                "memory_bytes": int(properties.total_memory),
                "usable": True,
            }
        )
    return cards


def listed_cards() -> list[dict[str, Any]]:
    """The cards that nvidia-smi lists, for where torch sees none; none without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    return [
        {
            "index": int(index),
            "name": name,
            "capability": capability,
            "arch": None,
            "multiprocessors": None,
            "memory_bytes": int(memory) * MIB if memory.isdecimal() else None,
            "usable": False,
        }
        for index, name, capability, memory in _query("index,name,compute_cap,memory.total")
    ]
