"""`python -m codegen explain`: the kernel of the table, what decided, who was outranked and who is illegal.

Regressions these catch: an explanation that names another kernel than the table holds, a rival that is left out,
numbers shown as measured, a problem outside the table that gets an answer.
"""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner, Result

from codegen.arch import CARDS, MODEL_CARD, TARGETS
from codegen.cli import main
from codegen.explain import explain
from codegen.keys import Key, load_of, seqlen_bucket
from codegen.select import rivals, select
from codegen.spec import Dtype, Out, Scaling, parse_id
from codegen.table import CRITERIA, decide


def run(*arguments: str, fails: bool = False) -> Result:
    """`explain` with these options; a traceback fails the test."""
    result = CliRunner().invoke(main, ["explain", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert (result.exit_code != 0) == fails, result.output
    return result


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--head-dim", "512", "--seqlen", "128"), r"512.*32, 64, 96, 128, 256"),
        (("--head-dim", "0", "--seqlen", "128"), r"head-dim 0"),
        (("--head-dim", "-64", "--seqlen", "128"), r"head-dim -64"),
        (("--head-dim", "64", "--seqlen", "-1"), r"-1"),
        (("--head-dim", "64"), r"--seqlen"),
        (("--head-dim", "64", "--seqlen", "9", "--dtype", "fp16"), r"'fp16' is not one of 'e4m3', 'e5m2'"),
        (("--head-dim", "64", "--seqlen", "9", "--batch", "0"), r"batch"),
    ],
)
def test_explain_errors(arguments: tuple[str, ...], message: str) -> None:
    result = run("--arch", "sm89", *arguments, fails=True)
    assert re.search(message, " ".join(result.output.split())), result.output


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize(
    ("head_dim", "seqlen", "batch", "heads"), [(64, 100, 1, 8), (128, 4096, 4, 32), (256, 64, 2, 2)]
)
@pytest.mark.parametrize("precision", ["fast", "accurate"])
def test_explain_names_what_the_table_holds(
    arch: str, head_dim: int, seqlen: int, batch: int, heads: int, precision: str
) -> None:
    problem = ["--head-dim", head_dim, "--seqlen", seqlen, "--batch", batch, "--heads", heads, "--causal"]
    output = run("--arch", arch, "--precision", precision, *map(str, problem)).output
    key = Key(
        arch=arch,
        head_dim=head_dim,
        seqlen=seqlen_bucket(seqlen),
        dtype=Dtype.E4M3,
        out=Out.BF16,
        scaling=Scaling.BLOCK,
        causal=True,
        precision=precision,
        load=load_of(batch * heads, seqlen, CARDS[MODEL_CARD].sms),
    )
    decision = decide(key, select().emitted)
    assert decision.variant is not None and decision.criterion in CRITERIA
    assert f"kernel   {decision.variant}\n" in output
    assert f"because  {decision.criterion}" in output
    assert f"{decision.cost_us:.1f} us" in output and "not measured" in output
    assert f" {key.load} load" in output and all(card in output for card in TARGETS[arch].cards)
    assert ("emulated" in output) == (arch == "sm90a")
    outranked, illegal = output.partition("outranked")[2].split("illegal:\n")
    winner = parse_id(decision.variant)
    rejected = {v: r for v, r in select().rejected if r.rule != "OUTRANKED"}
    for v in rivals(winner):
        name = f"{v.tile}_s{v.stages}"
        if v in rejected:
            assert re.search(rf"^ +{name} +{re.escape(f'{rejected[v].rule}: {rejected[v].message}')}$", illegal, re.M)
        elif v != winner:
            mark = r"\*" if v in select().emitted else " "
            assert re.search(rf"^  {mark} {name} +\d+\.\d\d  \(", outranked, re.M), name
    assert len(outranked.strip().splitlines()) + len(illegal.strip().splitlines()) == len(rivals(winner))


def test_explain_pads_head_dim_and_says_so() -> None:
    output = run("--arch", "sm89", "--head-dim", "72", "--seqlen", "128").output
    assert output.startswith("head_dim 72 is zero-padded to 96\n")
    assert "kernel   sm89_fwd_d96_" in output


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (("--dtype", "e5m2", "--scaling", "token"), "E5M2-SCALING"),
        (("--dtype", "e5m2", "--scaling", "head", "--out-dtype", "e4m3"), "E5M2-OUT"),
        (("--scaling", "token", "--out-dtype", "e4m3"), "E4M3-OUT-TOKEN"),
        (("--scaling", "head", "--profile", "dev"), "NOT-BUILT"),
    ],
)
def test_explain_says_why_there_is_no_kernel(arguments: tuple[str, ...], rule: str) -> None:
    output = run("--arch", "sm89", "--head-dim", "64", "--seqlen", "128", *arguments).output
    assert f"kernel   none: {rule}: " in output


def test_explain_takes_load_and_queries() -> None:
    problem = ("--arch", "sm89", "--head-dim", "64", "--seqlen", "4096", "--heads", "8")
    assert " heavy load" in run(*problem).output
    assert " light load" in run(*problem, "--queries", "1").output
    assert " light load" in run(*problem, "--load", "light").output


def test_explain_as_a_function_needs_no_command_line() -> None:
    key = Key(
        arch="sm89",
        head_dim=64,
        seqlen=0,
        dtype=Dtype.E4M3,
        out=Out.BF16,
        scaling=Scaling.BLOCK,
        causal=False,
        precision="fast",
        load="light",
    )
    assert explain(key, ()).endswith("not in the profile or filter that was generated")
