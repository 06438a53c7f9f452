"""Shared-memory layouts, packed orders and the work schedule, proved on the host by tests/host/layout_test.cpp.

Regressions these catch: two chunks of a tile at one address, bank conflicts, V packed in another order than P V reads,
a schedule that skips or repeats query tiles or walks keys that no row sees, a tile of the matrix that nobody proved.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from compilers import ROOT, nvcc

from codegen.families.warp.derive import row_pitch
from codegen.matrix import SM89_HEAD_DIMS, SM89_TILES

pytestmark = pytest.mark.xdist_group("layout")  # one process compiles the program


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The program's output, one line a property."""
    program = tmp_path_factory.mktemp("layout") / "layout_test"
    built = nvcc("-x", "c++", ROOT / "tests" / "host" / "layout_test.cpp", "-o", program)
    assert built.returncode == 0, built.stderr
    result = subprocess.run([str(program)], capture_output=True, text=True)
    failed = [line for line in result.stdout.splitlines() if line.startswith("FAILED")]
    assert result.returncode == 0 and failed == [], failed
    return result.stdout.splitlines()


def test_the_program_counts_no_failure(lines: list[str]) -> None:
    assert lines[-1] == "0 failures"
    assert all(line.startswith("ok ") for line in lines[:-1])


@pytest.mark.parametrize(
    "property_",
    [
        "bijective",
        "ldmatrix conflict-free",
        "cp.async conflict-free",
        "advance equals offset",
        "where CuTe's swizzle says",
    ],
)
def test_every_tile_that_a_variant_can_have_is_proved(lines: list[str], property_: str) -> None:
    """Q (tile_m x head_dim), K (tile_n x head_dim) and V^T (head_dim x tile_n) of the whole declared matrix."""
    shapes = {(rows, d) for tile in SM89_TILES for d in SM89_HEAD_DIMS for rows in (tile.m, tile.n)}
    shapes |= {(d, tile.n) for tile in SM89_TILES for d in SM89_HEAD_DIMS}
    proved = {line for line in lines if line.startswith(f"ok {property_} ")}
    missing = sorted((rows, width) for rows, width in shapes if f"ok {property_} {rows} x {width}" not in proved)
    assert missing == []


@pytest.mark.parametrize(
    "property_",
    [
        "packed keys",
        "packed columns",
        "divisors divide",
        "schedule visits",
        "causal schedule visits",
        "items visit",
        "causal items visit",
    ],
)
def test_orders_and_schedules_are_proved(lines: list[str], property_: str) -> None:
    assert any(line.startswith(f"ok {property_}") for line in lines)


def test_the_generator_and_the_kernels_agree_on_row_pitches(tmp_path: Path) -> None:
    widths = sorted({*SM89_HEAD_DIMS, *(tile.n for tile in SM89_TILES)})
    checks = "\n".join(f"static_assert(fp8cutlass::SmemTile<64, {w}>::kPitch == {row_pitch(w)});" for w in widths)
    source = tmp_path / "pitch.cpp"
    source.write_text(f'#include "fp8cutlass/layout.h"\n{checks}\n')
    built = nvcc("-x", "c++", "-Xcompiler", "-fsyntax-only", "-c", source, "-o", tmp_path / "pitch.o")
    assert built.returncode == 0, built.stderr
