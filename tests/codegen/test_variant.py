"""Variant ids: unique, and each parses back to exactly its variant; anything else is refused with a message.

Regressions these catch: an axis that is missing from the id, two points under one id (one kernel file would overwrite
the other), an id that is accepted under two spellings, a typing error that becomes another kernel.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codegen.axes import Change, Cluster, Kind, Mask, Operand, Scaling, Schedule, Softmax, Tile, Walk
from codegen.axes.axis import Axis
from codegen.matrix import MATRICES, Matrix
from codegen.variant import AXES, Variant, axis_text, parse_id

POINTS = [v for matrix in MATRICES for v in matrix.points]
GOOD = "sm89_fwd_d64_m128n64w4_s2_block_causal_e4m3_bf16_linear"
HOPPER = "sm90a_fwd_d128_m128n192w8_s3_block_full_e4m3_bf16_linear_pingpong_solo"


def test_every_declared_id_parses_back() -> None:
    wrong = [v.id for v in POINTS if parse_id(v.id) != v]
    assert wrong == []


def test_ids_are_unique() -> None:
    assert len({v.id for v in POINTS}) == len(POINTS) == sum(matrix.size for matrix in MATRICES)


def test_the_example_parses_to_its_fields() -> None:
    v = parse_id(GOOD)
    assert v.id == GOOD
    assert (v.family, v.kind, v.head_dim, v.tile, v.stages) == ("sm89", Kind.FWD, 64, Tile(m=128, n=64, warps=4), 2)
    assert (v.tile_m, v.tile_n, v.warps, v.score) == (128, 64, 4, "f16")
    assert v.scaling is Scaling.BLOCK and v.causal
    assert [axis_text(getattr(v, axis)) for axis in AXES] == [
        *(
            "sm89",
            "fwd",
            "64",
            "m128n64w4",
            "2",
            "block",
            "causal",
            "e4m3",
            "bf16",
            "linear",
            "multistage",
            "solo",
            "dense",
            "unchanged",
        )
    ]


def test_an_id_with_schedule_and_cluster() -> None:
    v = parse_id(HOPPER)
    assert v.id == HOPPER
    assert (v.schedule, v.cluster, v.cluster.ctas) == (Schedule.PINGPONG, Cluster.SOLO, 1)
    assert (v.tile_m, v.tile_n, v.warps, v.warpgroups, v.causal) == (128, 192, 8, 2, False)
    assert v.shape == "m128n192w8_s3_pingpong_solo"
    assert parse_id(GOOD).shape == "m128n64w4_s2"


def test_schedule_and_cluster_stand_in_an_id_unless_both_are_plain() -> None:
    """Or an sm89 kernel would get a second name, and two kernels of another family could share one."""
    for v in POINTS:
        plain = v.schedule is Schedule.MULTISTAGE and v.cluster is Cluster.SOLO
        assert plain == (v.family == "sm89")
        rest = {Walk.DENSE: "", Walk.RAGGED: "_ragged"}[v.walk]
        rest += {Change.NONE: "", Change.TANH: "_capped", Change.BIAS: "_biased"}[v.change]
        assert v.id.endswith((str(v.softmax) if plain else f"{v.softmax}_{v.schedule}_{v.cluster}") + rest)


def test_mask_and_walk_in_an_id() -> None:
    """The mask stands where it always stood; a walk is named where it is not dense."""
    v = replace(parse_id(HOPPER), mask=Mask.WINDOW, walk=Walk.RAGGED)
    assert v.id == HOPPER.replace("_full_", "_window_") + "_ragged" and parse_id(v.id) == v
    assert (v.causal, v.windowed, v.shape) == (True, True, parse_id(HOPPER).shape)
    plain = replace(parse_id(GOOD), walk=Walk.RAGGED)
    assert plain.id == GOOD + "_ragged" and parse_id(plain.id) == plain
    assert [(m.diagonal, m.windowed) for m in Mask] == [(False, False), (True, False), (True, True), (False, False)]
    assert [m for m in Mask if m.listed] == [Mask.BLOCKS]


def test_every_product_of_values_parses_back() -> None:
    """Also those that no matrix declares."""
    base = parse_id(HOPPER)
    axes = ("mask", "dtype", "softmax", "schedule", "cluster", "walk", "change")
    for values in itertools.product(Mask, Operand, Softmax, Schedule, Cluster, Walk, Change):
        v = replace(base, **dict(zip(axes, values, strict=True)))
        assert parse_id(v.id) == v


def test_a_value_states_every_fact_that_its_axis_declares() -> None:
    with pytest.raises(TypeError, match=r"'b' states \['width'\], its class declares \['height', 'width'\]"):

        class Box(Axis):
            height: int
            width: int

            A = "a", {"height": 1, "width": 2}
            B = "b", {"width": 2}


def test_a_cluster_has_the_ctas_of_its_name() -> None:
    assert {str(c): c.ctas for c in Cluster} == {"solo": 1, "split2": 2, "split4": 4}


def test_the_matrix_and_the_variant_have_the_same_axes() -> None:
    assert ("family", "kind", *Matrix.AXES) == AXES


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "''"),
        ("nonsense", "nonsense"),
        (GOOD.upper(), GOOD.upper()),
        (GOOD + " ", GOOD),
        (GOOD + "\n", GOOD),
        (GOOD.replace("_s2", ""), "is not a variant id"),
        (GOOD.replace("fwd", "bwd"), "bwd"),
        (GOOD.replace("causal", "diagonal"), "diagonal"),
        (GOOD.replace("e4m3", "fp8"), "fp8"),
        (GOOD.replace("bf16", "f32"), "f32"),
        (GOOD.replace("block", "row"), "row"),
        (GOOD.replace("linear", "exp"), "exp"),
        (GOOD.replace("d64", "d064"), "d064"),
        (GOOD.replace("d64", "d٦٤"), "d٦٤"),
        (GOOD.replace("d64", "d-64"), "d-64"),
        (GOOD + "_multistage_solo", "multistage_solo"),
        (GOOD + "_pingpong", "is not a variant id"),
        (GOOD + "_dense", "_dense"),
        (GOOD + "_unchanged", "_unchanged"),
        (GOOD + "_capped_biased", "is not a variant id"),
        (HOPPER + "_biased_ragged", "_biased_ragged"),
        (HOPPER.replace("_solo", "_ragged"), "is not a variant id"),
        (HOPPER.replace("pingpong_solo", "ragged_pingpong_solo"), "ragged_pingpong"),
        (HOPPER.replace("_solo", ""), "is not a variant id"),
        (HOPPER.replace("solo", "split3"), "split3"),
        (HOPPER.replace("pingpong", "turns"), "turns"),
    ],
)
def test_what_is_no_id_is_refused(text: str, named: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_id(text)
    assert named in str(error.value)


@given(
    v=st.sampled_from(POINTS),
    at=st.integers(0, 70),
    removed=st.integers(0, 2),
    inserted=st.text(alphabet="0129abdefmnostwx_ ٤²", max_size=2),
)
def test_a_mistyped_id_is_refused_or_another_id(v: Variant, at: int, removed: int, inserted: str) -> None:
    text = v.id[:at] + inserted + v.id[at + removed :]
    try:
        parsed = parse_id(text)
    except ValueError as error:
        assert str(error)
    else:
        assert parsed.id == text
