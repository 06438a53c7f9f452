"""`python -m codegen explain`: the kernel of the table, what decided, who was outranked and who is illegal.

Regressions these catch: an explanation that names another kernel than the table holds, a rival that is left out,
numbers shown as measured, a problem outside the table that gets an answer.
"""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner, Result

from codegen.arch import TARGETS
from codegen.axes import Operand, Out, Scaling
from codegen.cli import main
from codegen.explain import explain
from codegen.families import model_card
from codegen.keys import SOFTMAXES, Key, load_of, seqlen_bucket
from codegen.profiles import of_profile
from codegen.select import rivals, select
from codegen.table import CRITERIA, built, decide
from codegen.variant import Variant, parse_id


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
@pytest.mark.parametrize("precision", ["fast", "balanced", "accurate"])
def test_explain_names_what_the_table_holds(
    arch: str, head_dim: int, seqlen: int, batch: int, heads: int, precision: str
) -> None:
    problem = ["--head-dim", head_dim, "--seqlen", seqlen, "--batch", batch, "--heads", heads, "--causal"]
    output = run("--arch", arch, "--precision", precision, *map(str, problem)).output
    key = Key(
        arch=arch,
        head_dim=head_dim,
        seqlen=seqlen_bucket(seqlen),
        dtype=Operand.E4M3,
        out=Out.BF16,
        scaling=Scaling.BLOCK,
        causal=True,
        precision=precision,
        load=load_of(batch * heads, seqlen, model_card(arch).sms),
    )
    decision = decide(key, select().emitted)
    assert decision.variant is not None and decision.criterion in CRITERIA
    assert f"kernel   {decision.variant}\n" in output
    assert f"because  {decision.criterion}" in output
    assert f"{decision.cost_us:.1f} us" in output
    assert ("evidence model, not measured: " in output) == decision.evidence.startswith("model of ")
    assert f" {key.load} load" in output and all(card in output for card in TARGETS[arch].cards)
    assert "emulated" not in output
    outranked, illegal = output.partition("outranked")[2].split("illegal:\n")
    winner = parse_id(decision.variant)
    rejected = {v: r for v, r in select().rejected if r.rule != "OUTRANKED"}
    for v in rivals(winner):
        name = v.shape
        if v in rejected:
            assert re.search(rf"^ +{name} +{re.escape(f'{rejected[v].rule}: {rejected[v].message}')}$", illegal, re.M)
        elif v != winner:
            mark = r"\*" if v in select().emitted else " "
            assert re.search(rf"^  {mark} {name} +\d+\.\d\d  \(", outranked, re.M), name
    assert len(outranked.strip().splitlines()) + len(illegal.strip().splitlines()) == len(rivals(winner))


@pytest.mark.parametrize(
    ("arch", "head_dim", "padded"), [("sm89", 72, 96), ("sm89", 192, 256), ("sm90a", 32, 64), ("sm90a", 160, 192)]
)
def test_explain_pads_head_dim_and_says_so(arch: str, head_dim: int, padded: int) -> None:
    output = run("--arch", arch, "--head-dim", str(head_dim), "--seqlen", "128").output
    assert output.startswith(f"head_dim {head_dim} is zero-padded to {padded}\n")
    assert f"kernel   {arch}_fwd_d{padded}_" in output


def test_explain_says_that_a_kernel_is_emulated() -> None:
    """In a profile where the family made for the target lacks what the problem needs."""

    def needs(v: Variant) -> tuple[object, ...]:
        return v.head_dim, v.scaling, v.dtype, v.out, v.mask

    kernels = built(of_profile(select().emitted, "ci"), ("sm90a",), False)
    served = {needs(v) for v in kernels if v.family == "sm90a"}
    v = next(v for v in kernels if v.family == "sm89" and needs(v) not in served)
    precision = next(name for name, softmaxes in SOFTMAXES.items() if v.softmax in softmaxes)
    asked = {"head-dim": v.head_dim, "dtype": v.dtype, "out-dtype": v.out, "scaling": v.scaling, "precision": precision}
    options = [x for name, value in asked.items() for x in (f"--{name}", str(value))]
    problem = ("--seqlen", "128", "--causal" if v.causal else "--full", *options, "--profile", "ci")
    output = run("--arch", "sm90a", *problem).output
    assert "family   sm89, emulated on sm90a" in output and f"kernel   {v.id}" in output
    assert "emulated" not in run("--arch", "sm89", *problem).output
    assert "emulated" not in run("--arch", "sm90a", *problem[:-2]).output


def test_explain_names_the_next_kernel_and_by_how_much() -> None:
    key = Key(
        arch="sm90a",
        head_dim=64,
        seqlen=6,
        dtype=Operand.E4M3,
        out=Out.BF16,
        scaling=Scaling.BLOCK,
        causal=False,
        precision="fast",
        load="heavy",
    )
    shapes = (
        "m128n128w8_s2_block_full_e4m3_bf16_linear_overlap_solo",
        "m64n64w4_s2_block_full_e4m3_bf16_linear_serial_solo",
    )
    emitted = tuple(parse_id(f"sm90a_fwd_d64_{shape}") for shape in shapes)
    decision = decide(key, emitted)
    assert decision.runner_up == emitted[1].id and decision.runner_up_cost_us > decision.cost_us
    ratio = decision.runner_up_cost_us / decision.cost_us
    line = next(line for line in explain(key, emitted).splitlines() if line.startswith("next "))
    assert line == (
        f"next     {emitted[1].shape}: {decision.runner_up_cost_us:.1f} us modelled, {ratio:.2f} of the kernel's"
    )


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (("--dtype", "e5m2", "--scaling", "token"), "E5M2-TOKEN"),
        (("--dtype", "e5m2", "--scaling", "head", "--out-dtype", "e4m3"), "E5M2-OUT"),
        (("--scaling", "token", "--out-dtype", "e4m3"), "E4M3-OUT-TOKEN"),
        (("--scaling", "token", "--profile", "dev"), "NOT-BUILT"),
    ],
)
def test_explain_says_why_there_is_no_kernel(arguments: tuple[str, ...], rule: str) -> None:
    output = run("--arch", "sm89", "--head-dim", "64", "--seqlen", "128", *arguments).output
    assert f"kernel   none: {rule}: " in output


def test_explain_takes_load_and_queries() -> None:
    problem = ("--arch", "sm89", "--head-dim", "64", "--seqlen", "4096", "--heads", "8")
    assert " heavy load" in run(*problem).output
    assert " half load" in run(*problem, "--queries", "128").output
    assert " short load" in run(*problem[:-1], "15", "--queries", "1").output
    assert " few load" in run(*problem[:-1], "4", "--queries", "1").output
    assert " wave3 load" in run(*problem, "--load", "wave3").output


def test_explain_as_a_function_needs_no_command_line() -> None:
    key = Key(
        arch="sm89",
        head_dim=64,
        seqlen=0,
        dtype=Operand.E4M3,
        out=Out.BF16,
        scaling=Scaling.BLOCK,
        causal=False,
        precision="fast",
        load="wave1",
    )
    assert explain(key, ()).endswith("not in the profile or filter that was generated")
