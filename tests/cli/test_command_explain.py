"""`fp8cutlass explain`: the answer of the function, for cards that are not here and sizes that fit nowhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner, Result
from test_dispatch_runtime import BASE, emulated, write_tables

from codegen import families as facts
from fp8cutlass import explain
from fp8cutlass.call.options import CHOICES
from fp8cutlass.choose.dispatch import decide
from fp8cutlass.choose.problem import CPU_ARCH, CPU_SM_COUNT, Problem
from fp8cutlass.choose.target import _target, target
from fp8cutlass.cli import main
from fp8cutlass.cli.explain import MODEL_CARDS, device_of
from fp8cutlass.cli.explain import explain as command
from fp8cutlass.manifest import generated_dir, load_manifest
from fp8cutlass.native import extension

CUDA0 = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No card and no library, whatever machine this is."""
    for name in ("FP8CUTLASS_LIBRARY", "FP8CUTLASS_GENERATED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(extension, "PACKAGE_DIR", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["explain", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == code, result.output
    return result


def chosen(**changes: Any) -> str:
    """The table's choice for a problem."""
    values = {name: getattr(BASE, name) for name in BASE.__dataclass_fields__}
    return decide(generated_dir(), Problem(**(values | changes)))[0].id


def test_model_cards_are_those_of_the_generator() -> None:
    """The numbers that its tables were decided with."""
    assert list(MODEL_CARDS) == list(facts.TARGETS) == list(load_manifest(generated_dir()).archs)
    for name, (capability, card, sms) in MODEL_CARDS.items():
        model = facts.model_card(name)
        assert (capability, card, sms) == (facts.TARGETS[name].capability, model.name, model.sms)
    assert MODEL_CARDS[CPU_ARCH][2] == CPU_SM_COUNT


def test_the_cpu_says_what_the_function_says() -> None:
    for options, arguments in (((), {}), (("--causal", "--precision", "accurate"), {"precision": "accurate"})):
        q = torch.empty(1, 8, 300, 64, dtype=torch.bfloat16)
        wanted = explain(q, q, q, is_causal=bool(options), **arguments)
        assert run("--shape", "1,8,300,64", *options).output == f"{wanted}\n"
        assert run("--shape", "1,8,300,64", "--device", "cpu", *options).output == f"{wanted}\n"


@pytest.mark.parametrize("name", list(MODEL_CARDS))
def test_an_architecture_without_its_card(name: str) -> None:
    """Terabytes of operands: nothing is made of them."""
    output = run("--shape", "4096,64,131072,128", "--arch", name).output
    sms = MODEL_CARDS[name][2]
    sizes = {"batch": 4096, "heads": 64, "seqlen_q": 131072, "seqlen_k": 131072, "head_dim": 128}
    assert f"kernel:    {chosen(arch=name, sm_count=sms, **sizes)}\n" in output
    assert f"for:       {name}, {sms} SMs, table in" in output and "built: no; the CUDA kernels are not built" in output


def test_nothing_of_an_ada_card_is_called_measured() -> None:
    """Nobody has timed one: L4, L40S and RTX 4090 get the model of the first, and are told so."""
    for sms in (58, 142, 128):
        output = run("--shape", "4,32,4096,128", "--arch", "sm89", "--sms", str(sms)).output
        assert "\nevidence:  model of L4, " in output and "measured" not in output


def test_sizes_and_multiprocessors_decide() -> None:
    """Each option reaches the choice: few query tiles, other lengths, another card."""
    few = {"seqlen_q": 128, "seqlen_k": 16384, "arch": "sm90a", "heads": 16}
    kernels = set()
    for sms in (132, 8):
        output = run("--shape", "1,16,128,64", "--seqlen-k", "16384", "--arch", "sm90a", "--sms", str(sms)).output
        assert f"kernel:    {chosen(**few, sm_count=sms)}\n" in output and f"sm90a, {sms} SMs" in output
        kernels.add(output.splitlines()[0])
    assert len(kernels) == 2


@pytest.mark.parametrize(("dtype", "padding"), [("bf16", "40 to 64"), ("fp16", "40 to 64"), ("e4m3", "40 to 64")])
def test_dtypes_and_shared_heads(dtype: str, padding: str) -> None:
    """FP8 operands need descales, fewer heads of K need a word: the command has both."""
    output = run("--shape", "2,8,300,40", "--kv-heads", "2", "--dtype", dtype, "--arch", "sm90a").output
    assert f"head_dim {padding}" in output and f"output torch.{'float16' if dtype == 'fp16' else 'bfloat16'}" in output
    assert "softmax linear" in output


@pytest.mark.parametrize("keys", [255, 256])
def test_fp8_operands_with_enough_keys_are_lowered(keys: int) -> None:
    output = run("--shape", f"2,8,{keys},64", "--dtype", "e4m3", "--arch", "sm90a").output
    assert ("softmax linear" in output) == ("rows of Q divided by powers of two" in output) == (keys == 256)


@pytest.mark.parametrize(
    ("keys", "form"), [(384, ""), (385, "385 to 512"), (512, "385 to 512"), (513, ""), (1000, "961 to 1024")]
)
def test_forms_with_unrolled_tiles(keys: int, form: str) -> None:
    """Two tiles of 192 keys and one of 128; five and one of 64."""
    kernel = "sm90a_fwd_d128_m128n192w8_s3_block_full_e4m3_bf16_linear_pingpong_solo"
    said = run("--arch", "sm90a", "--shape", f"1,8,{keys},128", "--kernel", kernel).output
    assert (f"schedule:  pingpong, cluster solo; tiles unrolled for {form} keys\n" in said) == bool(form)
    assert ("tiles unrolled" in said) == bool(form)


def test_the_precisions_are_those_of_attention() -> None:
    """Written in both places, as `fp8cutlass explain --help` answers without torch."""
    option = next(option for option in command.params if option.name == "precision")
    assert isinstance(option.type, click.Choice) and tuple(option.type.choices) == CHOICES["precision"]


@pytest.mark.parametrize(
    ("arch", "dtype", "softmax"),
    [("sm90a", "bf16", "quadratic"), ("sm90a", "e4m3", "quadratic"), ("sm89", "bf16", "exp2")],
)
def test_balanced(arch: str, dtype: str, softmax: str) -> None:
    """sm89 has no such kernel: it gets what `accurate` gets."""
    problem = ("--arch", arch, "--shape", "1,8,512,64", "--dtype", dtype)
    said = run(*problem, "--precision", "balanced").output
    assert f"numerics:  softmax {softmax}, " in said
    if softmax == "exp2":
        assert said == run(*problem, "--precision", "accurate").output


def test_a_pinned_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of sm89 is for Hopper where the manifest lists it for that, as one of a build with ``--emulated`` does."""
    kernel = chosen()
    problem = ("--shape", "1,8,16,64", "--kernel", kernel)
    output = run(*problem, "--arch", "sm89").output
    assert kernel in output and "pinned by the caller" in output and "emulate" not in output
    refused = run(*problem, "--arch", "sm90a", code=1).output
    assert f"kernel='{kernel}' is built for sm89" in refused
    write_tables(tmp_path / "tables")
    emulated(tmp_path / "tables")
    monkeypatch.setenv("FP8CUTLASS_GENERATED", str(tmp_path / "tables"))
    output = run(*problem, "--arch", "sm90a").output
    assert kernel in output and "pinned by the caller" in output and "emulate the instructions of sm89" in output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--shape", "1,8,64,64", "--dtype", "e5m2", "--scaling", "token", "--arch", "sm90a"), "E5M2-TOKEN"),
        (("--shape", "1,8,64,64", "--dtype", "e5m2", "--scaling", "token"), "E5M2-TOKEN"),
        (("--shape", "1,8,64,64", "--scaling", "row"), "scaling must be one of tensor, head, block, token, got 'row'"),
        (("--shape", "1,8,64,300", "--arch", "sm89"), "head_dim must lie in 1..256, got 300"),
        (("--shape", "1,8,64,64", "--kv-heads", "3"), "a multiple of those of key, got 8 and 3"),
        (("--shape", "1,8,64,64", "--kernel", "nonsense"), "kernel='nonsense' is not in the manifest"),
    ],
)
def test_a_problem_without_a_kernel(arguments: tuple[str, ...], said: str) -> None:
    """The table's reason, also where nothing is built that could be asked."""
    output = run(*arguments, code=1).output
    assert output.startswith("no kernel: ") and said in output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--shape"),
        (("--shape", "1,8,512"), "'1,8,512' is not B,H,S,D"),
        (("--shape", "1,8,-512,64"), "is not B,H,S,D"),
        (("--shape", "1,8,64,64", "--arch", "sm80"), "'sm80' is not one of 'sm89', 'sm90a'"),
        (("--shape", "1,8,64,64", "--arch", "sm89", "--device", "cpu"), "give one"),
        (("--shape", "1,8,64,64", "--sms", "100"), "--sms goes with --arch"),
        (("--shape", "1,8,64,64", "--device", "cuda"), "torch can use 0 CUDA devices here; --arch"),
        (("--shape", "1,8,64,64", "--device", "tpu"), "accepted are cpu, cuda and cuda:N"),
        (("--shape", "1,8,64,64", "--device", "meta"), "accepted are cpu, cuda and cuda:N"),
    ],
)
def test_options_that_make_no_sense(arguments: tuple[str, ...], said: str) -> None:
    assert said in " ".join(run(*arguments, code=2).output.split())


def test_a_card_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for its properties; without --device, or a number, it is the current one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert device_of(None) == device_of("cuda") == device_of("cuda:1") == torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("fp8cutlass.cli.explain.device_of", lambda text: CUDA0)
    monkeypatch.setattr(extension, "_capability", lambda index: ((8, 9), "NVIDIA L40S", 142))
    # A card of this machine may be remembered.
    monkeypatch.setattr("fp8cutlass.choose.target._target", _target.__wrapped__)
    assert "for:       sm89, 142 SMs" in run("--shape", "1,8,512,64", "--device", "cuda").output


def test_tables_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "manifest.json").write_text('{"format": 1')
    monkeypatch.setenv("FP8CUTLASS_GENERATED", str(tmp_path))
    result = run("--shape", "1,8,64,64", code=1)
    assert str(tmp_path / "manifest.json") in result.output and "cannot be read" in result.output
    assert "fp8cutlass doctor" in result.output


def test_an_assumed_card_ends_with_its_block(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And is part of what a remembered target depends on."""
    write_tables(tmp_path / "_built")
    (tmp_path / "_C.so").touch()
    monkeypatch.setenv("FP8CUTLASS_LIBRARY", str(tmp_path / "_C.so"))
    monkeypatch.setattr(extension, "_capability", lambda index: ((8, 9), "NVIDIA L4", 58))
    for _ in range(2):
        assert (target(CUDA0).arch, target(CUDA0).sm_count) == ("sm89", 58)
        with extension.assume(((9, 0), "H200", 132)):
            assert (target(CUDA0).arch, target(CUDA0).sm_count) == ("sm90a", 132)
            with extension.assume(((9, 0), "H100 PCIe", 114)):
                assert target(CUDA0).sm_count == 114
            assert target(CUDA0).sm_count == 132
    with pytest.raises(LookupError), extension.assume(((9, 0), "H200", 132)):
        raise LookupError
    assert extension.assumed() is None
