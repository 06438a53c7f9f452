"""Which kernel reads keys that were packed for another one, over the whole table: sm90a has three sizes of blocks.

Regressions these catch: a kernel that reads descales of other blocks or scores that do not fit f16, a choice that
leaves the table's own kernel without need, a refusal that does not say why.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from fp8cutlass.call.options import F16_SCORES
from fp8cutlass.choose.dispatch import decide, unchosen
from fp8cutlass.choose.problem import Problem
from fp8cutlass.choose.reuse import KVForm, misfits, readable
from fp8cutlass.errors import NoKernelError, UnsupportedError
from fp8cutlass.manifest import Manifest, Variant, generated_dir

BATCHES = {"few": 1, "half": 32, "wave1": 66, "wave3": 190, "heavy": 300}  # of a head of 128 queries, on 132 SMs
LENGTHS = (64, 300, 1000, 4000, 20_000)


def problem(**changes: Any) -> Problem:
    start = Problem(
        arch="sm90a",
        head_dim=128,
        seqlen_q=128,
        seqlen_k=4000,
        batch=BATCHES["heavy"],
        heads=1,
        dtype="e4m3",
        out="bf16",
        scaling="block",
        causal=False,
        precision="fast",
        sm_count=132,
    )
    return replace(start, **changes)


def choose(asked: Problem, form: KVForm | None = None, kernel: str = "") -> Variant:
    return decide(generated_dir(), asked, kernel, form)[0]


def form_of(variant: Variant) -> KVForm:
    return KVForm(variant.head_dim, variant.key_block, 14.0 if variant.score == "f16" else 448.0)


@pytest.mark.parametrize("precision", ["fast", "balanced", "accurate", "high"])
@pytest.mark.parametrize("scaling", ["tensor", "head", "block", "token"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_every_query_is_served_by_a_kernel_that_reads_what_was_packed(
    head_dim: int, scaling: str, precision: str
) -> None:
    """Packed for one load, mask and length, asked with another: the table's own kernel wherever that one reads it."""
    served = kept = 0
    for seqlen_k, load, causal, other_load, other_causal, out in product(
        LENGTHS, BATCHES, (False, True), BATCHES, (False, True), ("bf16", "fp16", "e4m3")
    ):
        fixed = {"head_dim": head_dim, "scaling": scaling, "precision": precision, "seqlen_k": seqlen_k}
        made_for = choose(problem(**fixed, batch=BATCHES[load], causal=causal))
        asked = problem(**fixed, batch=BATCHES[other_load], causal=other_causal, out=out)
        form = form_of(made_for)
        try:
            own = choose(asked)
        except NoKernelError:  # e4m3 output in token scaling
            continue
        try:
            got = choose(asked, form)
        except NoKernelError as error:
            assert out == "e4m3" and form.key_block > 128, error  # which fewer kernels write
            continue
        assert misfits(got, form, scaling) == [] and scaling in got.scalings
        assert (got.out, got.causal, got.head_dim) == (own.out, own.causal, own.head_dim)
        assert got is own or misfits(own, form, scaling)
        served, kept = served + 1, kept + (got is own)
    assert served and (kept == served or (scaling == "block" and precision in F16_SCORES))


def test_the_same_query_gets_the_kernel_that_it_was_packed_for() -> None:
    for seqlen_k, batch in product(LENGTHS, BATCHES.values()):
        asked = problem(seqlen_k=seqlen_k, batch=batch)
        made_for = choose(asked)
        assert choose(asked, form_of(made_for)) is made_for


def test_the_second_of_a_cell_serves_and_says_so() -> None:
    """128 keys a block, as few queries have them, for many: the fastest kernel for many that reads them."""
    few, heavy = problem(batch=1), problem()
    made_for, (own, _, alone) = choose(few), decide(generated_dir(), heavy, "", None)
    assert made_for.key_block == 128 and own.key_block != 128
    got, _, decision = decide(generated_dir(), heavy, "", form_of(made_for))
    assert got.id == alone.runner_up and decision.cost_us == alone.runner_up_cost_us and decision.runner_up is None
    assert "second in this cell of the table" in decision.criterion
    assert f"{own.id} reads a descale per {own.key_block} keys, packed with one per 128" in decision.criterion


def test_the_nearest_cell_serves_and_says_so(manifest: Manifest) -> None:
    """Where the second does not read the keys: a kernel of the same length before one of another."""
    own, _, decision = decide(generated_dir(), problem(), "", None)
    near = [decide(generated_dir(), problem(batch=batch), "", None)[2] for batch in BATCHES.values()]
    form = form_of(choose(problem(batch=1)))
    got = readable(replace(decision, runner_up=None), near, (), manifest, form, "block", False)
    assert got.variant in [x.variant for x in near] and "near this cell of the table: " + own.id in got.criterion
    assert got.cost_us is None and got.runner_up is None


@pytest.mark.parametrize("precision", ["fast", "balanced", "accurate", "high"])
def test_a_kernel_that_no_cell_chooses_serves_and_says_so(manifest: Manifest, precision: str) -> None:
    """As if the table had no other cell: what is left are all kernels of the call's kind, the fastest of them first."""
    asked = problem(head_dim=64, causal=True, precision=precision)
    own, _, decision = decide(generated_dir(), asked, "", None)
    decision = replace(decision, runner_up=None)
    left = [manifest.find(str(other.variant)) for other in unchosen(manifest, asked, own.id)]
    assert own in left and left[0].cluster == "solo" and left[0].softmax == own.softmax
    assert {(v.head_dim, v.causal, v.out, v.dtype) for v in left} == {(64, True, "bf16", "e4m3")}
    for v in left:
        if not misfits(own, form_of(v), "block"):
            continue
        got = readable(decision, (), unchosen(manifest, asked, own.id), manifest, form_of(v), "block", False)
        assert misfits(manifest.find(str(got.variant)), form_of(v), "block") == []
        assert "chosen by no cell of the table: " + own.id in got.criterion and got.cost_us is None


def test_without_a_linear_kernel_of_these_blocks_an_accurate_one_reads_them() -> None:
    """At head_dim 64 every `linear` kernel with e4m3 output has blocks of 256 keys."""
    got = choose(problem(head_dim=64, out="e4m3"), KVForm(64, 128, 14.0))
    assert (got.softmax, got.key_block, got.out) == ("exp2", 128, "e4m3")


def test_what_no_kernel_reads_is_refused() -> None:
    asked = problem(head_dim=192, out="e4m3", causal=True)
    with pytest.raises(
        NoKernelError, match=r"a descale per \d+ keys, packed with one per 192.*pack key and value again"
    ):
        choose(asked, KVForm(192, 192, 14.0))


def test_keys_that_are_packed_wider_than_they_are() -> None:
    """For a pinned kernel: any of that head_dim reads them, no narrower one does."""
    assert choose(problem(), KVForm(256, 128, 14.0)).head_dim == 256
    with pytest.raises(UnsupportedError, match="head_dim 128, packed are 256 columns"):
        choose(problem(), KVForm(256, 128, 14.0), choose(problem()).id)


def test_a_pinned_kernel_reads_them_or_is_refused(manifest: Manifest) -> None:
    wide = choose(problem())
    assert wide.key_block != 128 and choose(problem(), form_of(wide), wide.id) is wide
    with pytest.raises(UnsupportedError, match=f"kernel='{wide.id}' cannot read.*packed with one per 128") as caught:
        choose(problem(), KVForm(128, 128, 14.0), wide.id)
    assert not isinstance(caught.value, NoKernelError)  # torch's attention is no way out


def test_keys_beyond_f16_scores_are_not_for_linear_kernels() -> None:
    linear, exact = choose(problem()), choose(problem(precision="accurate"))
    assert misfits(linear, form_of(exact), "head") == ["keys of magnitude 14 at most, packed up to 448"]
    assert misfits(exact, form_of(linear), "head") == []
    got = choose(problem(scaling="head"), form_of(exact))
    assert got.softmax == "exp2"
