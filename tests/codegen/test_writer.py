"""Generation is a function of the sources alone, and the writer touches only what differs.

Regressions these catch: an order that follows hashes, the working directory or the clock; a time stamp renewed without
need (everything would compile again); a kernel left behind that nothing emits; somebody's file deleted; a stale
generated/ that passes the check; a generator that needs torch.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

from codegen.arch import TARGETS
from codegen.axes import Change, Cluster, Kind, Operand, Scaling, Walk
from codegen.decode import ALL
from codegen.families import derive
from codegen.outputs import Request, files, kernel_path
from codegen.profiles import PROFILES
from codegen.resident import ALL as RESIDENTS
from codegen.scaling import key_block
from codegen.select import select
from codegen.writer import DIFF_LINES, compare, is_ours, write

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.xdist_group("generated")  # one process makes what all of these read
FILES = {
    "manifest.json": "{}\n",
    "registry.cpp": "// registry\n",
    "sm89/a.cu": "".join(f"line {i}\n" for i in range(200)),
    "sm89/b.cu": "b\n",
}
ORPHANS = (
    "sm89/old.cu",
    "sm90a/old.cu",
    "old.cu",
    "ledger.txt",
    "table.txt",
    "times.txt",
)
UNRELATED = ("notes.txt", "gates/sm89_ci.txt", "sm89/README.md", "measured.json", "sm89/deeper/mine.cu", "kernel.cuh")


def fill(root: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{name}\n")


def tree(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def age(root: Path) -> None:
    """Time stamps of long ago, so that any write shows."""
    for path in root.rglob("*"):
        os.utime(path, ns=(10**18, 10**18))


# Run without site-packages: only what is linked into the folder given first can be imported.
BARE = """
import pathlib, runpy, sys
sys.path[:0] = sys.argv[1:3]
sys.argv = ["codegen", *sys.argv[3:]]
import codegen.kept
codegen.kept.FOLDER = pathlib.Path("/dev/null")
try:
    runpy.run_module("codegen", run_name="__main__")
except SystemExit as end:
    if end.code:
        raise
loaded = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names) - {"__main__"}
print("\\nLOADED", *sorted(loaded))
"""


@dataclass(frozen=True)
class Elsewhere:
    """What a process of its own wrote, and the packages that it loaded."""

    root: Path
    loaded: set[str]


@pytest.fixture(scope="module")
def rendered() -> dict[str, str]:
    """A whole generation of this process, whose hash seed is any."""
    request = Request(
        archs=tuple(TARGETS), profile="release", variants=select().emitted, decodes=ALL, residents=RESIDENTS
    )
    return files(request, select())


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Elsewhere:
    """Another one, of a process with another hash seed, working directory and output path, no other environment, hence
    no nvcc on PATH, no packages but the two that the generator needs and what they import, and nothing that another
    process has kept."""
    base = tmp_path_factory.mktemp("generated")
    packages = base / "packages"
    for folder in (packages, base / "elsewhere"):
        folder.mkdir()
    for name in ("jinja2", "markupsafe", "click"):
        file = importlib.import_module(name).__file__
        assert file is not None
        (packages / name).symlink_to(Path(file).parent)
    out = Path("..") / "a longer" / "one"
    command = [sys.executable, "-S", "-c", BARE, packages, ROOT, "--out", out]
    result = subprocess.run(
        [str(x) for x in command],
        env={"PYTHONHASHSEED": "4242"},
        capture_output=True,
        text=True,
        cwd=base / "elsewhere",
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return Elsewhere(base / "a longer" / "one", set(result.stdout.rsplit("LOADED ", 1)[1].split()))


@pytest.fixture(scope="module")
def generated(elsewhere: Elsewhere) -> Path:
    """The folder of that process."""
    return elsewhere.root


def test_the_same_bytes_everywhere(generated: Path, rendered: dict[str, str]) -> None:
    found = tree(generated)
    assert len(found) > len(select().emitted)
    assert found.keys() == rendered.keys()
    assert [name for name, text in rendered.items() if found[name] != text.encode()] == []


def test_generating_again_touches_nothing(generated: Path, rendered: dict[str, str]) -> None:
    root = generated
    age(root)
    result = write(root, rendered)
    assert (result.written, result.unchanged, result.removed) == ((), tuple(sorted(rendered)), ())
    assert {p.stat().st_mtime_ns for p in root.rglob("*")} == {10**18}


def test_no_path_or_host_leaks_into_the_output(generated: Path) -> None:
    words = [str(ROOT).encode(), str(Path.home()).encode() + b"/", str(generated.parent).encode(), b"\r"]
    assert [(n, w) for n, data in tree(generated).items() for w in words if w in data] == []


def test_the_manifest_lists_the_files(generated: Path) -> None:
    root = generated
    manifest = json.loads((root / "manifest.json").read_text())
    variants = manifest["variants"]
    assert [v["id"] for v in variants] == sorted(v["id"] for v in variants) == [v.id for v in select().emitted]
    kernels = [*variants, *manifest["packs"], *manifest["decodes"], *manifest["residents"], *manifest["plans"]]
    assert {k["file"] for k in kernels} == {p.relative_to(root).as_posix() for p in root.rglob("*.cu")}
    digests = {k["file"]: hashlib.sha256((root / k["file"]).read_bytes()).hexdigest() for k in kernels}
    assert {k["file"]: k["sha256"] for k in kernels} == digests


def test_the_manifest_says_what_a_kernel_reads_and_where_it_runs(generated: Path) -> None:
    manifest = json.loads((generated / "manifest.json").read_text())
    assert manifest["head_dims"] == {"sm89": [32, 64, 96, 128, 256], "sm90a": [64, 96, 128, 192, 256]}
    for entry in manifest["variants"]:
        hopper = entry["family"] == "sm90a"
        assert entry["targets"] == (["sm90a"] if hopper else ["sm89"])
        integer = entry["dtype"] in ("s8", "s8u8")
        coarser = ["tensor", "head"] if entry["scaling"] == "block" and not integer else []
        assert entry["scalings"] == [*coarser, entry["scaling"]]
        assert entry["key_block"] == (128 if 128 % entry["tile_n"] == 0 else entry["tile_n"])
        assert integer or entry["score"] == "f16" or entry["key_block"] == 128, "FP8 operands have blocks of 128 keys"
        assert (entry["schedule"] == "multistage") == (not hopper)
        assert entry["cluster"] == "solo" or hopper


INTEGERS = (Operand.S8, Operand.S8U8)


def made_by(pack: str) -> str:
    """What integers a pack kernel makes, by its name; "" for e4m3."""
    return next((name for name in ("s8", "s8u8") if pack.endswith(f"_{name}")), "")


def test_every_variant_has_the_kernels_that_make_its_operands(generated: Path) -> None:
    """Of both 16-bit sources in its blocks of keys, and of FP8, on each of its targets, in its profile; no others."""
    manifest = json.loads((generated / "manifest.json").read_text())
    packs = {(p["head_dim"], p["key_block"], p["source"], made_by(p["id"])): p for p in manifest["packs"]}
    assert len(packs) == len(manifest["packs"])
    assert list(packs) == sorted(packs)
    users = defaultdict(list)
    for v in manifest["variants"]:
        made = v["dtype"] if v["dtype"] in ("s8", "s8u8") else ""
        for source in ("bf16", "fp16"):
            users[v["head_dim"], v["key_block"], source, made].append(v)
        if not made:
            users[v["head_dim"], 128, "fp8", ""].append(v)
    assert packs.keys() == users.keys()
    for key, pack in packs.items():
        assert set(pack["targets"]) == {target for v in users[key] for target in v["targets"]}
        assert PROFILES.index(pack["profile"]) == min(PROFILES.index(v["profile"]) for v in users[key])
        head_dim, key_block, source, made = key
        assert pack["id"] == f"pack_d{head_dim}_n{key_block}_{source}" + (f"_{made}" if made else "")


def table_of(registry: str, name: str) -> tuple[list[str], list[str]]:
    """The columns that the comment above a table names, and its rows."""
    columns, rows = re.findall(rf"// ([^\n]*)\nconst \w+ {name}\[\] = \{{\n(.*?)\n\}};", registry, re.S)[0]
    return columns.split(", "), [row.strip() for row in rows.splitlines()]


def fields_of(struct: str) -> list[str]:
    """The fields of a struct of csrc/registry.h, in order."""
    body = re.search(rf"struct {struct} \{{\n(.*?)\n\}};", (ROOT / "csrc" / "registry.h").read_text(), re.S)
    assert body is not None
    code = re.sub(r"//[^\n]*", "", body[1])
    found = []
    for statement in code.split(";"):
        if "(" not in statement and (declared := re.match(r"\s*(?:const )?\w+\*? (.*)", statement, re.S)):
            found += [name.strip().split("[")[0] for name in declared[1].split(",")]
    return found


@pytest.mark.parametrize(("struct", "table"), [("VariantEntry", "kVariants"), ("PackEntry", "kPacks")])
def test_the_columns_of_the_registry_are_the_struct_s(struct: str, table: str, generated: Path) -> None:
    """A row has no names: with two numbers exchanged it would compile, and launch another grid."""
    columns, _ = table_of((generated / "registry.cpp").read_text(), table)
    assert columns == fields_of(struct)


def test_the_registry_has_the_packs_in_the_manifest_s_order(generated: Path) -> None:
    registry = (generated / "registry.cpp").read_text()
    packs = json.loads((generated / "manifest.json").read_text())["packs"]
    _, rows = table_of(registry, "kPacks")
    for p, row in zip(packs, rows, strict=True):
        assert row.startswith(f'{{"{p["id"]}", {p["head_dim"]}, {p["key_block"]}, SourceType::{p["source"]}, ')
        copies, integer, integer_v = p["source"] == "fp8", made_by(p["id"]) != "", made_by(p["id"]) == "s8u8"
        delivers = p["head_dim"] in (64, 128) and not copies and not integer
        ragged = not integer
        end = f", {str(ragged).lower()}, {str(integer).lower()}, {str(integer_v).lower()}}},"
        text = (generated / p["file"]).read_text()
        stated = dict(re.findall(r"constexpr int (k\w+) = (\d+);", text))
        stage = re.search(r"static_assert\(Stage::kBytes == (\d+)\)", text)
        delivery = re.search(r"sizeof\(Delivery::Storage\) == (\d+)\)", text)
        threads = re.search(r"Delivery::kThreads == (\d+) && Delivery::kCtas == (\d+)\)", text)
        assert stage is not None and (delivery is not None) == (threads is not None) == delivers
        numbers = [stated["kRows"], stated.get("kCtas", "1"), stage[1]]
        if delivery is not None and threads is not None:
            numbers += [threads[1], delivery[1], threads[2]]
        else:
            numbers += ["0"] * 3
        assert row.endswith(", ".join(numbers) + end)
        params = "Fp8PackParams" if copies else "PackParams"
        assert (f"\n    {p['id']}_ragged(const __grid_constant__ {params} p, " in text) == ragged
        assert (f"\n    {p['id']}_gather(" in text) == (ragged and copies)
        assert text.startswith(f"// {p['id']}\n") and f"\n    {p['id']}(const __grid_constant__ {params} p)" in text


def test_the_registry_has_the_manifest_s_order(generated: Path) -> None:
    """The position in the manifest is the number of the kernel in the extension; and what is a constant of the source
    is the same number in its row."""
    columns, rows = table_of((generated / "registry.cpp").read_text(), "kVariants")
    for v, row in zip(select().emitted, rows, strict=True):
        cells = row.removeprefix("{").removesuffix("},").split(", ", len(columns) - 4)  # the last but three has commas
        values = dict(zip(columns, [*cells[:-1], *cells[-1].rsplit(", ", 3)], strict=True))
        d = derive(v)
        assert (
            values
            | {
                "id": f'"{v.id}"',
                "family": f"Family::{v.family}",
                "head_dim": str(v.head_dim),
                "tile_m": str(v.tile_m),
                "tile_n": str(v.tile_n),
                "smem_bytes": str(d.smem_bytes),
                "mask": f"Mask::{v.mask}",
                "out": f"OutType::{v.out}",
                "q": f"Granularity::{v.scaling.grain.q}",
                "k": "Granularity::group" if v.dtype in INTEGERS else f"Granularity::{v.scaling.grain.k}",
                "v": "Granularity::token" if v.dtype is Operand.S8U8 else f"Granularity::{v.scaling.grain.v}",
                "diagnostic": str(v.kind is Kind.DIAG).lower(),
                "key_block": str(key_block(v)),
                "coarse": str(v.scaling is Scaling.BLOCK and v.dtype not in INTEGERS).lower(),
                "draws": str(v.family == "sm90a" and v.cluster is Cluster.SOLO).lower(),
                "quantises_q": str(d.quantises_q).lower(),
                "ragged": str(v.walk is Walk.RAGGED).lower(),
                "plain": str(d.plain).lower(),
                "capped": str(v.change is Change.TANH).lower(),
                "biased": str(v.change is Change.BIAS).lower(),
                "unrolled": "{"
                + ", ".join(f"{{{u.least_keys}, {u.most_keys}, {str(u.plain).lower()}}}" for u in d.unrolled)
                + "}",
            }
            == values
        )
        text = (generated / kernel_path(v)).read_text()
        stated = dict(re.findall(r"constexpr int (k\w+) = (\d+);", text))
        constants = {"threads": "kThreads", "slot_keys": "kSlotKeys", "parts": "kParts", "split": "kSplit"}
        constants |= {"ctas_per_sm": "kCtasPerSm"}
        for column, constant in constants.items():
            default = values["tile_n"] if column == "slot_keys" else "1"
            assert values[column] == stated.get(constant, default), (v.id, column)
        names = re.findall(r"__global__ void __launch_bounds__\([^)]*\) (\w+)\(const __grid_constant__ ", text)
        plain = [f"{v.id}_plain"] if d.plain else []
        assert names == [v.id, *plain, *(f"{v.id}_keys{u.most_keys}" for u in d.unrolled)]
        assert text.startswith(f"// {v.id}\n")


def test_the_registry_names_its_manifest_and_targets(generated: Path) -> None:
    registry = (generated / "registry.cpp").read_text()
    digest = hashlib.sha256((generated / "manifest.json").read_bytes()).hexdigest()
    assert f'const char kManifest[] = "{digest}";' in registry
    assert '    {"sm89", 8, 9},\n    {"sm90a", 9, 0},\n' in registry


def test_the_plan_is_compiled_once_where_there_are_ragged_batches(generated: Path) -> None:
    manifest = json.loads((generated / "manifest.json").read_text())
    plan, cut, append, route, pack_mask, merge = manifest["plans"]
    assert (plan["id"], plan["file"], plan["targets"]) == ("plan", "plan.cu", ["sm89", "sm90a"])
    assert (cut["id"], cut["file"], cut["targets"]) == ("cut", "cut.cu", ["sm89", "sm90a"])
    assert (append["id"], append["file"], append["targets"]) == ("append", "append.cu", ["sm89", "sm90a"])
    assert (route["id"], route["file"], route["targets"]) == ("route", "route.cu", ["sm89", "sm90a"])
    assert (pack_mask["id"], pack_mask["file"], pack_mask["targets"]) == (
        "pack_mask",
        "pack_mask.cu",
        ["sm89", "sm90a"],
    )
    assert (merge["id"], merge["file"], merge["targets"]) == ("merge", "merge.cu", ["sm89", "sm90a"])
    holds = [p.name for p in generated.rglob("*.cu") if "walk/plan.cuh" in p.read_text()]
    assert holds == ["plan.cu"]


def test_write_and_write_again(tmp_path: Path) -> None:
    first = write(tmp_path / "new" / "folder", FILES)
    root = tmp_path / "new" / "folder"
    assert (first.written, first.unchanged, first.removed) == (tuple(sorted(FILES)), (), ())
    assert tree(root) == {name: text.encode() for name, text in FILES.items()}
    age(root)
    second = write(root, FILES)
    assert (second.written, second.unchanged, second.removed) == ((), tuple(sorted(FILES)), ())
    assert {p.stat().st_mtime_ns for p in root.rglob("*")} == {10**18}


def test_only_what_changed_is_written(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    age(tmp_path)
    result = write(tmp_path, {**FILES, "sm89/b.cu": "other\n", "sm89/c.cu": "new\n"})
    assert (result.written, result.removed) == (("sm89/b.cu", "sm89/c.cu"), ())
    assert (tmp_path / "sm89/b.cu").read_text() == "other\n"
    assert (tmp_path / "sm89/a.cu").stat().st_mtime_ns == 10**18


def test_orphans_go_and_unrelated_files_stay(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    fill(tmp_path, ORPHANS + UNRELATED)
    result = write(tmp_path, FILES)
    assert result.removed == tuple(sorted(ORPHANS)) and result.written == ()
    assert set(tree(tmp_path)) == set(FILES) | set(UNRELATED)
    assert all((tmp_path / name).read_text() == f"{name}\n" for name in UNRELATED)
    assert not (tmp_path / "sm90a").exists() and (tmp_path / "sm89").is_dir()


def test_compare_a_clean_folder(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    fill(tmp_path, UNRELATED)
    age(tmp_path)
    difference = compare(tmp_path, FILES)
    assert difference.clean and difference.diff == ""
    assert {p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == {10**18}


def test_compare_says_what_is_wrong(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    fill(tmp_path, ORPHANS)
    (tmp_path / "sm89/b.cu").unlink()
    (tmp_path / "registry.cpp").write_text("// edited by hand\n")
    before = tree(tmp_path)
    difference = compare(tmp_path, FILES)
    assert tree(tmp_path) == before
    assert not difference.clean
    assert difference.missing == ("sm89/b.cu",)
    assert difference.orphans == tuple(sorted(ORPHANS))
    assert difference.changed == ("registry.cpp",)
    assert difference.diff.splitlines() == [
        *("--- on disk/registry.cpp", "+++ generated/registry.cpp", "@@ -1 +1 @@"),
        *("-// edited by hand", "+// registry"),
    ]


def test_a_folder_that_is_not_there_misses_everything(tmp_path: Path) -> None:
    difference = compare(tmp_path / "nowhere", FILES)
    assert difference.missing == tuple(sorted(FILES)) and not difference.clean
    assert not (tmp_path / "nowhere").exists()


def test_a_long_diff_is_cut_and_says_so(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    (tmp_path / "sm89/a.cu").write_text("x\n" * 200)
    lines = compare(tmp_path, FILES).diff.splitlines()
    assert len(lines) == DIFF_LINES + 1
    assert re.fullmatch(r"\.\.\. \d+ more lines", lines[-1])


def test_a_diff_of_many_files_stays_readable(tmp_path: Path) -> None:
    """A template edit changes every kernel: hundreds of files, each named, but not hundreds of diffs."""
    many = {f"sm89/k{i}.cu": FILES["sm89/a.cu"] for i in range(100)}
    write(tmp_path, {name: "x\n" * 200 for name in many})
    difference = compare(tmp_path, many)
    assert len(difference.changed) == 100
    assert len(difference.diff.splitlines()) < 1000


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"b\r\n", id="line end"),
        pytest.param(b"b", id="no newline at the end"),
        pytest.param(b"b\n\n", id="empty line"),
        pytest.param(b"\xff\n", id="not UTF-8"),
        pytest.param(b"", id="empty"),
    ],
)
def test_any_other_byte_is_a_change_with_a_diff(tmp_path: Path, data: bytes) -> None:
    write(tmp_path, FILES)
    (tmp_path / "sm89/b.cu").write_bytes(data)
    difference = compare(tmp_path, FILES)
    assert difference.changed == ("sm89/b.cu",)
    assert difference.diff
    assert write(tmp_path, FILES).written == ("sm89/b.cu",)
    assert compare(tmp_path, FILES).clean


def test_jinja2_and_click_are_enough(elsewhere: Elsewhere) -> None:
    """No torch, no fp8cutlass."""
    assert {"codegen", "click", "jinja2"} <= elsewhere.loaded <= {"codegen", "click", "jinja2", "markupsafe"}


def test_only_a_manifest_of_the_generator_makes_a_folder_ours(tmp_path: Path) -> None:
    assert is_ours(tmp_path / "absent") and is_ours(tmp_path)
    (tmp_path / "mine.cu").write_text("mine")
    assert not is_ours(tmp_path)
    for text in ("", "[1, 2]", '{"mine": 1}'):
        (tmp_path / "manifest.json").write_text(text)
        assert not is_ours(tmp_path)


def test_a_link_is_replaced_and_what_it_names_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    root = tmp_path / "out"
    root.mkdir()
    (root / "registry.cpp").symlink_to(tmp_path / "mine.txt")
    write(root, {"registry.cpp": "new"})
    assert (tmp_path / "mine.txt").read_text() == "mine" and (root / "registry.cpp").read_text() == "new"
    assert not (root / "registry.cpp").is_symlink()


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"registry.cpp": "old"})

    def full(self: Path, data: bytes) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path, {"registry.cpp": "new"})
    assert tree(tmp_path) == {"registry.cpp": b"old"}
