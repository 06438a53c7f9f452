"""The list of decode kernels: what follows from their shape, and which are in which profile."""

from __future__ import annotations

import pytest

from codegen.arch import SMEM_RESERVED_PER_CTA, TARGETS
from codegen.decode import ALL, FEWEST_STAGES, HEAD_DIMS, WIDE_ROWS, Decode, candidates, decodes_of


def test_every_head_dim_has_units_of_few_rows_on_every_target() -> None:
    assert {(d.target, d.head_dim, r) for d in ALL for r in (8, 16) if d.rows == r} == {
        (t, h, r) for t in TARGETS for h in HEAD_DIMS for r in (8, 16)
    }
    assert len({d.id for d in ALL}) == len(ALL)


@pytest.mark.parametrize("d", ALL, ids=lambda d: d.id)
def test_shared_memory_is_used_and_not_exceeded(d: Decode) -> None:
    """As many CTAs fit as are promised, with stages enough, and one stage more would not fit."""
    target = TARGETS[d.target]
    assert d.smem_bytes <= target.smem_per_block
    assert d.ctas_per_sm * (d.smem_bytes + SMEM_RESERVED_PER_CTA) <= target.smem_per_sm
    if d.wide:
        assert d.stages == 2 and d.tile == 128 and d.threads == 512 and d.ctas_per_sm == 1
        return
    assert d.stages >= FEWEST_STAGES[d.target] and d.tile % 32 == 0
    more = d.ctas_per_sm * (d.smem_with(d.stages + 1) + SMEM_RESERVED_PER_CTA) > target.smem_per_sm
    assert more or d.smem_with(d.stages + 1) > target.smem_per_block or d.stages == 4


def test_candidates_fit_and_are_in_no_profile() -> None:
    found = candidates((128,), ("sm90a",))
    assert len({d.id for d in found}) == len(found) > 10 and all(d.candidate for d in found)
    for d in found:
        target = TARGETS[d.target]
        assert d.ctas_per_sm * (d.smem_bytes + SMEM_RESERVED_PER_CTA) <= target.smem_per_sm
        assert d.smem_bytes <= target.smem_per_block and d.stages >= 2
    assert not set(found) & set(decodes_of("release", tuple(TARGETS)))


def test_profiles_contain_one_another() -> None:
    dev, ci, release = (set(decodes_of(p, tuple(TARGETS))) for p in ("dev", "ci", "release"))
    assert dev < ci < release == set(ALL)
    assert {d.id for d in dev} == {"decode_sm89_d64_r8", "decode_sm90a_d64_r8", "decode_sm90a_d64_r64"}
    for target in TARGETS:
        of = [d for d in ci if d.target == target]
        rows = {d.rows for d in ALL if d.target == target}
        assert {d.head_dim for d in of} == set(HEAD_DIMS) and {d.rows for d in of} == rows
        assert (WIDE_ROWS in rows) == (target == "sm90a")
    assert decodes_of("release", ("sm89",)) == tuple(d for d in ALL if d.target == "sm89")
