"""Lays the package out as the `kernels` library of Hugging Face loads it, from a folder or from the Hub.

    python scripts/hub_layout.py --out DIR                   # kernels of every target, and the emulator for CPUs
    python scripts/hub_layout.py --out DIR --backend cpu     # the emulator alone: nothing is compiled
    python -c 'import kernels, pathlib; kernels.get_local_kernel(pathlib.Path("DIR"), trust_remote_code=True)'

DIR/build/VARIANT/ is the package, with metadata.json beside its `__init__.py`. `kernels` imports it under the id in
that file. The operators are in a namespace of this id. So an installed package and another version from the Hub may be
in the same process. The command line is left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from scripts import build_extension, toolchain  # noqa: E402  (needs the path above)

PACKAGE = ROOT / "python" / "fp8cutlass"
NAME = "fp8cutlass"
HUB_VERSION = 1  # branch v1 of a repository on the Hub; one more where a call changes its meaning
BACKENDS = ("cuda", "cpu")
LEFT_OUT = ("cli", "accuracy", "__main__.py")  # they are commands
NAMESPACE = re.compile(r'^NAMESPACE = "fp8cutlass"', re.MULTILINE)

# What a model of transformers with attn_implementation="OWNER/fp8cutlass" looks for.
FLASH_NAMES = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")


class LayoutError(RuntimeError):
    """The tree cannot be laid out; the message says why."""


def sources() -> Iterator[Path]:
    """The files of the package that go into the tree, relative to the package."""
    for path in sorted(PACKAGE.rglob("*")):
        inside = path.relative_to(PACKAGE)
        if inside.parts[0] not in LEFT_OUT and (path.suffix == ".py" or path.name == "py.typed"):
            yield inside


def identity(backend: str, profile: str, targets: Sequence[str]) -> str:
    """A name that no other tree has: of what it is made from, 7 hex digits."""
    digest = hashlib.sha256(f"{backend} {profile if backend == 'cuda' else ''} {' '.join(targets)}".encode())
    native = ("csrc", "include", "templates") if backend == "cuda" else ()
    compiled = [path for folder in native for path in sorted((ROOT / folder).rglob("*")) if path.is_file()]
    for path in [*(PACKAGE / inside for inside in sources()), *compiled, *tables()]:
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return f"_{NAME}_{backend}_{digest.hexdigest()[:7]}"


def tables() -> list[Path]:
    """What the package is shipped with: the list of kernels and the tables."""
    return [ROOT / "generated" / name for name in build_extension.TABLES]


def variant(backend: str, cuda: tuple[int, int] | None) -> str:
    """The folder's name, from which `kernels` sees whether it fits: torch's stable ABI, CUDA and processor; nothing of
    these for the emulator, which is Python."""
    if backend == "cpu":
        return "torch-cpu"
    if cuda is None:
        raise LayoutError("the backend cuda needs a version of CUDA")
    abi = re.search(r"TORCH_TARGET_VERSION=0x(..)(..)", (ROOT / "CMakeLists.txt").read_text())
    if abi is None:
        raise LayoutError("CMakeLists.txt does not say which stable ABI of torch the library uses")
    major, minor = (int(x, 16) for x in abi.groups())
    return f"torch-stable-abi{major}{minor}-cu{cuda[0]}{cuda[1]}-{platform.machine()}-linux"


def capabilities(targets: Sequence[str]) -> list[str]:
    """Targets as `kernels` compares them with a card: "8.9"; "9.0a" where code runs on no later card."""
    known = json.loads((ROOT / "generated" / "manifest.json").read_text())["capability"]
    if unknown := [target for target in targets if target not in known]:
        raise LayoutError(f"no such target: {', '.join(unknown)}; expected some of {', '.join(known)}")
    return [f"{known[t][0]}.{known[t][1]}{'a' if t.endswith('a') else ''}" for t in targets]


def metadata(unique: str, backend: str, targets: Sequence[str]) -> dict[str, object]:
    """metadata.json."""
    of: dict[str, object] = {"type": backend}
    if backend == "cuda":
        of["archs"] = capabilities(targets)
    return {
        "name": NAME,
        "id": unique,
        "version": HUB_VERSION,
        "license": "BSD-3-Clause",
        "python-depends": [],
        "backend": of,
    }


def copy_package(folder: Path, unique: str) -> None:
    """The package with operators in the namespace ``unique``, and FlashAttention's three functions at its top."""
    for inside in sources():
        target = folder / inside
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(PACKAGE / inside, target)
    for path in tables():
        target = folder / "_generated" / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    names = folder / "_ops.py"
    text, changed = NAMESPACE.subn(f'NAMESPACE = "{unique}"', names.read_text())
    if changed != 1:
        raise LayoutError(f"{PACKAGE / '_ops.py'} must assign NAMESPACE once, it does so {changed} times")
    names.write_text(text)
    front = folder / "__init__.py"
    public = "".join(f'    "{name}",\n' for name in FLASH_NAMES)
    text = front.read_text().replace("__all__ = [\n", f"__all__ = [\n{public}", 1)
    front.write_text(f"{text}\nfrom .integrations.flash import {', '.join(FLASH_NAMES)}  # noqa: E402\n")
    shutil.copyfile(ROOT / "LICENSE", folder / "LICENSE")


def lay_out(
    out: Path, backend: str, *, profile: str = "release", targets: Sequence[str] = (), build_dir: Path | None = None
) -> Path:
    """Writes out/build/VARIANT and returns it. What was there is replaced once all is made.

    Raises LayoutError, and what the build raises.
    """
    unique = identity(backend, profile, targets)
    name = variant(backend, toolchain.find_nvcc().version if backend == "cuda" else None)
    said = metadata(unique, backend, targets)
    folder, partial = out / "build" / name, out / "build" / f".{name}.partial"
    if partial.exists():
        shutil.rmtree(partial)
    copy_package(partial, unique)
    if backend == "cuda":
        work = build_dir or ROOT / "build" / "-".join(["hub", profile, *targets])
        build_extension.build(partial, profile=profile, archs=targets, build_dir=work, library=f"{unique}_C")
    (partial / "metadata.json").write_text(json.dumps(said, indent=2) + "\n")
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
    return folder


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="repeatable (default: both)")
    parser.add_argument("--profile", choices=build_extension.PROFILES, default="release")
    parser.add_argument("--arch", action="append", help="repeatable (default: every target)")
    parser.add_argument(
        "--build-dir", type=Path, help="work files, those of an earlier build too (default: build/hub-PROFILE-ARCHS)"
    )
    options = parser.parse_args()
    every = json.loads((ROOT / "generated" / "manifest.json").read_text())["archs"]
    try:
        for backend in dict.fromkeys(options.backend or BACKENDS):
            targets = (options.arch or every) if backend == "cuda" else []
            print(lay_out(options.out, backend, profile=options.profile, targets=targets, build_dir=options.build_dir))
    except (LayoutError, build_extension.BuildError, toolchain.ToolchainError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
