"""What ``doctor`` checks, one function a subject; they judge the facts of :mod:`.facts` and try out what is there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from . import selftest, sources
from .facts import reason

OK, WARNING, FAILED = "ok", "warning", "failed"
MIN_TORCH = (2, 10)  # the first with the stable ABI that the extension is written against
MIN_DRIVER = {12: "525", 13: "580"}  # of a CUDA major release, any minor release of which then runs


@dataclass(frozen=True)
class Check:
    """``seen`` is what was found, ``remedy`` a command or a sentence where the status is not ok."""

    name: str
    status: str
    seen: str
    remedy: str = ""


def checks(facts: dict[str, Any]) -> Iterator[Check]:
    """Everything, in the order in which things depend on one another."""
    yield torch_version(facts)
    yield driver(facts)
    yield from cards(facts)
    yield tables(facts)
    yield library(facts)
    yield from emulator(facts)
    yield from kernels(facts)
    yield from compilers(facts)


def served_cards(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """The cards that there are kernels for, whether or not torch can use them."""
    return [card for card in facts["cards"] or [] if card["arch"] is not None]


def _version(text: str | None) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", text or "")
    return (int(match[1]), int(match[2])) if match else None


def _problems(facts: dict[str, Any], about: str) -> str:
    """What the facts say against a key or what is below it."""
    found = [p["message"] for p in facts["problems"] if p["about"] == about or p["about"].startswith(f"{about}.")]
    return "; ".join(found)


def torch_version(facts: dict[str, Any]) -> Check:
    """torch is there and new enough."""
    wanted = ".".join(map(str, MIN_TORCH))
    if facts["torch"] is None:
        seen = _problems(facts, "torch")
        force = "" if seen.startswith(ModuleNotFoundError.__name__) else "--force-reinstall "
        return Check("torch", FAILED, seen, f"pip install {force}'torch>={wanted}'")
    seen = f"torch {facts['torch']}, {f'CUDA {cuda}' if (cuda := facts['torch_cuda']) else 'without CUDA'}"
    version = _version(facts["torch"])
    if version is None:
        return Check("torch", WARNING, f"{seen}: no version that can be read", f"torch >= {wanted} is needed")
    if version < MIN_TORCH:
        return Check("torch", FAILED, f"{seen}, {wanted} is needed", f"pip install -U 'torch>={wanted}'")
    if facts["torch_cuda"] is None and served_cards(facts):
        return Check("torch", FAILED, f"{seen}, and there is a card for these kernels", _torch_for_driver(facts))
    return Check("torch", OK, seen)


def _torch_for_driver(facts: dict[str, Any]) -> str:
    """The command that installs a torch that the driver serves."""
    served = _version(facts["driver_cuda"])
    if served is None:
        return "install the NVIDIA driver, then a torch with CUDA: https://pytorch.org/get-started"
    index = "cu130" if served[0] >= 13 else "cu128" if served >= (12, 8) else "cu126"
    return f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{index}"


def driver(facts: dict[str, Any]) -> Check:
    """The driver serves the CUDA of torch: another minor release is enough, an older major one is not."""
    if facts["driver"] is None and facts["driver_cuda"] is None:
        remedy = "nothing to do on a machine without an NVIDIA card; with one, install the NVIDIA driver, 580 or newer"
        return Check("driver", WARNING, _problems(facts, "driver"), remedy)
    seen = f"driver {facts['driver'] or 'of unknown version'}, serves CUDA {facts['driver_cuda'] or 'unknown'}"
    served, needed = _version(facts["driver_cuda"]), _version(facts["torch_cuda"])
    if served and needed and served[0] < needed[0]:
        least = MIN_DRIVER.get(needed[0])
        update = f"update the driver to {least} or newer" if least else "update the driver"
        remedy = f"{update}, or take a torch for this driver: {_torch_for_driver(facts)}"
        return Check("driver", FAILED, f"{seen}, torch needs CUDA {facts['torch_cuda']}", remedy)
    if facts["driver_cuda"] is None:
        return Check("driver", WARNING, seen, f"see that libcuda.so.1 can be loaded: {_problems(facts, 'driver_cuda')}")
    return Check("driver", OK, seen)


def cards(facts: dict[str, Any]) -> Iterator[Check]:
    """Each card has kernels and torch can use it."""
    if facts["cards"] is None:
        remedy = "run `nvidia-smi`; where it fails, reinstall the driver or restart the machine"
        yield Check("cards", FAILED, _problems(facts, "cards"), remedy)
    elif not facts["cards"]:
        remedy = "nothing to do: CPU tensors run on the emulator, which is slow"
        yield Check("cards", WARNING, "no NVIDIA card: only the CPU emulator can run", remedy)
    for card in facts["cards"] or []:
        name, seen = f"card {card['index']}", f"{card['name']}, capability {card['capability']}"
        if card["arch"] is None:
            seen = _problems(facts, f"cards.{card['index']}") or seen
            remedy = "attention(..., fallback='sdpa') runs torch's own attention there; CPU tensors run on the emulator"
            yield Check(name, WARNING, seen, remedy)
        elif not card["usable"]:
            yield Check(name, FAILED, f"{seen}, not usable from torch", _unusable(facts))
        else:
            yield Check(name, OK, f"{seen}, runs {card['arch']} kernels")


def _unusable(facts: dict[str, Any]) -> str:
    if (visible := facts["environment"].get("CUDA_VISIBLE_DEVICES")) is not None:
        return f"CUDA_VISIBLE_DEVICES={visible!r} may hide it: unset it"
    if facts["torch_cuda"] is None:
        return _torch_for_driver(facts)
    said = _problems(facts, "cards") or "torch.cuda.is_available() is False"
    return f"see to driver and torch first; torch says: {said}"


def tables(facts: dict[str, Any]) -> Check:
    """The tables that came with the package can be read and agree."""
    table = facts["table"]
    if not table["agrees"]:
        override = facts["environment"].get("FP8CUTLASS_GENERATED")
        remedy = (
            "unset FP8CUTLASS_GENERATED" if override else "reinstall the package; in a checkout `python -m codegen`"
        )
        return Check("table", FAILED, _problems(facts, "table"), remedy)
    seen = f"{table['kernels']} kernels for {', '.join(table['targets'])}, profile {table['profile']}"
    return Check("table", OK, f"{seen}, in {table['directory']}")


def build_command(archs: list[str]) -> str:
    """What compiles the kernels for some architectures, in a checkout."""
    return f"FP8CUTLASS_ARCHS='{';'.join(archs)}' pip install --no-build-isolation . (in a checkout)"


def library(facts: dict[str, Any]) -> Check:
    """The compiled kernels are there, are those of the tables beside them, and were compiled for the cards here."""
    found = facts["library"]
    needed = sorted({card["arch"] for card in served_cards(facts)})
    if found["path"] is None:
        override = facts["environment"].get("FP8CUTLASS_LIBRARY")
        if facts["torch"] is None:
            return Check("library", WARNING, "not looked for: torch does not import", "see to torch first")
        if override or needed:
            remedy = "unset FP8CUTLASS_LIBRARY, or name a file" if override else build_command(needed)
            return Check("library", FAILED, _problems(facts, "library"), remedy)
        return Check("library", OK, "not built, and no card here needs it")
    rebuild = build_command(needed or found["targets"] or list(facts["table"]["targets"] or []))
    if not found["agrees"] or not found["loads"]:
        return Check("library", FAILED, _problems(facts, "library"), f"build it again: {rebuild}")
    seen = f"{found['kernels']} kernels for {', '.join(found['targets'])}, profile {found['profile']}, {found['path']}"
    if missing := [arch for arch in needed if arch not in found["targets"]]:
        return Check("library", FAILED, f"{seen}; a card here needs {', '.join(missing)}", rebuild)
    return Check("library", OK, seen)


def _tried(name: str, error_on: Callable[[str], float], device: str, remedy: str) -> Check:
    try:
        error = error_on(device)
    except Exception as failure:  # a card can raise anything
        return Check(name, FAILED, reason(failure), remedy)
    seen = f"relative L2 error {error:.4f} against float64, limit {selftest.LIMIT:g}"
    return Check(name, OK, seen) if error <= selftest.LIMIT else Check(name, FAILED, seen, remedy)


def emulator(facts: dict[str, Any]) -> Iterator[Check]:
    """Attention of CPU tensors is right, and over pages."""
    remedy = "see to what failed above; else reinstall the package and torch"
    yield _tried("emulator", selftest.error_on, "cpu", remedy)
    yield _tried("pages", selftest.paged_error_on, "cpu", remedy)


def kernels(facts: dict[str, Any]) -> Iterator[Check]:
    """Attention on each card that has kernels is right, and over pages."""
    for card in served_cards(facts):
        names = (f"kernels {card['index']}", f"pages {card['index']}")
        if not card["usable"] or not facts["library"]["loads"]:
            yield from (Check(name, WARNING, "not tried", "see to what failed above") for name in names)
        else:
            remedy = (
                f"kernels that CUDA 13 compiled need driver {MIN_DRIVER[13]} or newer; else build them again: "
                f"{build_command([card['arch']])}"
            )
            for name, error_on in zip(names, (selftest.error_on, selftest.paged_error_on), strict=True):
                yield _tried(name, error_on, f"cuda:{card['index']}", remedy)


def compilers(facts: dict[str, Any]) -> Iterator[Check]:
    """What a build needs, as a build would look for it; nothing else needs it."""
    served = _version(facts["driver_cuda"])
    root = sources.repository()
    if root is None:
        yield Check("compiler", OK, "not looked for: there is no checkout to build from, and running needs none")
        return
    try:
        tools = sources.toolchain(root)
    except Exception as error:  # a checkout may be in any state
        yield Check("compiler", WARNING, reason(error), f"only building needs it: see to {root / 'scripts'}")
        return
    for name, find in (("nvcc", tools.find_nvcc), ("CUTLASS", tools.find_cutlass)):
        try:
            found = find()
        except Exception as error:  # as above
            text, _, remedy = str(error).partition(". ")
            yield Check(name, WARNING, f"{text}; only building needs it", remedy or "python scripts/bootstrap.py build")
        else:
            seen = f"{found.path}, {tools.dotted(found.version)}" if name == "nvcc" else str(found)
            if name == "nvcc" and served and found.version[0] > served[0]:
                remedy = f"update the driver to {MIN_DRIVER.get(found.version[0], 'a newer one')}, or name a toolkit "
                remedy += f"of CUDA {served[0]}, {tools.dotted(tools.MIN_NVCC)} or newer, in CUDA_HOME"
                yield Check(name, WARNING, f"{seen}; what it compiles does not run on this driver", remedy)
            else:
                yield Check(name, OK, seen)
