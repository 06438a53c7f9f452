"""Finding and loading the shared library: it must hold what the manifest beside it says, and there is one a process."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from fp8cutlass import UnsupportedError
from fp8cutlass.manifest import TABLES, Manifest, generated_dir
from fp8cutlass.native import extension


def manifest_of(ids: list[str]) -> str:
    """The shipped manifest with these variants alone."""
    manifest = json.loads((generated_dir() / "manifest.json").read_text())
    manifest["variants"] = [next(row for row in manifest["variants"] if row["id"] == wanted) for wanted in ids]
    return json.dumps(manifest)


def stub(
    folder: Path,
    ids: list[str],
    *,
    exports: str = "fp8cutlass",
    manifest: str | None = None,
    library: str = "fp8cutlass_C",
) -> Path:
    """A library that says it holds these variants, of this manifest, and registers nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.fail("no C compiler: the extension could not be built either")
    table = ", ".join(f'"{variant_id}"' for variant_id in ids)
    digest = hashlib.sha256((manifest or manifest_of(ids)).encode()).hexdigest()
    (folder / "stub.c").write_text(
        f"static const char* ids[] = {{{table}, 0}};\n"
        f"int {exports}_variant_count() {{ return {len(ids)}; }}\n"
        f'const char* {exports}_manifest() {{ return "{digest}"; }}\n'
        f'const char* {exports}_library() {{ return "{library}"; }}\n'
        f"const char* {exports}_variant_id(int i) {{ return i >= 0 && i < {len(ids)} ? ids[i] : 0; }}\n"
    )
    made = folder / "_C.so"
    subprocess.run([compiler, "-shared", "-fPIC", str(folder / "stub.c"), "-o", str(made)], check=True)
    return made


def describe(library: Path, ids: list[str]) -> None:
    """Put a manifest of these variants and the shipped table beside a library."""
    built = library.parent / "_built"
    built.mkdir()
    (built / "manifest.json").write_text(manifest_of(ids))
    for name in TABLES[1:]:
        shutil.copy(generated_dir() / name, built)


@pytest.fixture
def ids(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three variants, in a process that has loaded nothing."""
    monkeypatch.setattr(extension, "_registered", None)
    monkeypatch.setattr(extension, "_ready", None)
    return [variant.id for variant in manifest.variants[:3]]


def test_a_library_that_fits_its_manifest_is_loaded(
    ids: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = stub(tmp_path, ids)
    describe(library, ids)
    monkeypatch.setenv("FP8CUTLASS_LIBRARY", str(library))
    for _ in range(2):
        extension.load()
    assert extension._ready == library.resolve()


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0, 1], "holds 2 variants, .*manifest.json lists 3"),
        ([0, 1, 2, 0], "holds 4 variants, .*manifest.json lists 3"),
        ([0, 2, 1], "holds '{2}' as variant 1, .*manifest.json lists '{1}'"),
    ],
)
def test_a_stale_manifest_is_refused_each_time(
    order: list[int], message: str, ids: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of a variant is its position: with another list another kernel would run."""
    library = stub(tmp_path, [ids[number] for number in order])
    describe(library, ids)
    monkeypatch.setenv("FP8CUTLASS_LIBRARY", str(library))
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=message.format(*ids) + ".*pip install"):
            extension.load()


def test_a_manifest_with_other_numbers_is_refused(
    ids: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library launches by the numbers of its own build, which Python reads from the manifest."""
    library = stub(tmp_path, ids, manifest=manifest_of(ids).replace('"threads": 128', '"threads": 256', 1))
    describe(library, ids)
    monkeypatch.setenv("FP8CUTLASS_LIBRARY", str(library))
    with pytest.raises(UnsupportedError, match=r"was built from another manifest\.json than .*pip install"):
        extension.load()


def test_a_library_that_does_not_say_what_it_holds_is_refused(
    ids: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = stub(tmp_path, ids, exports="another")
    describe(library, ids)
    monkeypatch.setenv("FP8CUTLASS_LIBRARY", str(library))
    with pytest.raises(UnsupportedError, match="does not say which variants it holds.*fp8cutlass_variant_count"):
        extension.load()


def test_the_library_of_another_copy_is_refused(
    ids: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its operators are not where this copy looks for them."""
    library = stub(tmp_path, ids, library="_fp8cutlass_cuda_1234567_C")
    describe(library, ids)
    monkeypatch.setenv("FP8CUTLASS_LIBRARY", str(library))
    with pytest.raises(UnsupportedError, match="in '_fp8cutlass_cuda_1234567_C', this copy .* in 'fp8cutlass_C'"):
        extension.load()


def test_a_second_library_is_refused(ids: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's operators are registered once; the first library stays in force."""
    libraries = [stub(tmp_path / name, ids) for name in ("first", "second")]
    for library in libraries:
        describe(library, ids)
    monkeypatch.setenv("FP8CUTLASS_LIBRARY", str(libraries[0]))
    extension.load()
    monkeypatch.setenv("FP8CUTLASS_LIBRARY", str(libraries[1]))
    with pytest.raises(UnsupportedError, match="first/_C.so is loaded and .*second/_C.so cannot be loaded beside it"):
        extension.load()
    monkeypatch.setenv("FP8CUTLASS_LIBRARY", str(libraries[0]))
    extension.load()


def test_the_folder_is_searched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at every call; a library that appears after a failed search is found."""
    monkeypatch.delenv("FP8CUTLASS_LIBRARY", raising=False)
    monkeypatch.setattr(extension, "PACKAGE_DIR", tmp_path)
    assert extension.find_library() is None
    (tmp_path / "_C.abi3.so").touch()
    assert extension.find_library() == tmp_path / "_C.abi3.so"

    def searched(self: Path, pattern: str) -> None:
        raise LookupError(f"{self} was searched for {pattern} again")

    monkeypatch.setattr(Path, "glob", searched)
    assert extension.find_library() == tmp_path / "_C.abi3.so"
