"""How long windows and ragged batches take: `python -m benchmarks.walk`, medians of a CUDA graph, in turns."""

from __future__ import annotations

import importlib
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fp8cutlass import attention_varlen, extension, ragged
from fp8cutlass.fused import quantise_and_pack
from fp8cutlass.launch import score_amax
from fp8cutlass.manifest import Variant, load_manifest

WIDTH = 2048  # heads times head_dim of a ragged batch
TOKENS, HEADS, KV_HEADS = 16_384, 32, 8  # of the windows
WINDOWS = (256, 1024, 4096)
FAR = ragged.FAR
Step = Callable[[], object]


def mixes() -> dict[str, list[int]]:
    """Lengths of sequences, some 32,768 tokens in all."""
    generator = torch.Generator().manual_seed(0)
    lognormal = torch.empty(400).log_normal_(math.log(500), 0.9, generator=generator).clamp(16, 8192).int().tolist()
    lognormal = lognormal[: sum(total <= 32_768 for total in itertools.accumulate(lognormal))]
    evenly = torch.randint(77, 1025, (64,), generator=generator).tolist()
    images = [256, 1024, 4096, 576] * 5 + [2304, 1369]
    return {
        "lognormal": lognormal,
        "77 to 1,024": evenly,
        "images": images,
        "8 x 4,096": [4096] * 8,
        "512 x 64": [64] * 512,
    }


def in_turns(steps: Mapping[str, Step], replays: int = 20, rounds: int = 7) -> dict[str, float]:
    """Microseconds of each, the median over rounds of the mean of some replays of a graph."""
    graphs = {}
    for name, step in steps.items():
        step()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            step()
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, graph in graphs.items():
            graph.replay()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            end.synchronize()
            found[name].append(begin.elapsed_time(end) * 1000 / replays)
    return {name: statistics.median(times) for name, times in found.items()}


def visited(v: Variant, left: int, rows: int) -> float:
    """Tiles of keys that an item of so many rows visits, on average; ``left`` < 0: causal without a window."""
    count = 0
    for row in range(0, TOKENS, rows):
        begin = max(0, row - left) // v.tile_n if left >= 0 else 0
        count += -(-min(row + rows, TOKENS) // v.tile_n) - begin
    return count * rows / TOKENS


def windows(head_dim: int) -> list[str]:
    """A line for each window: the dense kernel alone, with FP8 operands, beside the causal one without a window."""
    manifest = load_manifest(extension.built_dir())
    wanted = {"head_dim": head_dim, "out": "bf16", "softmax": "linear", "walk": "dense", "dtype": "e4m3"}
    found = [v for v in manifest.variants if all(getattr(v, name) == value for name, value in wanted.items())]
    window = next((v for v in found if v.mask == "window"), None)
    tile = (lambda v: (v.tile_m, v.tile_n)) if window else None
    causal = next((v for v in found if window and v.mask == "causal" and tile(v) == tile(window)), None)  # type: ignore
    if window is None or causal is None:
        return [f"windows, head_dim {head_dim}: not built"]
    shape = (1, HEADS, TOKENS, head_dim)
    q = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    k, values = (torch.randn((1, KV_HEADS, *shape[2:]), device="cuda", dtype=torch.bfloat16) for _ in range(2))
    granularity = {"q": "token", "k": "block", "v": "block"}
    made = quantise_and_pack(
        q, k, values, head_dim=head_dim, key_block=window.key_block, amax=score_amax(window), granularity=granularity,
        negate_q=False,
    )  # fmt: skip
    out = torch.empty_like(q)

    def step(v: Variant, first: int) -> Step:
        number = manifest.index[v.id]
        return lambda: torch.ops.fp8cutlass_C.forward(
            number, made.q, made.k, made.v, made.q_descale, made.k_descale, made.v_descale, None, out, None, None,
            head_dim**-0.5, 0, first,
        )  # fmt: skip

    steps = {"causal": step(causal, 0)} | {str(n): step(window, -n) for n in WINDOWS}
    times = in_turns(steps, replays=10)
    lines = [
        f"windows, head_dim {head_dim}, {HEADS} heads on {KV_HEADS}, {TOKENS} tokens: causal {times['causal']:.1f} us"
    ]
    for n in WINDOWS:
        share = visited(window, n, window.tile_m) / visited(causal, -1, causal.tile_m)
        time = times[str(n)]
        lines.append(
            f"  {n}: {time:.1f} us, {time / times['causal'] / share:.3f} of its share ({share:.4f} of the tiles)"
        )
    return lines


def peers() -> Any:
    try:
        return importlib.import_module("fa3_fwd_interface").flash_attn_varlen_func
    except (ImportError, OSError):
        return None


def batch(head_dim: int, causal: bool, name: str, mix: Sequence[int], flash: Any) -> str:
    """A line for a mix: whole calls from bf16, as they are chosen and with Q quantised by either kernel, beside
    FlashAttention-3 in bf16."""
    tokens, most, heads = sum(mix), max(mix), WIDTH // head_dim
    q, k, v = (torch.randn(tokens, heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    cu = torch.tensor([0, *itertools.accumulate(mix)], dtype=torch.int32, device="cuda")
    call = ragged.RaggedCall(
        q, k, v, cu, cu, None, None, most, most, (), head_dim**-0.5, -1, 0 if causal else -1, True, q.dtype, "fast",
        False, "",
    )  # fmt: skip
    variant, number = ragged.choose(ragged.target(q.device), call)
    steps: dict[str, Step] = {"call": lambda: attention_varlen(q, k, v, cu, cu, most, most, causal=causal)}
    if hasattr(ragged, "leaves_q"):  # older ones cannot
        steps["leaves Q"] = lambda: ragged.launch(call, variant, number, None, True)
        steps["packs Q"] = lambda: ragged.launch(call, variant, number, None, False)
    if flash is not None:
        steps["fa3 bf16"] = lambda: flash(q, k, v, cu, cu, most, most, causal=causal)
    times = in_turns(steps)
    text = ", ".join(f"{who} {time:.1f}" for who, time in times.items())
    ratio = f"; {times['fa3 bf16'] / times['call']:.2f} times as fast" if flash is not None else ""
    return f"  {name} ({len(mix)} sequences, {tokens} tokens): {text}{ratio}"


def main() -> None:
    extension.load()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name())
    for head_dim in (128, 64):
        print("\n".join(windows(head_dim)), flush=True)
    for head_dim in (128, 64):
        for causal in (False, True):
            print(f"ragged, head_dim {head_dim}, {'causal' if causal else 'full'}, whole calls, us")
            for name, mix in mixes().items():
                print(batch(head_dim, causal, name, mix, peers()), flush=True)


if __name__ == "__main__":
    main()
