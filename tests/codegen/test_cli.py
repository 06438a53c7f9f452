"""The command line of the generator: answers that match the selection, and errors that say why.

Regressions these catch: an option that is accepted and ignored, a traceback instead of a message, a check that passes
on a stale folder, a deleted file that was not the generator's.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from codegen import decode_ledger
from codegen.arch import TARGETS
from codegen.axes import Kind, Mask, Softmax
from codegen.cli import main
from codegen.decode import ALL, decodes_of
from codegen.families import FAMILIES
from codegen.ledger import counts, render
from codegen.pack import packs_of
from codegen.profiles import PROFILES, of_profile, profile_of
from codegen.render import environment, render_decode, render_kernel
from codegen.resident import ALL as ALL_RESIDENTS
from codegen.select import problem_class, select
from codegen.variant import parse_id

ROOT = Path(__file__).resolve().parents[2]
DEV = of_profile(select().emitted, "dev")
FAILS = -1  # any exit status but 0
HOPPER = "sm90a_fwd_d128_m128n192w8_s3_block_full_e4m3_bf16_linear_pingpong_solo"
ILLEGAL = "sm89_fwd_d64_m64n64w4_s2_token_full_e4m3_bf16_linear"


def run(*arguments: str | Path, code: int = 0) -> Result:
    """Runs the command line; anything but a clean exit with this status fails, and so does a traceback."""
    result = CliRunner().invoke(main, [str(x) for x in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code != 0 if code == FAILS else result.exit_code == code, result.output[-1000:]
    return result


@pytest.fixture(scope="module")
def dev_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dev profile, generated into a folder."""
    folder = tmp_path_factory.mktemp("dev") / "dev"
    run("--profile", "dev", "--out", folder)
    return folder


@pytest.fixture
def dev(dev_once: Path, tmp_path: Path) -> Path:
    """A copy of it, for a test to change."""
    return Path(shutil.copytree(dev_once, tmp_path / "dev"))


def test_count_adds_up() -> None:
    lines = run("count").output.splitlines()
    numbers = [int(x.replace(",", "")) for x in re.findall(r"[\d,]+", lines[0])]
    assert numbers == [select().declared, len(select().emitted), len(select().rejected)]
    rejected = re.findall(r"^  rejected +([\d,]+)  (\S+)$", "\n".join(lines), re.M)
    assert {rule: int(n.replace(",", "")) for n, rule in rejected} == dict(counts(select()))
    profiles = {
        p: int(n.replace(",", "")) for n, p in re.findall(r"^  profile +([\d,]+)  (\S+)$", "\n".join(lines), re.M)
    }
    assert profiles == {p: len(of_profile(select().emitted, p)) for p in PROFILES}


@pytest.mark.parametrize("profile", PROFILES)
def test_list_names_the_variants_of_a_profile(profile: str) -> None:
    lines = [line.split() for line in run("list", "--profile", profile).output.splitlines()]
    assert lines == [[profile_of(v), v.id] for v in of_profile(select().emitted, profile)]


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        (("head_dim=96",), lambda v: v.head_dim == 96),
        (("mask=CAUSAL", "softmax=linear"), lambda v: v.mask is Mask.CAUSAL and v.softmax is Softmax.LINEAR),
        (("kind=diag",), lambda v: v.kind is Kind.DIAG),
        (("schedule=serial", "cluster=split2"), lambda v: v.id.endswith("_serial_split2")),
        (("family=sm90a", "scaling=token"), lambda v: v.id.startswith("sm90a_") and "_token_" in v.id),
        (("dtype=e5m2", "out=fp16", "scaling=block"), lambda v: v.id.count("_block_") and v.id.count("_e5m2_fp16_")),
    ],
)
def test_list_with_filters(filters: tuple[str, ...], kept: object) -> None:
    assert callable(kept)
    options = [x for text in filters for x in ("--filter", text)]
    wanted = [v.id for v in select().emitted if kept(v)]
    assert 0 < len(wanted) < len(select().emitted)
    assert [line.split()[1] for line in run("list", *options).output.splitlines()] == wanted


def test_a_tile_can_be_filtered_by_its_name() -> None:
    tile = select().emitted[0].tile
    listed = run("list", "--filter", f"tile={tile}").output.splitlines()
    assert [line.split()[1] for line in listed] == [v.id for v in select().emitted if v.tile == tile]


def test_ledger_is_the_committed_ledger() -> None:
    output = run("ledger").output
    assert output == render(select()) + decode_ledger.render()
    assert output == (ROOT / "generated" / "ledger.txt").read_text()


def test_only_generates_what_is_named(tmp_path: Path) -> None:
    one, two = select().emitted[0].id, select().emitted[-1].id
    run("--only", two, "--only", one, "--only", one, "--out", tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert [v["id"] for v in manifest["variants"]] == [one, two]
    assert manifest["profile"] == "custom"
    assert sorted(p.stem for p in tmp_path.glob("sm*/*.cu")) == [one, two]
    shapes = {(v["head_dim"], v["key_block"]) for v in manifest["variants"]}
    assert {(p["head_dim"], p["key_block"]) for p in manifest["packs"] if p["source"] != "fp8"} == shapes
    assert {p["head_dim"] for p in manifest["packs"] if p["source"] == "fp8"} == {head_dim for head_dim, _ in shapes}
    assert sorted(p.stem for p in tmp_path.glob("pack/*.cu")) == sorted(p["id"] for p in manifest["packs"])


def test_only_takes_kernels_of_decode(tmp_path: Path) -> None:
    """With the kernel that cuts their work, and beside variants."""
    one, decode = select().emitted[0], "decode_sm90a_d128_r16"
    run("--only", decode, "--only", one.id, "--out", tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert [[x["id"] for x in manifest[name]] for name in ("variants", "decodes", "plans")] == [
        [one.id], [decode], ["cut", "append", "merge"]
    ]  # fmt: skip
    assert (tmp_path / "decode" / f"{decode}.cu").is_file() and (tmp_path / "cut.cu").is_file()
    assert "is for sm90a, --arch has sm89" in run("--only", decode, "--arch", "sm89", code=FAILS).output


def test_only_takes_a_legal_variant_that_was_outranked(tmp_path: Path) -> None:
    v = next(v for v, r in select().rejected if r.rule == "OUTRANKED")
    run("--only", v.id, "--out", tmp_path)
    assert (tmp_path / v.family / f"{v.id}.cu").read_text().startswith(f"// {v.id}\n")


@pytest.mark.parametrize("archs", [("sm89",), ("sm90a",), ("sm89", "sm90a")])
def test_arch_chooses_the_targets(archs: tuple[str, ...], tmp_path: Path) -> None:
    run(*[x for a in archs for x in ("--arch", a)], "--profile", "dev", "--out", tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["archs"] == list(archs)
    assert manifest["gencode"] == {a: TARGETS[a].gencode for a in archs}


ERRORS: list[tuple[list[str], str]] = [
    (["--filter", "head_dim=7"], r"head_dim=7.*head_dim has .*64"),
    (["--filter", "head_dim=64", "--filter", "softmax=linear", "--filter", "dtype=e5m2"], r"no emitted variant.*e5m2"),
    (["--filter", "colour=red"], r"colour=red.*head_dim, tile, stages"),
    (["--filter", "head_dim"], r"'head_dim'.*AXIS=VALUE"),
    (["--only", ILLEGAL], rf"{ILLEGAL} is illegal\. LINEAR-TOKEN: "),
    (["--only", "nonsense"], r"'nonsense' is not a variant id"),
    (["--only", ILLEGAL.replace("token", "row")], r"row"),
    (["--only", ILLEGAL.replace("sm89", "sm75").replace("token", "head")], r"sm75"),
    (["--only", ILLEGAL.replace("d64", "d48").replace("token", "head")], r"48"),
    (["--only", ILLEGAL.replace("w4", "w0").replace("token", "head")], r"w0"),
    (["--only", ILLEGAL.replace("n64", "n0").replace("token", "head")], r"n0"),
    (["--only", ILLEGAL.replace("s2", "s0").replace("token", "head")], r"s0"),
    (["--only", ILLEGAL.replace("s2", "s9").replace("token", "head")], r"s9"),
    (["--arch", "sm75"], r"'sm75' is not one of 'sm89', 'sm90a'"),
    (["--only", HOPPER.replace("linear", "exp2")], r"is illegal\. EXP2-KEYS: "),
    (["--only", HOPPER.replace("_solo", "_split3")], r"is not a variant id"),
    (["--only", HOPPER.replace("d128", "d32")], r"head_dim 32 is not declared \(64, 96, 128, 192, 256 are\)"),
    (["--profile", "all"], r"'all' is not one of 'dev', 'ci', 'release'"),
]


@pytest.mark.parametrize(("arguments", "message"), ERRORS, ids=[" ".join(a) for a, _ in ERRORS])
def test_errors_say_why(arguments: list[str], message: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for command in ([*arguments, "--out", str(out)], ["list", *arguments]):
        result = run(*command, code=FAILS)
        assert re.search(message, " ".join(result.output.split())), result.output
    assert not out.exists(), "an error came after files were written"


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("--profile", "dev", "list"), id="profile before a command"),
        pytest.param(("--check", "count"), id="check before a command"),
        pytest.param(("list", "--only", DEV[0].id, "--profile", "dev"), id="only and profile"),
    ],
)
def test_no_option_is_ignored(arguments: tuple[str, ...]) -> None:
    """Each of these options would have no effect: the generator must refuse them."""
    assert run(*arguments, code=FAILS).output


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    """`--out .` in a source tree would remove every .cu file one folder down."""
    mine = tmp_path / "csrc" / "mine.cu"
    mine.parent.mkdir()
    mine.write_text("// written by hand\n")
    assert "--out" in run("--profile", "dev", "--out", tmp_path, code=FAILS).output
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [mine]


def test_the_committed_folder_is_what_the_generator_writes() -> None:
    output = run("--check").output
    assert "is what the generator writes" in output and f"{len(select().emitted)} kernels" in output


def test_check_of_another_folder(dev: Path) -> None:
    assert "is what the generator writes" in run("--check", "--profile", "dev", "--out", dev).output
    missing = run("--check", "--profile", "ci", "--out", dev, code=1).output
    assert "missing: " in missing and "orphan: " not in missing


def test_check_names_orphans_missing_and_changed_files(dev: Path) -> None:
    names = [f"{v.family}/{v.id}.cu" for v in DEV[:2]]
    (dev / names[0]).unlink()
    (dev / names[1]).write_text((dev / names[1]).read_text().replace("kStages", "kSlots"))
    orphan = names[0].replace("_d64_", "_d65_")
    (dev / orphan).write_text("// somebody's\n")
    before = {p: p.read_bytes() for p in dev.rglob("*") if p.is_file()}
    result = run("--check", "--profile", "dev", "--out", dev, code=1)
    for line in (f"missing: {names[0]}", f"orphan: {orphan}", f"changed: {names[1]}", f"--- on disk/{names[1]}"):
        assert line in result.output.splitlines()
    assert re.search(r"^-.*kSlots", result.output, re.M) and re.search(r"^\+.*kStages", result.output, re.M)
    assert "python -m codegen" in result.stderr
    assert {p: p.read_bytes() for p in dev.rglob("*") if p.is_file()} == before, "--check wrote"
    assert "1 removed" in run("--profile", "dev", "--out", dev).output
    run("--check", "--profile", "dev", "--out", dev)


@pytest.mark.parametrize("template", sorted(p.name for p in (ROOT / "templates").glob("*.j2")))
def test_a_template_edit_fails_the_check(
    template: str, dev: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["--profile", "dev", "--out", dev]
    if template == "resident.cu.j2":  # of which dev has none
        asked = ["--only", ALL_RESIDENTS[0].id, "--out", tmp_path / "resident"]
        run(*asked)
    edited = tmp_path / "templates"
    shutil.copytree(ROOT / "templates", edited)
    with (edited / template).open("a") as file:
        file.write("// an edit\n")
    monkeypatch.setattr("codegen.outputs.environment", lambda: environment(edited))
    result = run("--check", *asked, code=1)
    changed = [line for line in result.output.splitlines() if line.startswith("changed: ")]
    # An edited kernel also changes its digest in the manifest, and the registry names the manifest's.
    kernels = sum(template.startswith(f"{v.family}_") for v in DEV)
    if template.startswith("pack"):
        kernels = sum(pack.quantises == (template == "pack.cu.j2") for pack in packs_of(DEV))
    elif template.startswith("decode"):
        kernels = sum(d.wide == (template == "decode_wide.cu.j2") for d in decodes_of("dev", tuple(TARGETS)))
    elif template in (
        "plan.cu.j2",
        "cut.cu.j2",
        "append.cu.j2",
        "route.cu.j2",
        "resident.cu.j2",
        "pack_mask.cu.j2",
        "merge.cu.j2",
    ):
        kernels = 1
    assert len(changed) == (kernels + 2 if template.endswith(".cu.j2") else 1)
    assert "+// an edit" in result.output or "more lines" in result.output


@pytest.mark.parametrize(
    "part", sorted(p.relative_to(ROOT / "templates") for p in (ROOT / "templates").glob("*/*.j2")), ids=str
)
def test_every_part_of_a_template_is_in_some_kernel_of_its_family(part: Path, tmp_path: Path) -> None:
    edited = tmp_path / "templates"
    shutil.copytree(ROOT / "templates", edited)
    with (edited / part).open("a") as file:
        file.write("// an edit\n")
    before, after = environment(), environment(edited)
    if part.parent.name == "decode":
        assert any("// an edit" in render_decode(d, after).splitlines() for d in ALL)
        return
    members = [v for v in select().emitted if v.family == part.parent.name]
    changed = next(v for v in members if render_kernel(v, after) != render_kernel(v, before))
    assert "// an edit" in render_kernel(changed, after).splitlines()


def listed(*arguments: str) -> list[str]:
    return [line.split()[1] for line in run("list", *arguments).output.splitlines()]


def test_a_build_leaves_out_what_is_emulated_unless_it_is_asked_for() -> None:
    families = {text: {i.partition("_")[0] for i in listed(*text.split())} for text in ("--arch sm89", "--arch sm90a")}
    assert families == {"--arch sm89": {"sm89"}, "--arch sm90a": {"sm90a"}}
    everything = listed("--arch", "sm90a", "--emulated")
    assert everything == listed() == [v.id for v in select().emitted]
    assert listed("--arch", "sm89", "--emulated") == listed("--arch", "sm89")
    # ci leaves out modes of sm90a that sm89 has: its kernels are the ones that dispatch falls back to.
    ci = [parse_id(i) for i in listed("--arch", "sm90a", "--profile", "ci")]
    modes = {family: {problem_class(replace(v, family="any")) for v in ci if v.family == family} for family in FAMILIES}
    assert modes["sm89"] and modes["sm89"].isdisjoint(modes["sm90a"])


def test_render_prints_a_kernel(dev: Path) -> None:
    for v in (DEV[0], DEV[-1]):
        assert run("render", v.id).output == (dev / v.family / f"{v.id}.cu").read_text()
    assert run("render", HOPPER).output.startswith(f"// {HOPPER}\n")
    decode = decodes_of("dev", tuple(TARGETS))[0]
    assert run("render", decode.id).output == (dev / decode.path).read_text()
    assert "LINEAR-TOKEN" in run("render", ILLEGAL, code=FAILS).output
