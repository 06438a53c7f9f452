"""The kernels that keep K and V in shared memory: what follows from their shape, and which are in which profile."""

from __future__ import annotations

import pytest

from codegen.arch import REGISTERS_PER_SM, SMEM_RESERVED_PER_CTA, TARGETS
from codegen.pack import Source
from codegen.resident import ALL, SHAPES, TARGET, Resident, residents_of


def test_every_shape_takes_both_types() -> None:
    assert {(r.head_dim, r.keys, r.source) for r in ALL} == {
        (*shape, source) for shape in SHAPES for source in (Source.BF16, Source.FP16)
    }
    assert len({r.id for r in ALL}) == len(ALL)


@pytest.mark.parametrize("r", ALL, ids=lambda r: r.id)
def test_as_many_ctas_fit_as_are_promised(r: Resident) -> None:
    """In shared memory, and in registers with room for O, P and a part of P V, which live at once."""
    target = TARGETS[TARGET]
    assert r.smem_bytes <= target.smem_per_block
    assert r.ctas_per_sm * (r.smem_bytes + SMEM_RESERVED_PER_CTA) <= target.smem_per_sm
    output, product = r.head_dim // 2, (r.head_dim // r.parts + 8) // 2
    live = product + r.tile // 8 + (output if r.tiles > 1 else 0)
    assert live < REGISTERS_PER_SM // (r.threads * r.ctas_per_sm)


def test_shared_memory_is_what_the_tiles_take() -> None:
    """The sum by hand: Q in 8 and 16 bits, slopes, sums, K, V with ones, a block in 16 bits, descales, maxima,
    barriers, sequences and where row tiles are, in whole KB."""
    r = next(r for r in ALL if (r.head_dim, r.keys) == (128, 512))
    assert r.shape == (2, 4, 1, 1)
    parts = 2 * 64 * 128 * 3 + 2 * 64 * 4 + 256 * 16 + 4 * 128 * 128 + 4 * 128 * 136 + 2 * 128 * 128
    parts += 4 * 8 + 4 * 16 + 8 * (2 + 1 + 2 * 4) + 16 * (32 + 2 * 8) + 2 * 8
    assert r.smem_bytes == -(-parts // 1024) * 1024


def test_profiles_contain_one_another() -> None:
    dev, ci, release = (residents_of(p, tuple(TARGETS)) for p in ("dev", "ci", "release"))
    assert not dev and set(ci) < set(release) == set(ALL) and release == ALL
    assert {r.head_dim for r in ci} == {64, 128} and {r.source for r in ci} == {Source.BF16, Source.FP16}
    assert {r.warpgroups for r in ci} == {w for w, *_ in SHAPES.values()}
    assert residents_of("release", ("sm89",)) == ()
