"""Tuning the generator's table: who competes, who gets rows, what is refused, without a card."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from test_benchmarks import row

from benchmarks import candidates, tune
from benchmarks.__main__ import cli
from benchmarks.candidates import (
    Field,
    complete,
    fields_of,
    legal,
    losers,
    measured_shapes,
    problem_of,
    shape_of,
    tunable,
)
from benchmarks.results import WRONG, Row
from benchmarks.shapes import Shape, held_out, select, square
from benchmarks.tune import GENERATED, Plan, TuneError, adopt, make_plan, time_all
from codegen import evidence
from codegen.axes import Softmax
from codegen.evidence import Class
from codegen.legal import check
from codegen.variant import parse_id

ROOT = Path(__file__).resolve().parents[2]
LLM: Class = (128, True, Softmax.LINEAR)
ONE = Shape(128, True, 4096, 4096, 1, 64, 8)  # heavy, like the next
TWO = Shape(128, True, 3500, 3500, 1, 64, 8)
SMALL = Shape(128, True, 300, 300, 1, 32, 8)  # 160 tiles: two waves


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan("sm90a", [ONE, TWO, SMALL], [Softmax.LINEAR], 0)


def ids(load: str) -> list[str]:
    """Kernels with rows for a load of the class, by id."""
    return sorted(v.id for v in legal(LLM) if v.shape in measured_shapes(LLM, load))


def rows_of(times: dict[Shape, dict[str, float]]) -> list[Row]:
    return [row(shape, "fp8cutlass", us, kernel=kernel) for shape, of in times.items() for kernel, us in of.items()]


# Who competes


def test_shapes_and_problems_are_one(plan: Plan) -> None:
    for shape in plan.shapes[LLM]:
        assert shape_of(problem_of(shape), LLM) == shape
    assert [problem_of(shape).load for shape in (ONE, TWO, SMALL)] == ["heavy", "heavy", "wave2"]


def test_every_legal_kernel_of_a_class_is_a_candidate(plan: Plan) -> None:
    """Of the one mode that rows are of; the ledger's OUTRANKED ones as well."""
    assert plan.kernels[LLM] == [v.id for v in legal(LLM)] and len(plan.ids) == len(set(plan.ids)) > 50
    for kernel in plan.ids:
        v = parse_id(kernel)
        assert check(v) is None
        assert (v.head_dim, v.causal, v.softmax, v.scaling, v.dtype, v.out) == (*LLM, "block", "e4m3", "bf16")
    assert set(plan.defaults[LLM].values()) <= set(plan.ids)


def test_the_model_may_narrow_but_not_lose_who_is_there(plan: Plan) -> None:
    few = make_plan("sm90a", [ONE, TWO, SMALL], [Softmax.LINEAR], 2).ids
    assert {*ids("heavy"), *ids("wave2"), *ids("few"), *plan.defaults[LLM].values()} <= set(few) < set(plan.ids)


def test_what_is_held_out_is_never_tuned_on() -> None:
    shapes = select("named")
    kept = tunable([*shapes, square(1, 8, 512, 80, False)])
    assert kept == [shape for shape in shapes if not held_out(shape)] and len(kept) < len(shapes)


# Who gets rows


def test_a_kernel_enters_where_it_beats_all_that_are_there(plan: Plan) -> None:
    """By more than noise; then everything is timed on the problems that have rows, for they must not have holes."""
    present, default = ids("heavy"), plan.defaults[LLM][ONE]
    new = next(kernel for kernel in plan.ids if kernel not in present)
    fast = {kernel: 100.0 for kernel in present}

    def field(us: float) -> Field:
        (found,) = fields_of(LLM, [ONE, TWO], rows_of({ONE: {**fast, new: us}, TWO: fast}), plan.defaults[LLM])
        return found

    assert default in present
    assert field(99.5) == Field(LLM, "heavy", tuple(present), (ONE, TWO))
    entered = field(98.0)
    assert set(entered.kernels) == {*present, new}
    old = {shape_of(p, LLM) for p in evidence.evidence()[LLM] if p.load == "heavy"}
    assert entered.shapes[:2] == (ONE, TWO) and set(entered.shapes) == {ONE, TWO, *old} and len(old) > 5


def test_loads_are_apart(plan: Plan) -> None:
    times = {shape: {kernel: 5.0 for kernel in plan.ids} for shape in (ONE, SMALL)}
    found = fields_of(LLM, [ONE, SMALL], rows_of(times), plan.defaults[LLM])
    assert [(field.load, field.shapes[0]) for field in found] == [("heavy", ONE), ("wave2", SMALL)]
    assert not fields_of(LLM, [ONE], [], plan.defaults[LLM]), "a shape without a right result has no rows"


def test_a_kernel_with_a_wrong_result_is_left_out_everywhere() -> None:
    field = Field(LLM, "heavy", ("a", "b"), (ONE, TWO))
    rows = rows_of({ONE: {"a": 1.0, "b": 2.0}, TWO: {"a": 1.0}})
    rows.append(Row(TWO, "fp8cutlass", "fp8", WRONG, "far off", kernel="b", median_us=0.1))
    kept, dropped = complete(field, rows)
    assert [(r.shape, r.kernel) for r in kept] == [(ONE, "a"), (TWO, "a")]
    assert dropped == [f"b has no right result on {TWO.label}"]


def test_losing_to_the_choice_before_is_told() -> None:
    times = {ONE: {"old": 100.0, "new": 100.9}, TWO: {"old": 100.0, "new": 101.1}, SMALL: {"old": 1.0}}
    every = {shape: "old" for shape in times}
    assert losers(every, every, times) == []
    found = losers(every, {shape: "new" for shape in times}, times)
    assert [line.partition(":")[0] for line in found] == [TWO.label, SMALL.label]
    assert "new takes 101.10 us, old took 100.00" in found[0] and "was not timed" in found[1]


# What happens on a card


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[object]]:
    """`measure` with made-up times: the newcomer 80 us, all others 100; what was asked for is remembered."""
    asked: dict[str, list[object]] = {"shapes": [], "kernels": [], "settings": []}

    def measure(shape: Shape, peers: list[tune.Own], settings: object) -> list[Row]:
        (own,) = peers
        kernels = {own._kernel, *own._among}
        asked["shapes"].append(shape)
        asked["kernels"].append(kernels)
        asked["settings"].append(settings)
        us = {kernel: 80.0 if kernel == NEW else 100.0 for kernel in kernels}
        return [
            row(shape, "fp8cutlass", t, kernel=k, chosen=k == own._kernel, launches=1, replays=1) for k, t in us.items()
        ]

    monkeypatch.setattr(tune, "measure", measure)
    return asked


NEW = next(v.id for v in legal(LLM) if v.shape not in measured_shapes(LLM))


class Sink:
    """A writer that keeps nothing."""

    def write(self, rows: Iterable[Row]) -> None:
        for found in rows:
            assert found.contender == "fp8cutlass"


def test_two_rounds(plan: Plan, timed: dict[str, list[object]]) -> None:
    """All candidates briefly on the shapes; then the few at length, on the table's problems as well."""
    rows, tuned = time_all(plan, set(plan.ids), Sink(), time.monotonic() + 60, lambda text: None)  # type: ignore[arg-type]
    assert timed["shapes"][:3] == [ONE, TWO, SMALL]
    assert timed["kernels"][:3] == [set(plan.ids)] * 3
    assert timed["settings"][:3] == [tune.QUICK] * 3 and tune.QUICK not in timed["settings"][3:]
    assert tuned == {LLM: plan.defaults[LLM]}
    kernels = {r.kernel for r in rows}
    assert NEW in kernels and len(kernels) < 20
    assert {ONE, TWO, SMALL} < {r.shape for r in rows}


def test_a_kernel_that_the_emulator_refutes_is_not_timed(plan: Plan, timed: dict[str, list[object]]) -> None:
    time_all(plan, set(plan.ids) - {NEW}, Sink(), time.monotonic() + 60, lambda text: None)  # type: ignore[arg-type]
    assert timed["kernels"] and all(NEW not in kernels for kernels in timed["kernels"])  # type: ignore[operator]


def test_a_kernel_in_use_that_the_emulator_refutes_ends_it(plan: Plan, timed: dict[str, list[object]]) -> None:
    """That is no matter of tuning."""
    for kernel, said in ((plan.defaults[LLM][ONE], "today's choice"), (ids("wave2")[0], "has rows")):
        right = set(plan.ids) - {kernel}
        if kernel in plan.defaults[LLM].values():
            said = "today's choice"
        with pytest.raises(TuneError, match=f"{kernel} .*{said}"):
            time_all(plan, right, Sink(), time.monotonic() + 60, lambda text: None)  # type: ignore[arg-type]


def test_time_that_does_not_suffice_leaves_nothing_half_done(plan: Plan, timed: dict[str, list[object]]) -> None:
    with pytest.raises(TuneError, match="the time is spent"):
        time_all(plan, set(plan.ids), Sink(), 0.0, lambda text: None)  # type: ignore[arg-type]


@pytest.fixture
def own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the generator's file, and no generator: the trial table is the committed one."""
    path = tmp_path / "h200.csv"
    shutil.copyfile(evidence.PATH, path)
    monkeypatch.setattr(evidence, "PATH", path)
    monkeypatch.setattr(tune, "WORK", tmp_path)
    commands: list[tuple[object, ...]] = []

    def run(*command: object) -> None:
        commands.append(command)
        if "--out" in command:
            shutil.copytree(
                GENERATED, tmp_path / "table", ignore=lambda folder, names: {"sm89", "sm90a", "pack"} & {*names}
            )

    monkeypatch.setattr(tune, "_run", run)
    yield path
    assert not path.with_suffix(".before").exists()
    assert not commands or "--out" in commands[0]


STAMP = {"card": "NVIDIA H200", "nvcc": "13.0, V13.0.88", "commit": "abc"}


def test_rows_are_adopted(plan: Plan, timed: dict[str, list[object]], own_table: Path) -> None:
    rows, tuned = time_all(plan, set(plan.ids), Sink(), time.monotonic() + 60, lambda text: None)  # type: ignore[arg-type]
    before = own_table.read_text().splitlines()
    assert adopt(plan, STAMP, rows, tuned) == len(rows)
    table = evidence.read(own_table)[LLM]
    assert table[problem_of(ONE)][parse_id(NEW).shape].us == 80
    after = own_table.read_text().splitlines()
    assert len(before) < len(after) and len(set(before) - set(after)) > 0, "old problems have new rows in place of old"
    with own_table.open(newline="") as file:
        assert {r["commit"] for r in csv.DictReader(file)} > {"abc"}


def test_rows_of_kernels_that_are_forbidden_now_are_no_obstacle(
    timed: dict[str, list[object]], own_table: Path
) -> None:
    """They cannot be built, and so cannot be timed on a new problem."""
    plan = make_plan("sm90a", [ONE, SMALL], [Softmax.EXP2], 1)
    (of,) = plan.shapes
    assert measured_shapes(of) - {v.shape for v in legal(of)}, "no such kernel has rows: this test shows nothing"
    rows, tuned = time_all(plan, set(plan.ids), Sink(), time.monotonic() + 60, lambda text: None)  # type: ignore[arg-type]
    assert adopt(plan, STAMP, rows, tuned) == len(rows)
    assert {problem_of(ONE), problem_of(SMALL)} <= set(evidence.read(own_table)[of])


def test_a_slower_table_is_refused_and_the_file_restored(
    plan: Plan, timed: dict[str, list[object]], own_table: Path
) -> None:
    """The committed table does not know the newcomer: pretend that it was the choice before."""
    rows, tuned = time_all(plan, set(plan.ids), Sink(), time.monotonic() + 60, lambda text: None)  # type: ignore[arg-type]
    before = own_table.read_bytes()
    with pytest.raises(TuneError, match=f"would be slower than the old one: .*{NEW} took 80.00"):
        adopt(plan, STAMP, rows, {LLM: {ONE: NEW}})
    assert own_table.read_bytes() == before


@pytest.mark.parametrize("kind", ["the generator's file", "the rows of the run"])
def test_files_of_another_kind_are_refused_before_anything_is_measured(
    kind: str, plan: Plan, own_table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measurement that cannot be stored is lost. What is there stays."""
    wrong = own_table if kind == "the generator's file" else tmp_path / "tune.csv"
    wrong.write_text("what,us\nattention,1\n")
    monkeypatch.setattr(tune, "use", lambda library: None)
    monkeypatch.setattr(tune.extension, "device_arch", lambda device: "sm90a")
    monkeypatch.setattr(tune, "disagreement", lambda *kernel: pytest.fail("it was measured"))
    with pytest.raises(TuneError, match=rf"could not be stored: .*{wrong.name}"):
        tune.tune_on_card(plan, tmp_path, 60.0, lambda stamp: tmp_path, "abc", lambda text: None)
    assert wrong.read_text() == "what,us\nattention,1\n"


def test_rows_of_an_earlier_run_are_no_obstacle(own_table: Path, tmp_path: Path) -> None:
    with (tmp_path / "tune.csv").open("w", newline="") as file:
        tune.Writer(file, STAMP)
    tune.refuse_files(tmp_path / "tune.csv")
    tune.refuse_files(tmp_path / "none.csv")


def test_holes_are_refused_and_the_file_restored(plan: Plan, own_table: Path) -> None:
    before = own_table.read_bytes()
    with pytest.raises(TuneError, match=r"h200.csv: no row of .* although it was measured on other problems of heavy"):
        adopt(plan, STAMP, rows_of({ONE: {NEW: 10.0}}), {LLM: plan.defaults[LLM]})
    assert own_table.read_bytes() == before


def test_the_build_is_of_the_candidates_and_done_once(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(tune, "WORK", tmp_path)
    monkeypatch.setattr(tune, "_run", lambda *command: commands.append([str(part) for part in command]))
    said: list[str] = []
    library = tune.build(plan, 3, said.append)
    generate, compile_ = commands
    assert generate[1:3] == ["-m", "codegen"] and generate.count("--only") == len(plan.ids) and plan.ids[0] in generate
    assert compile_[1].endswith("build_extension.py") and compile_[-2:] == ["--jobs", "3"]
    assert str(tmp_path / "generated") in compile_ and not said
    built = library.parent / "_built"
    built.mkdir(parents=True)
    library.touch()
    manifest = json.loads((GENERATED / "manifest.json").read_text())
    some = [v for v in manifest["variants"] if v["id"] in plan.ids]
    (built / "manifest.json").write_text(json.dumps(manifest | {"variants": some}))
    tune.build(plan, None, said.append)
    assert len(commands) == 4, "a library without all of them does not do"
    made = [{**some[0], "id": kernel} for kernel in plan.ids]
    (built / "manifest.json").write_text(json.dumps(manifest | {"variants": made}))
    tune.load_manifest.cache_clear()
    tune.build(plan, None, said.append)
    assert len(commands) == 4 and "holds all" in said[0]


def test_a_kernel_is_held_to_the_emulator(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = plan.defaults[LLM][ONE]
    monkeypatch.setattr(torch.Tensor, "cuda", lambda x: x)
    assert tune.disagreement(kernel, 128, True) is None
    monkeypatch.setattr(torch.Tensor, "cuda", lambda x: x * 1.05)
    assert "from the emulator, the limit is 0.008" in str(tune.disagreement(kernel, 128, True))

    def refuse(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel image\nand more")

    monkeypatch.setattr(torch.Tensor, "cuda", refuse)
    assert tune.disagreement(kernel, 128, True) == "no kernel image"


# The commands


def test_the_plan_needs_no_card() -> None:
    found = CliRunner().invoke(cli, ["tune", "--plan", "--shapes", "llm", "--softmax", "linear", "--most", "4"])
    assert found.exit_code == 0, found.output
    held = sum(map(held_out, select("llm")))
    assert "head_dim 128 causal linear: " in found.output and f"{held} shapes are left out" in found.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_says_so() -> None:
    found = CliRunner().invoke(cli, ["tune", "--set", "vision"])
    assert found.exit_code == 2 and "timing needs a CUDA device" in found.output and "--plan" in found.output


def test_what_cannot_be_tuned_is_named() -> None:
    found = CliRunner().invoke(cli, ["tune", "--arch", "sm89", "--plan"])
    assert found.exit_code == 2 and "sm89 (L4, L40S, RTX 4090) has no file of measurements" in found.output
    shape = next(shape for shape in select("vision") if held_out(shape))
    text = f"{shape.batch},{shape.heads},{shape.seqlen_q},{shape.head_dim}"
    found = CliRunner().invoke(cli, ["tune", "--plan", "--shape", text])
    assert found.exit_code == 2 and "no shape is left" in found.output
    assert candidates.refusal("sm90a") is None


def test_the_generator_knows_no_torch() -> None:
    code = "import sys, codegen.cli; sys.exit('torch' in sys.modules or 'benchmarks' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 0
