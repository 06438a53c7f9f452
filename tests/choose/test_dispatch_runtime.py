"""The choice of a kernel at run time: totality, bucket edges, pins, and where tables are read from."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import attention64, randn, relative_l2
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8cutlass import UnsupportedError, attention, explain, supports
from fp8cutlass.call.options import F16_SCORES
from fp8cutlass.choose.dispatch import decide, load_table
from fp8cutlass.choose.problem import CPU_SM_COUNT, Problem
from fp8cutlass.choose.special import PRECISE_ENOUGH
from fp8cutlass.choose.table import CLASS
from fp8cutlass.choose.target import target
from fp8cutlass.choose.why import load_times
from fp8cutlass.errors import NoKernelError
from fp8cutlass.manifest import KEY_BLOCK, PACKAGE_DIR, TABLES, Manifest, Variant, generated_dir, load_manifest
from fp8cutlass.native import extension

BASE = Problem(
    arch="sm89",
    head_dim=64,
    seqlen_q=512,
    seqlen_k=512,
    batch=1,
    heads=8,
    dtype="e4m3",
    out="bf16",
    scaling="block",
    causal=False,
    precision="fast",
)


def test_every_cell_is_a_kernel_of_the_manifest_or_a_reason(manifest: Manifest) -> None:
    """A kernel that the table names exists and fits its cell; a refusal says why."""
    table, times = load_table(manifest.directory), load_times(manifest.directory)
    for of in itertools.product(*(table.axes[axis] for axis in CLASS)):
        for cell in table.over_lengths(**dict(zip(CLASS, of, strict=True))):
            decision = times.explain(cell, manifest)
            if decision.variant is None:
                assert decision.reason
            else:
                assert manifest.find(decision.variant).kind == "fwd"
                assert decision.criterion and decision.evidence.split(" ")[0] in ("model", "measured")


def test_the_chosen_kernel_fits_the_problem(manifest: Manifest) -> None:
    """Field by field, over every combination of the axes that name a property of the kernel."""
    table = load_table(manifest.directory)
    found = 0
    arch_dims = [(arch, head_dim) for arch in table.axes["arch"] for head_dim in manifest.head_dims[arch]]
    for arch, head_dim in arch_dims:
        for dtype in table.axes["dtype"]:
            for out in table.axes["out"]:
                for scaling in table.axes["scaling"]:
                    for causal in (False, True):
                        for precision, softmaxes in PRECISE_ENOUGH.items():
                            wanted = {"head_dim": head_dim, "dtype": dtype, "out": out, "causal": causal}
                            asked = wanted | {"arch": arch, "scaling": scaling, "precision": precision}
                            problem = dataclasses.replace(BASE, **asked)
                            decision = table.lookup(problem)
                            if decision.variant is None:
                                continue
                            found += 1
                            variant = manifest.find(decision.variant)
                            assert {name: getattr(variant, name) for name in wanted} == wanted
                            assert scaling in variant.scalings and arch in variant.targets
                            assert variant.softmax in softmaxes
                            # FP8 operands never have f16 scores, so theirs are blocks of 128 keys
                            assert precision in F16_SCORES or variant.key_block == KEY_BLOCK
    assert found > 200


def test_seqlen_bounds_are_inclusive() -> None:
    """The bound belongs to the bucket below, past the last bound is unbounded."""
    table = load_table(generated_dir())
    bounds = [bound for bound in table.axes["seqlen"] if bound is not None]

    def bucket(seqlen: int) -> int:
        return table.lookup(dataclasses.replace(BASE, head_dim=64, seqlen_k=seqlen)).seqlen

    for number, bound in enumerate(bounds):
        assert bucket(bound) == number
        assert bucket(bound + 1) == number + 1
    assert bucket(1) == 0
    assert bucket(10**9) == len(bounds)


@pytest.mark.parametrize(
    ("heads", "load"),
    [
        (7, "few"),
        (8, "half"),
        (14, "half"),
        (15, "wave1"),
        (30, "wave2"),
        (58, "wave2"),
        (116, "wave4"),
        (117, "heavy"),
    ],
)
def test_load_counts_tiles_a_multiprocessor(heads: int, load: str) -> None:
    """Of 64 rows; a tile alone in its head makes the problem a short one, unless they are few."""
    load_of = load_table(generated_dir()).load_of
    assert load_of(dataclasses.replace(BASE, seqlen_q=128, heads=heads, sm_count=58)) == load
    assert load_of(dataclasses.replace(BASE, seqlen_q=65, heads=heads, sm_count=58)) == load
    assert load_of(dataclasses.replace(BASE, seqlen_q=64, heads=heads, sm_count=58)) in ("few", "short")


def test_cpu_stands_for_an_l4() -> None:
    at = target(torch.device("cpu"))
    assert (at.arch, at.sm_count) == ("sm89", CPU_SM_COUNT) == ("sm89", 58)


def test_values_off_the_axes_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="arch='sm120' is not in the dispatch table; it has sm89"):
        load_table(generated_dir()).lookup(dataclasses.replace(BASE, arch="sm120"))


def test_number_is_the_position_in_the_manifest(manifest: Manifest) -> None:
    variant, number, _ = decide(manifest.directory, BASE)
    assert manifest.variants[number] is variant


def test_a_pinned_kernel_is_run(manifest: Manifest) -> None:
    """Two kernels with different softmax give different bits, and the pinned one is the one that ran."""
    q, k, v = (randn(1, 2, 70, 64, seed=seed) for seed in range(3))
    ids = {}
    for variant in manifest.variants:
        if (variant.kind, variant.head_dim, variant.scaling, variant.causal) == ("fwd", 64, "block", False):
            if (variant.dtype, variant.out) == ("e4m3", "bf16"):
                ids[variant.softmax] = variant.id
    fast, accurate = (attention(q, k, v, kernel=ids[softmax]) for softmax in ("linear", "exp2"))
    assert not torch.equal(fast, accurate)
    assert torch.equal(accurate, attention(q, k, v, precision="accurate", kernel=ids["exp2"]))
    assert ids["linear"] in explain(q, k, v, kernel=ids["linear"])
    bent = attention(q, k, v, kernel=ids["quadratic"])
    assert torch.equal(bent, attention(q, k, v, precision="balanced", kernel=ids["quadratic"]))
    assert not torch.equal(bent, fast) and not torch.equal(bent, accurate)
    for precision, softmax in (("accurate", "linear"), ("balanced", "linear"), ("accurate", "quadratic")):
        message = f"kernel='{ids[softmax]}' has softmax='{softmax}'.*precision='{precision}'"
        with pytest.raises(UnsupportedError, match=message):
            attention(q, k, v, precision=precision, kernel=ids[softmax])


def test_a_pinned_kernel_that_does_not_fit_is_refused(manifest: Manifest) -> None:
    """With the field that does not fit and both its values."""
    q = randn(1, 2, 16, 64, seed=1)
    causal = next(v.id for v in manifest.variants if v.kind == "fwd" and v.causal and v.head_dim == 64)
    with pytest.raises(UnsupportedError, match="causal=True, the call needs causal=False"):
        attention(q, q, q, kernel=causal)
    with pytest.raises(UnsupportedError, match="is for head_dim 1..64, the call needs head_dim=72"):
        wide = randn(1, 2, 16, 72, seed=1)
        attention(wide, wide, wide, is_causal=True, kernel=causal)
    diagnostic = next(v.id for v in manifest.variants if v.kind == "diag")
    with pytest.raises(UnsupportedError, match="kind='diag'"):
        attention(q, q, q, kernel=diagnostic)
    with pytest.raises(UnsupportedError, match="kernel='nonsense' is not in the manifest"):
        attention(q, q, q, kernel="nonsense")


def native(manifest: Manifest, **axes: object) -> Variant:
    """The first forward kernel of the sm90a family with these properties."""
    found = (v for v in manifest.variants if (v.family, v.kind) == ("sm90a", "fwd"))
    return next(v for v in found if all(getattr(v, name) == value for name, value in axes.items()))


def test_a_pinned_kernel_brings_its_head_dim(manifest: Manifest) -> None:
    """A call of head_dim 40 runs on the kernel of 128, with the scale of 40."""
    variant = native(manifest, head_dim=128, causal=False, softmax="exp2", dtype="e4m3", out="bf16", scaling="block")
    q, k, v = (randn(1, 2, 70, 40, seed=seed) for seed in range(3))
    got = attention(q, k, v, kernel=variant.id)
    assert relative_l2(got, attention64(q, k, v, 40**-0.5).out) < 0.06
    assert "40 to 128" in explain(q, k, v, kernel=variant.id)


def test_a_pinned_kernel_serves_coarser_scaling(manifest: Manifest) -> None:
    """A kernel that reads its descales through strides takes them per tensor and per head, others only their own."""
    variant = native(manifest, head_dim=64, causal=False, softmax="exp2", dtype="e4m3", out="bf16", scaling="block")
    q, k, v = (randn(1, 2, 200, 64, seed=seed) for seed in range(3))
    v[:, 1] *= 10
    want = attention64(q, k, v, 0.125).out
    for scaling in ("tensor", "head", "block"):
        assert relative_l2(attention(q, k, v, scaling=scaling, kernel=variant.id), want) < 0.06
    with pytest.raises(UnsupportedError, match="has scaling 'tensor' or 'head' or 'block'.*scaling='token'"):
        attention(q, k, v, scaling="token", kernel=variant.id)
    by_token = decide(manifest.directory, dataclasses.replace(BASE, scaling="token", precision="accurate"))[0]
    with pytest.raises(UnsupportedError, match="has scaling 'token', the call needs scaling='head'"):
        attention(q, k, v, scaling="head", kernel=by_token.id)


def test_fp8_operands_get_a_kernel_of_their_blocks(manifest: Manifest) -> None:
    """Where the table's fast choice has other blocks than 128 keys, operands that come with those take the accurate."""
    wide = [v for v in manifest.variants if v.kind == "fwd" and v.key_block != KEY_BLOCK]
    table, tried = load_table(manifest.directory), 0
    for variant in wide:
        asked = {"head_dim": variant.head_dim, "dtype": variant.dtype, "out": variant.out, "causal": variant.causal}
        for seqlen in (100, 1000, 100000):
            for heads in (1, 1000):
                sizes = {"seqlen_q": seqlen, "seqlen_k": seqlen, "heads": heads, "sm_count": 132}
                problem = dataclasses.replace(BASE, arch="sm90a", **asked, **sizes)
                if table.lookup(problem).variant != variant.id:
                    continue
                tried += 1
                assert decide(manifest.directory, problem)[0] is variant
                chosen, _, _ = decide(manifest.directory, dataclasses.replace(problem, quantised=True))
                assert (chosen.key_block, chosen.softmax) == (KEY_BLOCK, "exp2")
    assert tried


def test_explain_shows_schedule_cluster_and_blocks(manifest: Manifest) -> None:
    """Of a family that has them."""
    wide = (v for v in manifest.variants if v.kind == "fwd" and v.key_block != KEY_BLOCK)
    variant = next(v for v in wide if v.out == "bf16" and not v.causal)
    q = torch.empty(1, 8, 300, variant.head_dim, dtype=torch.bfloat16)
    text = explain(q, q, q, kernel=variant.id)
    assert f"{variant.schedule}, cluster {variant.cluster}" in text
    assert f"amax 14, a descale per {variant.key_block} keys" in text
    x = torch.empty(1, 8, 300, 64, dtype=torch.bfloat16)
    assert "schedule" not in explain(x, x, x)


def test_refusals_carry_the_tables_reason() -> None:
    """e5m2 in token mode has no kernel: the message is the rule's, `supports` repeats it."""
    q = randn(1, 2, 16, 64, seed=1).to(torch.float8_e5m2)
    descales = {"q_descale": 1.0, "k_descale": 1.0, "v_descale": 1.0}
    with pytest.raises(UnsupportedError, match="E5M2-TOKEN") as caught:
        attention(q, q, q, scaling="token", **descales)
    assert caught.value.reasons and isinstance(caught.value, NoKernelError)
    yes, why = supports(q, q, q, scaling="token", **descales)
    assert not yes and "E5M2-TOKEN" in why
    assert explain(q, q, q, scaling="token", **descales).startswith("no kernel: ")
    assert all(supports(q, q, q, scaling=scaling, **descales)[0] for scaling in ("head", "block"))


@pytest.mark.parametrize("seqlen", [16, 512, 3000])
@pytest.mark.parametrize("precision", ["fast", "accurate"])
def test_explain_says_which_why_and_on_what_evidence(seqlen: int, precision: str) -> None:
    q = torch.empty(1, 8, seqlen, 40, dtype=torch.bfloat16)
    text = explain(q, q, q, precision=precision)
    problem = dataclasses.replace(BASE, seqlen_q=seqlen, seqlen_k=seqlen, precision=precision)
    variant, _, decision = decide(generated_dir(), problem)
    for part in (variant.id, decision.criterion, decision.evidence, "40 to 64", "emulator"):
        assert part in text
    assert ("runner-up" in text) == (decision.runner_up is not None) and (decision.runner_up or "") in text


def write_tables(directory: Path, **changes: object) -> None:
    """A copy of the shipped manifest and table, with changes to the manifest."""
    directory.mkdir()
    for name in TABLES:
        shutil.copy(generated_dir() / name, directory)
    data = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps(data | changes))


def emulated(directory: Path) -> None:
    """Makes the manifest in a folder that of a build with ``--emulated``."""
    listed = directory / "manifest.json"
    data = json.loads(listed.read_text())
    for v in data["variants"]:
        v["targets"] += ["sm90a"] if v["targets"] == ["sm89"] else []
    listed.write_text(json.dumps(data))


def test_another_directory_of_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8CUTLASS_GENERATED is read at each call, and a directory without a manifest is an error."""
    write_tables(tmp_path / "other", profile="another")
    monkeypatch.setenv("FP8CUTLASS_GENERATED", str(tmp_path / "other"))
    assert load_manifest(generated_dir()).profile == "another"
    q = randn(1, 2, 16, 64, seed=1)
    assert str(tmp_path / "other") in explain(q, q, q)
    monkeypatch.setenv("FP8CUTLASS_GENERATED", str(tmp_path))
    with pytest.raises(UnsupportedError, match="FP8CUTLASS_GENERATED.*no manifest.json"):
        attention(q, q, q)


def test_another_key_block_is_refused(tmp_path: Path) -> None:
    """Quantisation, packing and the emulator go by the package's constant; there is one."""
    write_tables(tmp_path / "other", key_block=64)
    with pytest.raises(ValueError, match="key_block 64, this package quantises and packs by 128 keys"):
        load_manifest(tmp_path / "other")
    homes = [path.name for path in PACKAGE_DIR.rglob("*.py") if re.search(r"^KEY_BLOCK\b.*= ", path.read_text(), re.M)]
    assert homes == ["manifest.py"]


def test_another_format_is_refused(tmp_path: Path) -> None:
    write_tables(tmp_path / "new", format=2)
    with pytest.raises(ValueError, match="format 2, this package reads format 1"):
        load_manifest(tmp_path / "new")


def fake_card(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, ...]) -> None:
    monkeypatch.setattr(extension, "_capability", lambda index: (capability, "a card", 58))


CUDA0 = torch.device("cuda", 0)


@pytest.mark.edge(22)
def test_a_missing_library_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FP8CUTLASS_LIBRARY", raising=False)
    monkeypatch.setattr(extension, "PACKAGE_DIR", tmp_path)
    with pytest.raises(UnsupportedError, match="not built.*pip install.*FP8CUTLASS_LIBRARY"):
        extension.load()


def test_a_wrong_library_path_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FP8CUTLASS_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises(UnsupportedError, match="FP8CUTLASS_LIBRARY=.*is no file"):
        extension.load()


@pytest.mark.edge(22)
@pytest.mark.parametrize(
    ("capability", "archs", "message"),
    [
        ((8, 9), ["sm90a"], r"a card \(cuda:0\) needs sm89, the library was built for sm90a"),
        ((9, 0), ["sm89"], r"a card \(cuda:0\) needs sm90a, the library was built for sm89"),
        ((8, 0), ["sm89"], r"compute capability 8.0, the kernels are for sm89 \(8.9\), sm90a \(9.0\)"),
        ((12, 0), ["sm89", "sm90a"], r"compute capability 12.0"),
    ],
)
def test_a_library_for_another_card(
    capability: tuple[int, int], archs: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What it is, what it needs and what is built (FlashAttention#1966 said "no kernel image")."""
    write_tables(tmp_path / "_built", archs=archs)
    (tmp_path / "_C.so").touch()
    monkeypatch.setenv("FP8CUTLASS_LIBRARY", str(tmp_path / "_C.so"))
    fake_card(monkeypatch, capability)
    with pytest.raises(UnsupportedError, match=message) as caught:
        target(CUDA0)
    assert isinstance(caught.value, NoKernelError)


def test_a_fitting_library_answers_from_its_own_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The built manifest, not the shipped one, numbers the variants."""
    write_tables(tmp_path / "_built", archs=["sm89"])
    (tmp_path / "_C.so").touch()
    monkeypatch.setenv("FP8CUTLASS_LIBRARY", str(tmp_path / "_C.so"))
    fake_card(monkeypatch, (8, 9))
    at = target(CUDA0)
    assert (at.directory, at.arch, at.sm_count) == (tmp_path / "_built", "sm89", 58)
    for name in TABLES:
        shutil.move(tmp_path / "_built" / name, tmp_path)
        with pytest.raises(UnsupportedError, match=name):
            extension.built_dir()
        shutil.move(tmp_path / name, tmp_path / "_built")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Callable[..., torch.Tensor]]:
    """Pretend that a card of some compute capability is there, and a library for every architecture; returns what makes
    bf16 tensors on it, which have no memory: to be called under FakeTensorMode. One capability a test."""
    write_tables(tmp_path / "_built")
    (tmp_path / "_C.so").touch()
    monkeypatch.setenv("FP8CUTLASS_LIBRARY", str(tmp_path / "_C.so"))

    def insert(*capability: int) -> Callable[..., torch.Tensor]:
        fake_card(monkeypatch, capability)
        return partial(torch.empty, dtype=torch.bfloat16, device="cuda:0")

    return insert


def test_a_pinned_kernel_of_another_card_is_refused(card: Any, manifest: Manifest) -> None:
    """One library may hold the kernels of two architectures; on the CPU the emulator runs them all."""
    variant = native(manifest, head_dim=64, causal=False, dtype="e4m3", out="bf16", scaling="block")
    empty = card(8, 9)
    with FakeTensorMode():
        q = empty(1, 2, 16, 64)
        served, why = supports(q, q, q, kernel=variant.id)
    assert not served and f"kernel='{variant.id}' is built for sm90a, cuda:0 is sm89" in why
    x = randn(1, 2, 16, 64, seed=1)
    assert supports(x, x, x, kernel=variant.id)[0]


def test_hopper_takes_its_own_kernels(card: Any, tmp_path: Path) -> None:
    """Of every mode and head_dim, those that have to be padded included; and says where instructions are emulated, as
    in a build with ``--emulated``."""
    emulated(tmp_path / "_built")
    empty = card(9, 0)
    with FakeTensorMode():
        for head_dim, padding in ((32, "32 to 64"), (64, None), (160, "160 to 192"), (200, "200 to 256")):
            q = empty(1, 8, 300, head_dim)
            for scaling in ("tensor", "head", "block", "token"):
                text = explain(q, q, q, scaling=scaling)
                assert "kernel:    sm90a_fwd" in text and "emulate" not in text and "built: yes" in text
                assert (padding or "") in text and ("padding" in text) == (padding is not None)
        q = empty(1, 8, 512, 64)
        ada = decide(generated_dir(), BASE)[0]
        assert "(which emulate the instructions of sm89)" in explain(q, q, q, kernel=ada.id)


@pytest.mark.parametrize(
    "text", [None, "", '{"format": 1', "[1, 2]", "null", '{"format": 1, "key_block": 128, "variants": [{}]}']
)
def test_a_broken_list_is_named_with_its_remedy(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
        for name in TABLES[1:]:
            (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=r"manifest.json .*install the package again, or in a checkout run"):
        load_manifest(tmp_path)
    if text is None or "variants" not in text:
        for name, load in (("table.txt", load_table), ("times.txt", load_times)):
            with pytest.raises(ValueError, match=rf"{name} .*install the package again, or in a checkout run"):
                load(tmp_path)


def test_a_plain_form_serves_no_call_that_wants_more(manifest: Manifest) -> None:
    v = manifest.find("sm90a_fwd_d128_m128n192w8_s3_block_full_e4m3_bf16_linear_pingpong_solo")
    assert v.plain == (1024,) and v.unrolled_for(1000) == (961, 1024) and v.unrolled_for(1000, plain=False) is None
    assert v.unrolled_for(600) == v.unrolled_for(600, plain=False) == (577, 640)
