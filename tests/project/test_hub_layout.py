"""The tree that the `kernels` library loads, beside an installed package.

Regressions these catch: operators whose namespace is written down in a second place, so that two copies collide; a
module that imports the installed package instead of its own; a file that is left out; metadata that the library
refuses; two trees of one name.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import hub_layout

ROOT = Path(__file__).resolve().parents[2]

# As `kernels` imports a tree: its own name, from the folder. The installed package comes before or after, or never.
LOAD = """
import importlib.util, json, sys
import torch

def load(folder):
    name = json.load(open(f"{folder}/metadata.json"))["id"]
    spec = importlib.util.spec_from_file_location(name, f"{folder}/__init__.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 96, 64, dtype=torch.bfloat16) for _ in range(3))
"""
BOTH = (
    LOAD
    + """
if sys.argv[2] == "first":
    import fp8cutlass
    hub = load(sys.argv[1])
else:
    hub = load(sys.argv[1])
    import fp8cutlass
one, other = (x.attention(q, k, v, is_causal=True) for x in (fp8cutlass, hub))
packed = [x.attention(q, x.pack_kv(k, v)) for x in (fp8cutlass, hub)]
flat = torch.utils._pytree.tree_leaves(hub.pack_kv(k, v))
print(json.dumps({
    "equal": torch.equal(one, other) and torch.equal(*packed),
    "operators": [str(sys.modules[f"{x.__name__}.call.operators"].attend) for x in (fp8cutlass, hub)],
    "leaves": len(flat),
    "classes": hub.PackedKV is not fp8cutlass.PackedKV,
    "flash": hub.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True).shape,
}))
"""
)
ALONE = (
    LOAD
    + """
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "fp8cutlass":
            raise ImportError(f"{name} is not installed")

sys.meta_path.insert(0, Missing())
hub = load(sys.argv[1])
exact = torch.nn.functional.scaled_dot_product_attention(*(x.float() for x in (q, k, v)))
compiled = torch.compile(hub.attention, backend="eager", fullgraph=True)
print(json.dumps([float((x(q, k, v).float() - exact).norm() / exact.norm()) for x in (hub.attention, compiled)]))
"""
)


pytestmark = pytest.mark.xdist_group("hub")  # one process makes the tree


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hub_layout.lay_out(tmp_path_factory.mktemp("hub"), "cpu")


def run(code: str, *arguments: str | Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run([sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(done.stderr)
    return done.stdout


@pytest.mark.parametrize("order", ["first", "second"])
def test_both_copies_answer_in_one_process(tree: Path, order: str) -> None:
    said = json.loads(run(BOTH, tree, order))
    unique = json.loads((tree / "metadata.json").read_text())["id"]
    assert said["equal"] and said["classes"] and said["leaves"] > 3 and said["flash"] == [1, 96, 2, 64]
    assert said["operators"] == ["fp8cutlass.attend.default", f"{unique}.attend.default"]


def test_a_tree_needs_no_installed_package(tree: Path) -> None:
    assert all(0.005 < error < 0.1 for error in json.loads(run(ALONE, tree)))


def test_the_library_loads_it(tree: Path) -> None:
    kernels = pytest.importorskip("kernels")
    module = kernels.get_local_kernel(tree.parents[1], backend="cpu", trust_remote_code=True)
    assert module.__name__ == json.loads((tree / "metadata.json").read_text())["id"] and callable(module.attention)


def test_metadata_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    said = hub_layout.metadata("_fp8cutlass_cuda_1234567", "cuda", ["sm89", "sm90a"])
    assert said["backend"] == {"type": "cuda", "archs": ["8.9", "9.0a"]}
    with pytest.raises(hub_layout.LayoutError, match="no such target: sm70; expected some of sm89, sm90a"):
        hub_layout.capabilities(["sm70"])


@pytest.mark.skipif(importlib.util.find_spec("kernels") is None, reason="the library kernels is not installed")
def test_the_library_reads_name_and_metadata_of_kernels() -> None:
    from kernels._rust import Metadata
    from kernels.variants import ArchVariant, parse_variant

    said = hub_layout.metadata("_fp8cutlass_cuda_1234567", "cuda", ["sm89", "sm90a"])
    read = Metadata.from_bytes(json.dumps(said).encode())
    assert (read.id, read.backend.archs) == ("_fp8cutlass_cuda_1234567", ["8.9", "9.0a"])
    assert isinstance(parse_variant(hub_layout.variant("cuda", (13, 0))), ArchVariant)


def test_the_folder_says_what_the_library_needs() -> None:
    assert hub_layout.variant("cpu", None) == "torch-cpu"
    name = hub_layout.variant("cuda", (13, 0))
    assert name.startswith("torch-stable-abi210-cu130-") and name.endswith("-linux")


def test_another_source_is_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {hub_layout.identity("cpu", "release", []), hub_layout.identity("cuda", "release", ["sm90a"])}
    before |= {hub_layout.identity("cuda", "ci", ["sm90a"]), hub_layout.identity("cuda", "release", ["sm89"])}
    assert len(before) == 4 and hub_layout.identity("cpu", "ci", []) in before
    files = list(hub_layout.sources())
    monkeypatch.setattr(hub_layout, "sources", lambda: iter(files[1:]))
    assert hub_layout.identity("cpu", "release", []) not in before


def test_a_second_place_for_the_namespace_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_layout, "NAMESPACE", hub_layout.re.compile("no such line"))
    with pytest.raises(hub_layout.LayoutError, match="must assign NAMESPACE once, it does so 0 times"):
        hub_layout.copy_package(tmp_path, "_fp8cutlass_cpu_1234567")
