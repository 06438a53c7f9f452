"""Measurements in place of the model: how rows are read, which cell they speak for, and what they decide.

Regressions these catch: a row of a kernel that no longer exists (its time would silently stop counting), a time that
is taken for another problem, a measured kernel that loses to a modelled one, an emitted set that a measurement refutes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from codegen import evidence, kept, select, table
from codegen.axes import Mask, Operand, Out, Scaling, Softmax
from codegen.cli import main
from codegen.evidence import COLUMNS, PATH, EvidenceError, Problem, read
from codegen.explain import explain
from codegen.keys import LOADS, Key, seqlen_bucket
from codegen.legal import check
from codegen.matrix import MATRICES
from codegen.scaling import key_block
from codegen.variant import Variant, parse_id

ROW = {
    **{"head_dim": "128", "seqlen_q": "4096", "seqlen_k": "4096", "batch": "4", "heads": "16", "kv_heads": "16"},
    **{"causal": "false", "softmax": "linear", "tile": "m128n192w8", "stages": "2", "schedule": "pingpong"},
    **{"cluster": "solo", "us": "450.0", "min_us": "441.5", "card": "NVIDIA H200", "clock_mhz": "1650"},
    **{"toolchain": "nvcc 13.0.88", "commit": "0123abc"},
}
SHAPES = {
    "pingpong": {},
    "overlap": {"schedule": "overlap"},
    "small": {"tile": "m128n128w8", "schedule": "overlap"},
}


for_other_masks = select._for_other_masks


def id_of(**changes: str) -> str:
    r = {**ROW, **changes}
    mask = "causal" if r["causal"] == "true" else "full"
    kernel = f"{r['tile']}_s{r['stages']}_block_{mask}_e4m3_bf16_{r['softmax']}_{r['schedule']}_{r['cluster']}"
    return f"sm90a_fwd_d{r['head_dim']}_{kernel}"


def write(path: Path, *changes: dict[str, str]) -> Path:
    rows = [{**ROW, **change} for change in changes]
    path.write_text("\n".join([",".join(COLUMNS), *(",".join(row[c] for c in COLUMNS) for row in rows)]) + "\n")
    return path


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes these rows the evidence of the generator, for one test, in which a class has what it wins by itself."""
    monkeypatch.setattr(select, "_for_other_masks", lambda *_: [])
    monkeypatch.setattr("codegen.explain.profile_of", lambda v: "release")  # which renders all that is selected
    monkeypatch.setattr(kept, "FOLDER", Path("/dev/null"))  # what is kept follows from the generator as it is

    def forget() -> None:
        for cached in (evidence.evidence, evidence._rows, select._winners, select.select):
            cached.cache_clear()

    def rows(*changes: dict[str, str]) -> None:
        monkeypatch.setattr(evidence, "PATH", write(tmp_path / "h200.csv", *changes))
        forget()

    yield rows
    monkeypatch.undo()
    forget()


def selected() -> select.Selection:
    """What is selected where the rows are: classes compete within themselves, and those of other heads are left out."""
    return select.select(tuple(replace(m, head_dim=(128,)) for m in MATRICES if 128 in m.head_dim))


def times(shape: str, microseconds: float, seqlen: int = 4096, **more: str) -> dict[str, str]:
    return {
        **SHAPES[shape],
        **{"us": str(microseconds), "min_us": str(microseconds), "seqlen_q": str(seqlen), "seqlen_k": str(seqlen)},
        **{"batch": str(16384 // seqlen), **more},
    }


def key(seqlen: int = 4096, load: str = "heavy", scaling: Scaling = Scaling.BLOCK) -> Key:
    return Key(
        arch="sm90a",
        head_dim=128,
        seqlen=seqlen_bucket(seqlen),
        dtype=Operand.E4M3,
        out=Out.BF16,
        scaling=scaling,
        causal=False,
        precision="fast",
        load=load,
    )


def default_class(variants: tuple[Variant, ...]) -> set[str]:
    return {
        v.shape
        for v in variants
        if (v.family, v.kind, v.head_dim, v.scaling) == ("sm90a", "fwd", 128, Scaling.BLOCK)
        and (v.causal, v.dtype, v.out, v.softmax) == (False, Operand.E4M3, Out.BF16, Softmax.LINEAR)
        and not v.special
    }


def test_the_committed_file_can_be_used() -> None:
    for problems in read(PATH).values():
        for shapes in problems.values():
            assert shapes and all(m.card in {"NVIDIA H200", "NVIDIA H100 80GB HBM3"} for m in shapes.values())


def test_a_row_is_read(tmp_path: Path) -> None:
    found = read(write(tmp_path / "h200.csv", {}))
    problem = Problem(batch=4, heads=16, kv_heads=16, seqlen_q=4096, seqlen_k=4096)
    assert list(found) == [(128, False, Softmax.LINEAR)]
    measured = found[128, False, Softmax.LINEAR][problem]["m128n192w8_s2_pingpong_solo"]
    assert (measured.us, measured.min_us, measured.card, measured.clock_mhz) == (450.0, 441.5, "NVIDIA H200", 1650)
    assert (measured.toolchain, measured.commit) == ("nvcc 13.0.88", "0123abc")


def test_no_file_and_no_rows_are_no_evidence(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").touch()
    for path in (tmp_path / "nowhere.csv", tmp_path / "empty.csv", write(tmp_path / "header.csv")):
        assert not read(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tile": "m128n160w8"}, r"tile m128n160w8 is not declared \(m64n64w4"),
        ({"head_dim": "80"}, r"head_dim 80 is not declared"),
        ({"stages": "9"}, r"stages 9 is not declared"),
        ({"schedule": "multistage"}, r"not a variant id|schedule multistage is not declared"),
        ({"cluster": "split8"}, r"not a variant id"),
        ({"softmax": "softmax"}, r"not a variant id"),
        ({"causal": "yes"}, r"causal is 'yes', not true or false"),
        ({"us": "fast"}, r"could not convert string to float: 'fast'"),
        ({"us": "nan"}, r"us nan and min_us 441.5"),
        ({"min_us": "500"}, r"us 450.0 and min_us 500.0 are no median and minimum"),
        ({"batch": "0"}, r"no problem: batch 0"),
        ({"batch": "4.5"}, r"invalid literal"),
        ({"card": ""}, r"no card"),
        ({"commit": "0123abc,more"}, r"not 18 fields"),
    ],
)
def test_a_row_that_cannot_be_used_fails_with_its_line(change: dict[str, str], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "h200.csv", {"seqlen_q": "512"}, change)
    with pytest.raises(EvidenceError, match=rf"^h200\.csv, line 3: .*({message})"):
        read(path)


def test_other_columns_and_second_measurements_fail(tmp_path: Path) -> None:
    path = write(tmp_path / "h200.csv", {}, {"us": "451"})
    with pytest.raises(EvidenceError, match="line 3: .* was measured before on batch 4"):
        read(path)
    path.write_text(path.read_text().replace("head_dim,", "d,", 1))
    with pytest.raises(EvidenceError, match="columns are d,seqlen_q"):
        read(path)


def test_the_check_of_generated_fails_on_a_bad_row(use: Callable[..., None]) -> None:
    use({"tile": "m128n160w8"})
    for command in (["--check"], ["count"], ["explain", "--arch", "sm90a", "--head-dim", "64", "--seqlen", "1"]):
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 1 and "Error: h200.csv, line 2: " in result.output, result.output


def committed() -> list[str]:
    return PATH.read_text().splitlines()


@pytest.mark.parametrize("line", [1, len(committed()) // 2, len(committed()) - 1])
def test_the_check_of_generated_fails_without_a_row(
    line: int, use: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whichever it is: its kernel was measured on other problems."""
    use()
    lines = committed()
    lost = dict(zip(COLUMNS, lines.pop(line).split(","), strict=True))
    path = tmp_path / "less.csv"
    path.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(evidence, "PATH", path)
    result = CliRunner().invoke(main, ["--check"])
    assert result.exit_code == 1, result.output
    shape = f"{lost['tile']}_s{lost['stages']}_{lost['schedule']}_{lost['cluster']}"
    assert f"Error: less.csv: no row of {shape} (head_dim {lost['head_dim']}, " in result.output
    assert f"for batch {lost['batch']}, {lost['heads']} heads" in result.output


def test_a_kernel_that_a_rule_forbids_may_lack_rows(tmp_path: Path) -> None:
    """It was measured before the rule was there, and cannot be built to be measured again."""
    forbidden = {"softmax": "exp2", "tile": "m128n64w8", "stages": "4", "schedule": "pingpong"}
    allowed = {"softmax": "exp2", "tile": "m128n128w8", "stages": "2", "schedule": "serial"}
    kernels = (parse_id(id_of(**forbidden)), parse_id(id_of(**allowed)))
    assert [check(v) is None for v in kernels] == [False, True]
    rows = [{**forbidden, "seqlen_q": "2048", "seqlen_k": "2048"}, allowed]
    path = write(tmp_path / "h200.csv", *rows, {**allowed, "seqlen_q": "2048", "seqlen_k": "2048"})
    assert len(read(path)[128, False, Softmax.EXP2]) == 2
    write(path, {**allowed, "seqlen_q": "2048", "seqlen_k": "2048"}, {**SHAPES["small"], "softmax": "exp2"})
    with pytest.raises(EvidenceError, match="no row of m128n128w8_s2_"):
        read(path)


def test_the_check_of_generated_fails_on_a_renamed_kernel(
    use: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use()
    path = tmp_path / "renamed.csv"
    path.write_text(PATH.read_text().replace(",m128n192w8,", ",m128n196w8,", 1))
    monkeypatch.setattr(evidence, "PATH", path)
    result = CliRunner().invoke(main, ["--check"])
    assert result.exit_code == 1 and "tile m128n196w8 is not declared" in result.output, result.output


def test_the_ledger_names_the_measurements(use: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """So that `--check` notices any change of the file, also one that moves no kernel."""
    said = evidence.digest()
    assert f"\n# measured: {said}\n" in (PATH.parent.parent / "generated" / "ledger.txt").read_text()
    assert said.startswith(f"tuning/h200.csv, {len(committed()) - 1:,} rows, sha256 ")
    digests = {said}
    for change in ({"us": "451"}, {"commit": "other"}):
        use(change)
        digests.add(evidence.digest())
    monkeypatch.setattr(evidence, "PATH", PATH.parent / "nowhere.csv")
    digests.add(evidence.digest())
    assert len(digests) == 4 and "0 rows" in evidence.digest()


def test_several_problems_of_a_cell_speak_together(use: Callable[..., None]) -> None:
    """By the mean of what a kernel loses on each, not by the one that takes longest."""
    long = {"seqlen_q": "4096", "seqlen_k": "4096", "batch": "4"}
    short = {"seqlen_q": "3000", "seqlen_k": "3000", "batch": "5"}
    use(
        *(times("pingpong", 1000, **long), times("overlap", 1030, **long)),
        *(times("pingpong", 12, **short), times("overlap", 10, **short)),
        *(times("pingpong", 1, 2048), times("overlap", 9, 2048)),  # the next bucket has its own
    )
    emitted = tuple(parse_id(id_of(**SHAPES[name])) for name in ("pingpong", "overlap"))
    decision = table.decide(key(), emitted)
    assert decision.variant == id_of(**SHAPES["overlap"])
    assert decision.cost_us == pytest.approx((1030 * 10) ** 0.5, abs=0.01)
    assert decision.runner_up_cost_us == pytest.approx((1000 * 12) ** 0.5, abs=0.01)
    text = explain(key(), emitted)
    assert "101.5 us" in text and "for batch 4, 16 heads" in text and "geometric mean with 1 more; nvcc" in text
    assert table.decide(key(2048), emitted).variant == id_of()


def test_no_rows_for_the_cards_that_nobody_has() -> None:
    """Nothing of sm89 may be called measured, at build time or at run time."""
    head, *blocks = (PATH.parent.parent / "generated" / "times.txt").read_text().split("\n\n")
    model = next(line for line in head.splitlines() if line.endswith(" model of L4")).split(" ")[1]
    rows = [line for block in blocks if block.startswith("sm89") for line in block.splitlines() if line[0].isdigit()]
    assert rows and {time.lstrip("0123456789.") for row in rows for time in row.split(" ")} == {model}
    arguments = ["explain", "--arch", "sm89", "--head-dim", "64", "--seqlen", "512"]
    output = CliRunner().invoke(main, arguments).output
    assert "sm89 (L4, L40S, RTX 4090)" in output
    assert "evidence model, not measured: " in output and " on one L4 at 1.2 GHz" in output


def test_the_measured_winner_is_chosen_and_says_so(use: Callable[..., None]) -> None:
    use(times("pingpong", 450), times("overlap", 440), times("small", 460))
    emitted = tuple(parse_id(id_of(**change)) for change in SHAPES.values())
    decision = table.decide(key(), emitted)
    assert decision.variant == id_of(**SHAPES["overlap"]) and decision.runner_up == id_of()
    assert (decision.cost_us, decision.runner_up_cost_us) == (440, 450)
    assert decision.criterion == "measured time" and decision.evidence == "measured on NVIDIA H200 at 1650 MHz"
    text = explain(key(), emitted)
    assert "evidence measured: 440.0 us (shortest 440.0) on NVIDIA H200 at 1650 MHz for batch 4, 16 heads" in text
    assert "nvcc 13.0.88, commit 0123abc" in text
    assert "next     m128n192w8_s2_pingpong_solo: 450.0 us measured, 1.02 of the kernel's" in text


def test_a_measured_kernel_goes_before_one_that_is_only_modelled(use: Callable[..., None]) -> None:
    use(times("pingpong", 10_000))
    emitted = tuple(parse_id(id_of(**change)) for change in SHAPES.values())
    decision = table.decide(key(), emitted)
    assert decision.variant == id_of() and decision.criterion == "measured, the others are not"
    assert "modelled" in explain(key(), emitted)


@pytest.mark.parametrize(
    ("seqlen", "load", "measured"),
    [
        (4096, "heavy", True),
        (2048, "heavy", True),  # one bucket away
        (8192, "heavy", True),
        (1024, "heavy", False),
        (16384, "heavy", False),
        (4096, "wave4", False),
    ],
)
def test_a_row_speaks_for_its_cell_and_the_next(
    seqlen: int, load: str, measured: bool, use: Callable[..., None]
) -> None:
    use(times("pingpong", 450), times("small", 460))
    decision = table.decide(key(seqlen, load), (parse_id(id_of()), parse_id(id_of(**SHAPES["small"]))))
    assert decision.evidence.startswith("measured") == measured


def test_the_nearest_problem_speaks(use: Callable[..., None]) -> None:
    use(times("pingpong", 450), times("small", 460), times("pingpong", 250, 2048), times("small", 240, 2048))
    emitted = (parse_id(id_of()), parse_id(id_of(**SHAPES["small"])))
    chosen = {s: table.decide(key(s), emitted).cost_us for s in (1024, 2048, 4096, 8192)}
    assert chosen == {1024: 240, 2048: 240, 4096: 450, 8192: 450}


def test_load_is_that_of_the_measured_problem(use: Callable[..., None]) -> None:
    use(times("pingpong", 20, 512, batch="1", heads="8", kv_heads="8"))
    v = parse_id(id_of())
    seen = {load: evidence.measured(v, seqlen_bucket(512), load) is not None for load in LOADS}
    assert [load for load in LOADS if seen[load]] == ["half"]  # 64 tiles on 132 multiprocessors


def test_other_modes_share_what_was_measured_but_not_token(use: Callable[..., None]) -> None:
    use(times("small", 460, softmax="exp2"))
    v = parse_id(id_of(**SHAPES["small"], softmax="exp2"))
    for other, speaks in (("_fp16_", True), ("_e4m3_", True), ("_bf16_", True)):
        w = parse_id(v.id.replace("_bf16_", other))
        assert (evidence.measured(w, seqlen_bucket(4096), "heavy") is not None) == speaks
    assert evidence.measured(parse_id(v.id.replace("_block_", "_token_")), seqlen_bucket(4096), "heavy") is None
    assert evidence.measured(parse_id(v.id.replace("_full_", "_causal_")), seqlen_bucket(4096), "heavy") is None


def test_one_kernel_is_emitted_where_it_is_close_to_the_best_everywhere(use: Callable[..., None]) -> None:
    use(
        *(times("pingpong", 450), times("overlap", 440), times("small", 460)),
        *(times("pingpong", 240, 2048), times("overlap", 242, 2048), times("small", 270, 2048)),
    )
    assert default_class(selected().emitted) == {"m128n192w8_s2_overlap_solo"}
    reasons = {v.shape: r for v, r in selected().rejected if v.id in {id_of(), id_of(**SHAPES["small"])}}
    assert reasons["m128n192w8_s2_pingpong_solo"].message == (
        "measured at 1.01 of the best on average and 0.99 of m128n192w8_s2_overlap_solo in its best cell"
    )


def test_a_key_block_is_read_with_both_masks_or_neither() -> None:
    """What was packed for a call without a causal mask is attended with one, too."""
    blocks: dict[tuple[object, ...], dict[bool, set[int]]] = {}
    for v in select.select().emitted:
        if v.kind == "fwd" and v.out is not Out.E4M3 and not v.special:
            either = select.problem_class(replace(v, mask=Mask.FULL))
            blocks.setdefault(either, {False: set(), True: set()})[v.causal].add(key_block(v))
    assert blocks and all(of[False] == of[True] for of in blocks.values())


def test_what_another_mask_reads_is_added(use: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    use(times("pingpong", 450), times("small", 460))
    alone = {v.id for v in selected().emitted}
    monkeypatch.setattr(select, "_for_other_masks", for_other_masks)
    select.select.cache_clear()
    added = {v.id for v in selected().emitted} - alone
    assert id_of().replace("_full_", "_causal_") in added and alone < {v.id for v in selected().emitted}
    assert not added & {v.id for v, _ in selected().rejected}


def test_as_many_are_emitted_as_bring_every_cell_close(use: Callable[..., None]) -> None:
    use(
        *(times("pingpong", 100), times("overlap", 110), times("small", 120)),
        *(times("pingpong", 110, 1024), times("overlap", 100, 1024), times("small", 110, 1024)),
    )
    assert default_class(selected().emitted) == {"m128n192w8_s2_pingpong_solo", "m128n192w8_s2_overlap_solo"}
    use(
        *(times("pingpong", 100), times("overlap", 110), times("small", 120)),
        *(times("pingpong", 110, 1024), times("overlap", 100, 1024), times("small", 110, 1024)),
        *(times("pingpong", 110, 256), times("overlap", 110, 256), times("small", 100, 256)),
    )
    assert len(default_class(selected().emitted)) == 3


def test_a_rare_mode_gets_fewer_kernels_whatever_was_measured(use: Callable[..., None]) -> None:
    use(
        *(times("pingpong", 100), times("overlap", 110), times("small", 120)),
        *(times("pingpong", 110, 1024), times("overlap", 100, 1024), times("small", 110, 1024)),
    )
    rare = [v for v in selected().emitted if (v.family, v.head_dim, v.out) == ("sm90a", 128, Out.E4M3)]
    classes = Counter(select.problem_class(v) for v in rare)
    assert classes and max(classes.values()) == select.MOST_RARE < select.MOST_MEASURED
