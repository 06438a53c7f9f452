"""Named sets of problems, shapes from the command line, and the third that nothing is tuned on."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from benchmarks.options import Wanted, shape_options
from benchmarks.shapes import HISTORY, NAMED, SETS, Shape, held_out, parse, select, square
from codegen.evidence import PATH, read
from codegen.matrix import head_dims

VISION = ["(64, 12, 577, 64) full", "(8, 16, 197, 64) full"]  # held out


def test_labels_tell_shapes_apart() -> None:
    every = {shape for name in SETS for shape in select(name)} | {Shape(64, True, 1, 512, 1, 8, 2)}
    assert len({shape.label for shape in every}) == len(every)


def test_no_set_has_a_shape_twice_or_one_that_kernels_do_not_serve() -> None:
    """A mask over unlike lengths would be aligned in one way by us and in another by FlashAttention."""
    for name in SETS:
        shapes = SETS[name]()
        assert shapes and len(set(shapes)) == len(shapes), name
        for shape in shapes:
            assert shape.head_dim in head_dims("sm90a") and shape.heads % shape.kv_heads == 0, shape
            assert not shape.causal or shape.seqlen_q == shape.seqlen_k, shape


def test_the_named_sets_are_what_they_are_called() -> None:
    assert HISTORY in select("grid")
    assert {(s.heads, s.kv_heads) for s in select("llm")} == {(64, 8), (32, 8)}
    assert all(s.causal and s.head_dim == 128 for s in select("llm"))
    assert {s.seqlen_q for s in select("decode")} <= set(range(1, 17)) and {1, 16} <= {
        s.seqlen_q for s in select("decode")
    }
    assert {s.seqlen_k for s in select("diffusion")} == {4250, 17550, 33000}
    assert all(s.seqlen_k % 64 for s in select("diffusion", "vision"))
    assert {s.head_dim for s in select("diffusion")} == {64, 128}
    assert {s.seqlen_k for s in select("vision")} == {197, 577}
    assert {s.seqlen_k for s in select("cross")} == {77, 256, 512}
    assert all(s.seqlen_q > s.seqlen_k for s in select("cross"))
    lengths = {s.seqlen_k for s in select("long")}
    assert (min(lengths), max(lengths)) == (32768, 262144)
    assert set(select("named")) == {shape for name in NAMED for shape in select(name)}


def test_sets_and_single_shapes_are_joined_once() -> None:
    extra = Shape(96, False, 7, 9, 2, 4, 2)
    assert select("history", "grid", extra=[HISTORY, extra]) == [*select("grid"), extra]
    assert select("history", extra=[extra], head_dims=[96]) == [extra]


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("1,8,512,64", HISTORY),
        ("2,64/8,4096,128,causal", Shape(128, True, 4096, 4096, 2, 64, 8)),
        (" 1, 32/8, 16x262144, 128, full", Shape(128, False, 16, 262144, 1, 32, 8)),
    ],
)
def test_a_shape_is_read(text: str, shape: Shape) -> None:
    assert parse(text) == shape


def test_labels_can_be_given_back() -> None:
    for shape in select("named", "cells"):
        sizes, mask = shape.label[1:].split(") ")
        assert parse(f"{sizes},{mask}") == shape


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1,8,512", "is not B,H"),
        ("1,8,512,64,top", "is not B,H"),
        ("1,8,-5,64", "is not B,H"),
        ("1,8,0,64", "at least 1"),
        ("1,8/3,512,64", "3 heads of K and V do not divide 8"),
        ("1,8,512,257", "head_dim 257 is beyond 256"),
    ],
)
def test_what_is_no_shape_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse(text)


def test_the_held_out_third() -> None:
    """Of the shapes that are no cell of the table, in every set; the same ones on every machine."""
    cells = set(select("cells"))
    others = [shape for shape in select("named") if shape not in cells]
    share = sum(map(held_out, others)) / len(others)
    assert 0.28 < share < 0.4
    assert not any(map(held_out, cells))
    for name in ("llm", "decode", "diffusion", "vision", "cross", "long"):
        assert {held_out(shape) for shape in select(name)} == {False, True}, name
    assert [shape.label for shape in select("vision") if held_out(shape)] == VISION


def test_nothing_was_tuned_on_what_is_held_out() -> None:
    tuned = {
        Shape(head_dim, causal, p.seqlen_q, p.seqlen_k, p.batch, p.heads, p.kv_heads)
        for (head_dim, causal, _), problems in read(PATH).items()
        for p in problems
    }
    assert tuned and [shape.label for shape in tuned if held_out(shape)] == []


def asked(*arguments: str) -> Wanted | str:
    """What a command with the options gets, or its error."""
    got = []

    @click.command()
    @shape_options("history")
    def command(wanted: Wanted) -> None:
        got.append(wanted)

    result = CliRunner().invoke(command, arguments)
    return got[0] if got else result.output


def test_shapes_of_a_command() -> None:
    """Shapes alone leave the default set out; files are named after what was asked for."""
    assert asked() == Wanted([HISTORY], "history")
    extra = Shape(128, False, 16, 512, 1, 32, 8)
    assert asked("--shape", "1,32/8,16x512,128") == Wanted([extra], "shapes")
    assert asked("--set", "history", "--set", "vision", "--shape", "1,32/8,16x512,128") == Wanted(
        [HISTORY, *select("vision"), extra], "history-vision-shapes"
    )
    assert asked("--set", "grid", "--head-dim", "128", "--seqlen", "512", "--mask", "full") == Wanted(
        [square(32, 16, 512, 128, False)], "grid"
    )
    assert "no shape passes the filters" in str(asked("--seqlen", "7"))
    assert "is not B,H" in str(asked("--shape", "1,2"))
    assert "'nonsense' is not one of" in str(asked("--set", "nonsense"))
