"""Edge cases at the limits of the copy engine, and the order of stores, fences and arrivals, on the CPU.

Regressions these catch: a stride that no tensor map can have and nobody copies, a length that wraps around in 32 bits,
a store to an operand without the fence that shows it to the tensor cores, a lane that arrives for others too early.
"""

from __future__ import annotations

import mmap
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference import randn
from sources import source_of, write_source

from codegen.arch import TARGETS
from codegen.families.warpgroup.view import MANY_KEYS, TRUNCATION
from codegen.gates.toolbox import Toolbox, ToolboxError, open_toolbox
from fp8cutlass import UnsupportedError, attention, supports
from fp8cutlass.manifest import generated_dir, load_manifest
from fp8cutlass.memory import TENSOR_MAP_STRIDE, aligned
from scripts.cubins import run_nvcc

E4M3 = torch.float8_e4m3fn
HOPPER = [v for v in load_manifest(generated_dir()).variants if v.family == "sm90a"]


def source(variant_id: str) -> str:
    """A kernel without its comments."""
    return re.sub(r"//[^\n]*", "", source_of(variant_id))


@pytest.mark.edge(19)
def test_heads_two_to_the_40_bytes_apart() -> None:
    """More address space than a tensor map spans, of which only the heads themselves are touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE of Linux
    try:
        room = mmap.mmap(-1, TENSOR_MAP_STRIDE + (1 << 20), flags=flags)
    except OSError as error:
        pytest.skip(f"no address space of 2^40 bytes: {error}")
    everything = torch.frombuffer(room, dtype=torch.uint8)
    q, k, v = (randn(1, 2, s, 64, seed=s).to(E4M3) for s in (40, 130, 130))
    far = everything.as_strided(k.shape, (0, TENSOR_MAP_STRIDE, 64, 1)).view(E4M3)
    far.view(torch.uint8).copy_(k.view(torch.uint8))
    options = {"scaling": "head", "q_descale": 0.5, "k_descale": 0.25, "v_descale": 2.0}
    assert torch.equal(attention(q, far, v, **options), attention(q, k, v, **options))
    copy = aligned(far)
    assert copy.is_contiguous() and torch.equal(copy.view(torch.uint8), k.view(torch.uint8))


@pytest.mark.edge(19)
def test_only_strides_that_a_tensor_map_cannot_have_are_copied() -> None:
    def view(stride: int, heads: int = 2) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device="meta").as_strided((1, heads, 3, 64), (0, stride, 64, 1))

    assert aligned(within := view(TENSOR_MAP_STRIDE - 16)) is within
    assert aligned(single := view(TENSOR_MAP_STRIDE, heads=1)) is single, "a dimension of size 1 may have any stride"
    assert aligned(view(TENSOR_MAP_STRIDE)).is_contiguous()


@pytest.mark.edge(19)
@pytest.mark.parametrize("name", ["query", "key"])
def test_more_tokens_than_32_bits_count(name: str) -> None:
    """Expanded, so that it needs no memory until somebody copies it."""
    long, short = torch.zeros(1, 1, 1, 32).bfloat16().expand(1, 1, 2**31 - 1, 32), torch.zeros(1, 1, 4, 32).bfloat16()
    call = (long, short, short) if name == "query" else (short, long, long)
    with pytest.raises(UnsupportedError, match=f"{name} may have 2147483391 tokens at most, got 2147483647"):
        attention(*call)
    assert not supports(*call)[0]


def check_fence(text: str) -> None:
    """The rows of ones are what threads store into operands: then the fence for the asynchronous proxy, then a barrier,
    then everything that reads. Nothing else is stored there by threads but the parts of a cluster, which threads read.
    """
    text = re.sub("<(kMostKeys|kPlain)>[(]", "(", text)  # all forms have the same text
    kernel = text[text.index("__forceinline__ void attention(") :]
    order = ["= kOnes;", "sm90::fence_async();", "__syncthreads();", "work(params, shared, warpgroup)"]
    places = [kernel.find(piece) for piece in order]
    assert -1 not in places and places == sorted(places)
    work = re.search(r"void work\(.*?\n}\n", text, re.S)
    assert work is not None
    for reader in ("load(params, shared)", "compute(params, shared, warpgroup)"):
        assert text.count(reader) == work[0].count(reader) == 1
    assert text.count("= kOnes;") == 1
    assert re.findall(r"shared\.[qkv](?:\[[^\]]*\])+\s*=[^=]", text) == []
    casts = re.findall(r"reinterpret_cast<(\w+\*)>\(", text)
    words = {"int*"} if "ragged" in text else set()  # an entry of the plan, copied for the warps that read the item
    assert set(casts) <= {"SharedStorage*", "uint32_t*", "Part*"} | words and casts.count("uint32_t*") == 1


def check_arrivals(text: str) -> None:
    """What many lanes write or read is released by as many arrivals: no lane arrives for others, so none needs a
    barrier before it. A single lane arrives only for the copies, the descales and the items that it made itself."""
    inits = dict(re.findall(r"sm90::init\(control\.(\w+)(?:\[i\])?, ([\w:]+)\)", text))
    counts = {name: "kReaders" for name in ("q_empty", "k_empty", "v_empty")} | {"k_full": "1", "v_full": "1"}
    if "fetch_queries" in text:  # three warps of their own
        counts |= {"q_full": "sm90::kRowThreads", "next_full": "1", "next_empty": "sm90::kRowThreads"}
    else:
        counts |= {"q_full": "32"}
    alone = {"next_full", "source_full"}  # what one lane arrives at without bytes to expect
    if "ragged" in text and "next_full" in counts:  # 32 lanes write an item
        counts["next_full"] = "32"
        alone -= {"next_full"}
    assert inits == counts | ({"source_full": "1"} if "source_full" in text else {})
    assert "constexpr int kReaders = 128 * kWarpgroups;" in text
    for m in re.finditer(r"sm90::(arrive\w*|expect)\((?:control\.(\w+))?", text):
        assert one_lane(text, m.start()) == (m[1] in ("arrive_expect", "expect") or m[2] in alone), m[0]
    # What the loader's first lane wrote, the others read before they load.
    load = text[text.index("void load(") :]
    assert "__syncwarp();" in load[: load.index("uniform(item")]


def one_lane(text: str, place: int) -> bool:
    """Whether a place of a source is behind a condition that holds for one lane, in its block or its statement; or in a
    function, or a lambda, that is called from such places only."""
    lane = re.compile(r"\b(lane|thread) == 0|\blane == (j % 32|at)\b|\belect_one_sync\(\)")
    statement = text[max(text.rfind(c, 0, place) for c in ";{}") + 1 : place]
    if lane.search(statement):
        return True
    depth, i = 0, place + 1
    while (i := max(text.rfind(brace, 1, i) for brace in "{}")) > 0:
        depth += 1 if text[i] == "}" else -1
        if depth < 0:
            head = text[max(text.rfind(c, 0, i) for c in ";{}") + 1 : i]
            if lane.search(head):
                return True
            depth = 0
    for name in ("copy_query", "publish", "copy_keys", "copy_values"):
        body = re.search(rf"void {name}\(.*?\n}}\n|( +)const auto {name} = .*?\n\1}};\n", text, re.S)
        if body is not None and body.start() <= place < body.end():
            calls = [m.start() for m in re.finditer(rf"(?<!void ){name}[<(]", text)]
            return bool(calls) and all(one_lane(text, call) for call in calls)
    return False


def test_what_is_given_back_does_not_make_fp16_overflow() -> None:
    for variant in HOPPER:
        gives = variant.tile_n > MANY_KEYS and variant.out != "fp16"
        assert f"kTruncation = {f'{TRUNCATION}f' if gives else '1.f'};" in source(variant.id)


@pytest.mark.edge(45)
def test_operands_that_are_stored_are_fenced() -> None:
    for variant in HOPPER:
        check_fence(source(variant.id))


@pytest.mark.edge(46)
def test_every_thread_arrives_for_itself() -> None:
    for variant in HOPPER:
        check_arrivals(source(variant.id))


@pytest.mark.parametrize(
    ("check", "old", "new"),
    [
        (check_fence, "  sm90::fence_async();\n", ""),
        (check_fence, "  sm90::fence_async();\n  __syncthreads();\n", "  __syncthreads();\n  sm90::fence_async();\n"),
        (check_fence, "    pack_p(prob, s);\n", "    pack_p(prob, s);\n    shared.k[0][0] = 1;\n"),
        (
            check_arrivals,
            "    sm90::arrive(control.q_full[slot]);",
            "    if (lane == 0) sm90::arrive(control.q_full[slot]);",
        ),
        (check_arrivals, "      load(params, shared);", "      if (lane == 0) sm90::arrive(control.k_full[0]);"),
        (check_arrivals, "if (lane == 0) publish(", "publish("),
        (check_arrivals, "if (sm90::elect_one_sync()) copy_values", "if (lane < 2) copy_values"),
        (check_arrivals, "if (lane == j % 32) {", "if (lane == j / 32) {"),
        (check_arrivals, "if (thread == 0) copy_query", "copy_query"),
        (check_arrivals, "sm90::init(control.q_full[i], sm90::kRowThreads)", "sm90::init(control.q_full[i], 1)"),
        (check_arrivals, "    __syncwarp();\n", ""),
    ],
)
def test_what_breaks_the_order_is_seen(check: Callable[[str], None], old: str, new: str) -> None:
    text = source(HOPPER[0].id)
    check(text)
    assert old in text
    with pytest.raises(AssertionError):
        check(text.replace(old, new))


@pytest.fixture(scope="module")
def tools() -> Toolbox:
    try:
        return open_toolbox()
    except ToolboxError as error:
        pytest.skip(str(error))


@pytest.mark.edge(45)
def test_the_machine_code_has_the_fence(tools: Toolbox, tmp_path: Path) -> None:
    """Between the last store of the rows of ones and the first copy or product: the fence, then a barrier."""
    variant = next(v for v in HOPPER if v.profile == "dev" and v.kind == "fwd")
    cubin = tmp_path / "kernel.cubin"
    run_nvcc(tools.command(TARGETS["sm90a"].gencode, write_source(variant.id, tmp_path), cubin), tools.environment)
    listing = subprocess.run([str(tools.nvdisasm), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    opcodes = [m.group(1) for m in re.finditer(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", listing, re.M)]
    readers = [i for i, x in enumerate(opcodes) if x.startswith(("UTMALDG", "QGMMA"))]
    before = opcodes[: min(readers)]
    fence = max(i for i, x in enumerate(before) if x.startswith("FENCE.VIEW.ASYNC"))
    assert any(x.startswith("STS") for x in before[:fence]) and any(x.startswith("BAR.SYNC") for x in before[fence:])
    between = before[fence : next(i for i in range(fence, len(before)) if before[i].startswith("BAR.SYNC"))]
    assert not any(x.startswith("STS") for x in between)
