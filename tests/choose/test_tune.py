"""`fp8cutlass.tune`: what it measures, what it keeps, whom that speaks for. The timer is made up; the emulator runs."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from reference import randn
from test_dispatch_runtime import BASE
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8cutlass
from fp8cutlass import UnsupportedError, explain
from fp8cutlass.api import tune as tuner
from fp8cutlass.call import memo as eager
from fp8cutlass.call import supports as answers
from fp8cutlass.call.request import request_of
from fp8cutlass.call.settle import settle
from fp8cutlass.choose import dispatch, lowering, tuned
from fp8cutlass.choose.dispatch import decide, serving
from fp8cutlass.choose.problem import Problem
from fp8cutlass.choose.target import Target
from fp8cutlass.choose.tuned import Row, find, location, read, store
from fp8cutlass.cli import main
from fp8cutlass.cli import tune as command
from fp8cutlass.manifest import generated_dir, load_manifest
from fp8cutlass.native import extension
from fp8cutlass.timing import Timing

L4 = ((8, 9), "NVIDIA L4", 58)
PROBLEM = dataclasses.replace(BASE, card="NVIDIA L4", kv_heads=8)


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's file, elsewhere."""
    path = tmp_path / "data" / "mine.json"
    monkeypatch.setenv(tuned.VARIABLE, str(path))
    dispatch.forget()
    yield path
    monkeypatch.undo()
    dispatch.forget()


def rivals(problem: Problem) -> list[str]:
    """Other kernels than the table's for a problem."""
    default = decide(generated_dir(), dataclasses.replace(problem, card=""))[0].id
    return [v.id for v in serving(load_manifest(generated_dir()), problem, default) if v.id != default]


def row(problem: Problem = PROBLEM, kernel: str = "", **changes: Any) -> Row:
    values: dict[str, Any] = {"build": tuned.build_id(generated_dir()), "problem": vars(problem), "us": 9.5}
    values |= {"kernel": kernel or rivals(problem)[0], "spread": 0.01, "default": "the default", "default_us": 12.0}
    values |= {"runner_up": "another", "runner_up_us": 10.25, "kernels": 4, "versions": "some", "date": "today"}
    return Row(**(values | changes))


# Measuring


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuner.Tuning]:
    """`tune` on CPU tensors as if they were on an H200, whose kernels the emulator runs too; ``us`` gives the times in
    the order of the timer's calls."""
    monkeypatch.setattr(tuner, "target", lambda device: Target(generated_dir(), "sm90a", 132, "NVIDIA H200"))

    def run(*args: Any, us: Callable[[int], float], save: bool = True, **kwargs: Any) -> tuner.Tuning:
        def timer(calls: Sequence[Callable[[], object]]) -> list[Timing]:
            for call in calls:
                assert isinstance(call(), torch.Tensor)
            return [Timing(1, 1, us(i), us(i), 0.0) for i in range(len(calls))]

        request = request_of(*args, **kwargs)
        return tuner._search(request, *settle(request), timer, save)

    return run


def operands(heads: int = 4, kv_heads: int = 4) -> tuple[torch.Tensor, ...]:
    return (
        randn(1, heads, 70, 64, seed=0),
        randn(1, kv_heads, 90, 64, seed=1),
        randn(1, kv_heads, 90, 64, seed=2),
    )


def test_the_fastest_is_stored_and_then_chosen(search: Any, file: Path) -> None:
    """By every field of the problem; whoever asks next gets it, with where it comes from."""
    q, k, v = operands(4, 2)
    found = search(q, k, v, enable_gqa=True, is_causal=True, us=lambda i: 10.0 - i)
    assert found.path == file and found.kernel != found.default
    assert found.kernel == found.candidates[0].kernel and found.candidates[-1].kernel == found.default
    (stored,) = json.loads(file.read_text())["rows"]
    wanted = {"batch": 1, "heads": 4, "kv_heads": 2, "seqlen_q": 70, "seqlen_k": 90, "head_dim": 64, "causal": True}
    wanted |= {"card": "NVIDIA H200", "arch": "sm90a", "scaling": "block", "precision": "fast", "out": "bf16"}
    assert wanted.items() <= stored["problem"].items() and set(stored["problem"]) == set(vars(PROBLEM))
    variant, number, decision = decide(generated_dir(), found.problem)
    assert variant.id == found.kernel and load_manifest(generated_dir()).variants[number] is variant
    assert decision.evidence == f"measured on NVIDIA H200 by fp8cutlass.tune, in {file}"
    assert (
        decision.criterion == f"fastest whole call of {len(found.candidates)} kernels; the table chose {found.default}"
    )
    assert decision.cost_us == found.candidates[0].us and decision.runner_up == found.candidates[1].kernel
    text = str(found)
    assert text.splitlines()[0].startswith("(1, 4, 70x90, 64) causal") and f"stored in {file}" in text
    assert all(candidate.kernel in text for candidate in found.candidates)


def test_calls_that_are_remembered_choose_anew(search: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that was made before goes straight to its kernel, and would never see what was stored."""
    known = {("a signature",): None}
    monkeypatch.setattr(eager, "_known", known)
    search(*operands(), us=lambda i: 10.0 - i, save=False)
    assert known
    search(*operands(), us=lambda i: 10.0 - i)
    assert not known


def test_the_tables_choice_stays_unless_it_is_beaten(search: Any) -> None:
    """By 1%: less is noise. What was measured is stored all the same."""
    for gain, changes in ((1.009, False), (1.012, True)):
        found = search(*operands(), us=lambda i, gain=gain: 10.0 if i == 0 else 10.0 / gain)
        assert (found.kernel != found.default) == changes
        _, _, decision = decide(generated_dir(), found.problem)
        assert decision.variant == found.kernel and decision.evidence.startswith("measured on NVIDIA H200 by")
        assert ("; the table's choice" in decision.criterion) != changes


def test_measuring_again_does_not_see_what_was_measured(search: Any) -> None:
    """Or the table's choice would be forgotten, and a kernel compared with itself."""
    first = search(*operands(), us=lambda i: 10.0 - i)
    second = search(*operands(), us=lambda i: 10.0 + i)
    assert second.default == first.default == second.kernel != first.kernel
    assert decide(generated_dir(), second.problem)[0].id == second.default
    assert len(read(second.path or Path())) == 1


def test_every_kernel_of_the_family_that_serves_is_tried(search: Any) -> None:
    found = search(*operands(), us=lambda i: 1.0 + i)
    manifest = load_manifest(generated_dir())
    serving = {
        v.id
        for v in manifest.variants
        if (v.family, v.kind, v.head_dim, v.scaling, v.causal) == ("sm90a", "fwd", 64, "block", False)
        and (v.dtype, v.out) == ("e4m3", "bf16")
    }
    assert {candidate.kernel for candidate in found.candidates} == serving and len(serving) > 1
    assert {v.softmax for v in manifest.variants if v.id in serving} == {"linear", "quadratic", "exp2", "exp2x2"}
    accurate = search(*operands(), precision="accurate", us=lambda i: 1.0 + i)
    assert {manifest.find(c.kernel).softmax for c in accurate.candidates} == {"exp2", "exp2x2"}


def test_fp8_operands_get_no_kernel_that_could_overflow(search: Any) -> None:
    """A kernel with f16 scores may be pinned for those with descales of blocks, but is never chosen."""
    q, k, v = operands()
    made = [fp8cutlass.quantize(x, granularity=of) for x, of in ((q, "token"), (k, "block"), (v, "block"))]
    descales = dict(zip(("q_descale", "k_descale", "v_descale"), (d for _, d in made), strict=True))
    found = search(*(x for x, _ in made), **descales, us=lambda i: 10.0 - i)
    assert found.problem.quantised and found.problem.precision == "accurate"
    assert all("_exp2" in candidate.kernel for candidate in found.candidates)


def test_fp8_operands_that_are_lowered_get_all_kernels(search: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements of 448 would overflow f16 scores: those of pinned kernels are lowered, too."""
    monkeypatch.setattr(lowering, "LOWER_FROM", {256: 0})
    made = [fp8cutlass.quantize(x, granularity="head") for x in operands()]
    descales = dict(zip(("q_descale", "k_descale", "v_descale"), (d for _, d in made), strict=True))
    found = search(*(x for x, _ in made), **descales, scaling="head", us=lambda i: 10.0 - i)
    assert found.problem.lowered and found.problem.precision == "fast" and found.problem.scaling == "block"
    assert any("_linear_" in candidate.kernel for candidate in found.candidates)
    assert not any(candidate.refused for candidate in found.candidates)


def test_a_wrong_result_never_wins(search: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast; and a kernel that raises is told, not raised."""
    real = tuner.attention
    bad = rivals(dataclasses.replace(BASE, arch="sm90a", heads=4, seqlen_q=70, seqlen_k=90, sm_count=132))
    assert len(bad) > 3

    def attention(*args: Any, kernel: str, **kwargs: Any) -> Any:
        if kernel == bad[0]:
            raise RuntimeError("launch failed\nand more")
        out = real(*args, kernel=kernel, **kwargs)
        if kernel == bad[1]:
            return out * 1.2
        return out * torch.nan if kernel == bad[2] else out

    monkeypatch.setattr(tuner, "attention", attention)
    found = search(*operands(), us=lambda i: 10.0 - i)
    refused = {c.kernel: c.refused for c in found.candidates if c.timing is None}
    assert set(refused) == set(bad[:3]) and found.kernel not in refused
    assert refused[bad[0]] == "launch failed" and "relative L2 0.2" in refused[bad[1]]
    assert "refused: launch failed" in str(found)


def test_a_table_choice_that_fails_is_an_error(search: Any, monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    real = tuner.attention
    monkeypatch.setattr(tuner, "attention", lambda *args, **kwargs: real(*args, **kwargs) * torch.nan)
    with pytest.raises(UnsupportedError, match="cannot be timed: relative L2 nan"):
        search(*operands(), us=lambda i: 1.0)
    assert not file.exists()


def test_several_outputs_and_a_place_for_one(search: Any) -> None:
    """`out` is left as it is: other kernels' results have no business there."""
    q, k, v = operands()
    out = torch.zeros_like(q)
    found = search(q, k, v, out=out, return_lse=True, us=lambda i: 10.0 - i)
    assert found.kernel and not out.any()


def test_a_file_of_another_kind_is_refused_before_anything_is_measured(search: Any, file: Path) -> None:
    """And what is in it stays; without saving it is no obstacle."""
    file.parent.mkdir()
    file.write_text("[]")

    def us(i: int) -> float:
        raise AssertionError("it was measured")

    with pytest.raises(ValueError, match=str(file)):
        search(*operands(), us=us)
    assert file.read_text() == "[]"
    assert search(*operands(), us=lambda i: 10.0, save=False).path is None


def test_kept_answers_and_calls_name_the_kernel_of_before(search: Any) -> None:
    """Both are forgotten where something was stored."""
    eager._known[("a signature",)] = answers._answers[("a question",)] = (True, "the table's choice")  # type: ignore[assignment]
    search(*operands(), us=lambda i: 10.0 - i)
    assert not eager._known and not answers._answers


def test_nothing_is_stored_when_not_asked_for(search: Any, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = search(*operands(), us=lambda i: 10.0 - i, save=False)
    assert found.path is None and not file.exists() and "not stored" in str(found)
    monkeypatch.setenv(tuned.VARIABLE, "off")
    assert search(*operands(), us=lambda i: 10.0 - i).path is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "tune times kernels on a card, and query is on cpu, where the emulator runs"),
        ({"kernel": "x"}, "tune compares kernels, and kernel='x' pins one"),
        ({"dropout_p": 0.5}, "dropout"),
    ],
)
def test_what_cannot_be_tuned_is_refused_by_name(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        fp8cutlass.tune(*operands(), **arguments)
    with pytest.raises(TypeError):
        fp8cutlass.tune(*operands(), nonsense=1)


# Choosing


def test_a_row_speaks_for_its_problem_alone(file: Path) -> None:
    """Every field counts, the card and the library too."""
    store(file, [row()])
    dispatch.forget()
    kernel = rivals(PROBLEM)[0]
    assert decide(generated_dir(), PROBLEM)[0].id == kernel
    others = {"seqlen_q": 511, "seqlen_k": 513, "batch": 2, "heads": 16, "kv_heads": 4, "head_dim": 63, "sm_count": 59}
    others |= {
        "card": "NVIDIA L40S",
        "precision": "accurate",
        "causal": True,
        "out": "fp16",
        "quantised": True,
        "lowered": True,
    }
    for name, value in others.items():
        decision = decide(generated_dir(), dataclasses.replace(PROBLEM, **{name: value}))[2]
        assert decision.evidence.startswith("model"), name
    rest = {"arch", "dtype", "scaling", "window", "capped", "biased", "listed", "whole"}
    assert set(others) | rest == set(vars(PROBLEM))
    store(file, [row(build="another library")])
    assert len(read(file)) == 2 and decide(generated_dir(), PROBLEM)[0].id == kernel


def test_cpu_tensors_and_pins_do_not_ask(file: Path) -> None:
    store(file, [row(), row(dataclasses.replace(PROBLEM, card=""))])
    dispatch.forget()
    assert decide(generated_dir(), BASE)[2].evidence.startswith("model")
    default = decide(generated_dir(), BASE)[0].id
    assert decide(generated_dir(), PROBLEM, default)[2].criterion == "pinned by the caller"


def test_without_a_file_nothing_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the digest of the manifest."""
    monkeypatch.setattr(tuned, "build_id", lambda directory: pytest.fail("asked for"))
    assert find(generated_dir(), vars(PROBLEM)) is None


def test_the_file_is_read_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(file, [row()])
    dispatch.forget()
    reads: list[Path] = []
    monkeypatch.setattr(tuned, "read", lambda path: reads.append(path) or {})
    for seqlen in range(5):
        decide(generated_dir(), dataclasses.replace(PROBLEM, seqlen_q=seqlen))
    assert reads == [file]


def test_explain_and_the_log_say_where_it_comes_from(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(file, [row(default=decide(generated_dir(), BASE)[0].id)])
    dispatch.forget()
    monkeypatch.delenv("FP8CUTLASS_LIBRARY", raising=False)
    monkeypatch.setattr(extension, "PACKAGE_DIR", file.parent)
    with extension.assume(L4), FakeTensorMode():
        q = torch.empty(1, 8, 512, 64, dtype=torch.bfloat16, device="cuda:0")
        lines = explain(q, q, q).splitlines()
    assert lines[0] == f"kernel:    {rivals(PROBLEM)[0]}"
    assert f"evidence:  measured on NVIDIA L4 by fp8cutlass.tune, in {file}, 9.5 us" in lines
    assert "runner-up: another, 10.25 us" in lines
    with extension.assume(((8, 9), "NVIDIA L40S", 142)), FakeTensorMode():
        q = torch.empty(1, 8, 512, 64, dtype=torch.bfloat16, device="cuda:0")
        assert "evidence:  model of L4" in explain(q, q, q)


def test_a_row_that_does_not_fit_is_ignored_with_a_warning(file: Path) -> None:
    """Edited by hand: a causal kernel for a problem without a mask, one that is not there."""
    causal = decide(generated_dir(), dataclasses.replace(BASE, causal=True))[0].id
    for kernel in (causal, "nonsense"):
        store(file, [row(kernel=kernel)])
        dispatch.forget()
        with pytest.warns(UserWarning, match=f"{file}: a row does not fit its problem"):
            decision = decide(generated_dir(), PROBLEM)[2]
        assert decision.evidence.startswith("model")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"format": 2, "rows": []}',
        '{"format": 1, "rows": [{}]}',
        '{"format": 1}',
        '{"format": 1, "rows": 5}',
    ],
)
def test_a_file_of_another_kind_is_ignored_with_a_warning(text: str, file: Path) -> None:
    """And is not overwritten."""
    file.parent.mkdir()
    file.write_text(text)
    with pytest.warns(UserWarning, match=f"{file}.*it is ignored. FP8CUTLASS_TUNED=off"):
        decision = decide(generated_dir(), PROBLEM)[2]
    assert decision.evidence.startswith("model")
    with pytest.raises(ValueError, match=str(file)):
        store(file, [row()])
    assert file.read_text() == text


def test_storing_keeps_what_is_there(file: Path) -> None:
    other = dataclasses.replace(PROBLEM, batch=2)
    store(file, [row()])
    store(file, [row(other), row(us=1.0)])
    assert {(r.problem["batch"], r.us) for r in read(file).values()} == {(1, 1.0), (2, 9.5)}
    assert [path.name for path in file.parent.iterdir()] == [file.name], "no partial file is left"


# Where


def test_where_the_file_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(tuned.VARIABLE, "")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert location() == tmp_path / "fp8cutlass" / "tuned.json"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert location() == tmp_path / ".local" / "share" / "fp8cutlass" / "tuned.json"
    monkeypatch.setenv(tuned.VARIABLE, "off")
    assert location() is None and find(generated_dir(), vars(PROBLEM)) is None
    monkeypatch.setenv(tuned.VARIABLE, "~/mine.json")
    assert location() == tmp_path / "mine.json"


def test_it_is_where_platformdirs_puts_data(monkeypatch: pytest.MonkeyPatch) -> None:
    platformdirs = pytest.importorskip("platformdirs")
    monkeypatch.setenv(tuned.VARIABLE, "")
    assert location() == platformdirs.user_data_path("fp8cutlass") / "tuned.json"


def test_off_is_silent(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(file, [row()])
    monkeypatch.setenv(tuned.VARIABLE, "off")
    dispatch.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decide(generated_dir(), PROBLEM)[2].evidence.startswith("model")


# The command


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--shape", "9000,64,100000,128"], 1, "tune times kernels on a card; on cpu the emulator runs"),
        (["--shape", "1,2,16,64", "--device", "cpu"], 1, "tune times kernels on a card"),
        (["--shape", "1,4,16"], 2, "is not B,H,S,D"),
    ],
)
def test_the_command_refuses_by_name(
    arguments: list[str], code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(main, ["tune", *arguments])
    assert result.exit_code == code and said in result.output, result.output


def test_the_command_prints_what_it_found(search: Any, monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    """With the options as the function has them."""
    monkeypatch.setattr(
        fp8cutlass, "tune", lambda *args, save, **kwargs: search(*args, us=lambda i: 10.0 - i, save=save, **kwargs)
    )
    made = command.make_operands
    monkeypatch.setattr(command, "device_of", lambda text: torch.device("cuda", 0))
    monkeypatch.setattr(command, "make_operands", lambda *sizes: made(*sizes[:3], torch.device("cpu")))
    options = ["--shape", "1,4,70,64", "--kv-heads", "2", "--seqlen-k", "90", "--causal"]
    result = CliRunner().invoke(main, ["tune", *options])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("(1, 4, 70x90, 64) causal, e4m3 to bf16, scaling block, fast, sm90a with 132 SMs")
    assert f"stored in {file}" in result.output and file.exists()
    for dtype, said in (("fp16", "e4m3 to fp16"), ("e4m3", "e4m3 with descales to bf16, scaling head, accurate")):
        result = CliRunner().invoke(main, ["tune", *options, "--dtype", dtype, "--scaling", "head", "--no-save"])
        assert result.exit_code == 0 and said in result.output and "not stored" in result.output, result.output
