"""Who may import whom in python/fp8cutlass: docs/design/architecture.md has the picture."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "fp8cutlass"
BASE = "base"  # modules beside the rooms: errors, log, manifest, memory, timing
# Of each room, the rooms whose modules it may import; its own and the base are open to all.
MAY_IMPORT: dict[str, set[str]] = {
    BASE: set(),
    "masks": {"native"},
    "quant": set(),
    "emulator": set(),
    "native": {"quant"},
    "choose": {"native"},
    "cache": {"choose", "native", "quant"},
    "call": {"masks", "quant", "emulator", "native", "choose", "cache"},
    "api": {"masks", "quant", "choose", "cache", "call"},
    "parallel": {"api", "cache", "call", "choose"},
    "integrations": {"api", "cache", "parallel"},
    "accuracy": {"quant", "emulator", "choose", "call", "api"},
    "cli": {"emulator", "native", "choose", "call", "api", "accuracy"},
}
OPEN = {"__init__", "__main__"}  # the package's own front doors


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def room_of(module: str) -> str:
    """``module`` is dotted, below fp8cutlass."""
    first = module.split(".")[0]
    return first if (PACKAGE / first).is_dir() else BASE


def imported(path: Path) -> set[str]:
    """The modules of the package that one imports anywhere, dotted below fp8cutlass, type-checking imports included."""
    package = list(path.relative_to(PACKAGE).parts[:-1])
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name.removeprefix("fp8cutlass.") for a in node.names if a.name.startswith("fp8cutlass.")}
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level == 0:
            if not (node.module or "").startswith("fp8cutlass"):
                continue
            base = (node.module or "").split(".")[1:]
        else:
            base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
        for alias in node.names:
            whole = [*base, alias.name]
            is_module = PACKAGE.joinpath(*whole).with_suffix(".py").exists()
            found.add(".".join(whole if is_module else base))
    return found - {""}


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_module_imports_from_rooms_that_are_open_to_its_own(path: Path) -> None:
    """A short cut past a room's door would let layers grow into one another again."""
    name = name_of(path)
    if name in OPEN:
        return
    room = room_of(name)
    allowed = MAY_IMPORT[room] | {room, BASE}
    wrong = sorted(other for other in imported(path) if room_of(other) not in allowed)
    assert not wrong, f"{name} is in {room!r}, which may import {sorted(allowed)}, and imports {wrong}"


def test_every_room_has_a_row() -> None:
    rooms = {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()}
    assert rooms == set(MAY_IMPORT) - {BASE}


def test_modules_import_one_another_in_no_circle() -> None:
    edges = {name_of(p): imported(p) for p in modules() if name_of(p) not in OPEN}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"a circle: {' -> '.join([*path[path.index(module) :], module])}"
        if module in done or module not in edges:
            return
        for other in sorted(edges[module]):
            visit(other, (*path, module))
        done.add(module)

    for module in sorted(edges):
        visit(module, ())
