"""What `make demo` runs: a real sentence encoder with its attention exchanged, sentence by sentence and as a ragged
batch; and one long sequence with a sink, then with a window.

On a card the kernels built for it run; without one the emulator does, which computes the same thing on the CPU.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if importlib.util.find_spec("fp8cutlass") is None:  # of this checkout, where the package is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

import minilm
import torch

import fp8cutlass
from fp8cutlass import stats


def say(text: str = "") -> None:
    print(text, flush=True)


def milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """Median wall time of a call that includes everything it does, quantisation too; on the CPU of one call."""
    times = []
    for _ in range(4 if device.type == "cuda" else 2):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def sentences(device: torch.device) -> None:
    """Embeddings with FP8 attention against the model's own."""
    say(f"1. all-MiniLM-L6-v2 (12 heads of 32), {len(minilm.SENTENCES)} sentences, all six layers on FP8 attention")
    try:
        encoder = minilm.load(device)
    except minilm.ModelMissing as error:
        say(f"   skipped: {error}")
        return
    original = encoder.encode(minilm.SENTENCES, "sdpa")
    ours = encoder.encode(minilm.SENTENCES, "fp8cutlass")
    cosines = (original * ours).sum(-1)
    for sentence, cosine in zip(minilm.SENTENCES, cosines, strict=True):
        say(f"   cosine {float(cosine):.5f}  {sentence}")
    before = milliseconds(lambda: encoder.encode(minilm.SENTENCES, "sdpa"), device)
    after = milliseconds(lambda: encoder.encode(minilm.SENTENCES, "fp8cutlass"), device)
    say(f"   worst cosine {float(cosines.min()):.5f}; {before:.0f} ms with SDPA, {after:.0f} ms with FP8 attention")
    like = (ours @ ours.T).fill_diagonal_(-1.0).argmax(-1)
    same = int((like == (original @ original.T).fill_diagonal_(-1.0).argmax(-1)).sum())
    say(f"   nearest neighbour unchanged for {same} of {len(like)} sentences")
    say()
    say("2. the same sentences as one ragged batch, without padding")
    with stats.collect() as seen:
        packed = encoder.encode_packed(minilm.SENTENCES)
    if seen.result().fallback.calls:
        say(f"   skipped: {seen}")
        return
    took = milliseconds(lambda: encoder.encode_packed(minilm.SENTENCES), device)
    say(f"   worst cosine {float((original * packed).sum(-1).min()):.5f} with the model's own; {took:.0f} ms for all")
    say()


def sink(device: torch.device) -> None:
    """A long causal sequence whose first key draws most of the attention, as in language models."""
    seqlen, heads, head_dim = (32768, 8, 64) if device.type == "cuda" else (2048, 2, 64)
    say(f"3. one causal sequence of {seqlen} tokens, {heads} heads of {head_dim}, key 0 is an attention sink")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, seqlen, head_dim, generator=generator) for _ in range(3))
    direction = torch.nn.functional.normalize(torch.randn(head_dim, generator=generator), dim=0)
    q += 6 * direction
    k[:, :, 0] = 12 * direction
    v[:, :, 0] *= 0.05
    q, k, v = (x.bfloat16().to(device) for x in (q, k, v))
    for line in fp8cutlass.explain(q, k, v, is_causal=True).splitlines():
        say(f"   {line}")
    out = fp8cutlass.attention(q, k, v, is_causal=True)
    rows = torch.arange(seqlen // 512 - 1, seqlen, seqlen // 512, device=device)  # 512 of them, the last included
    logits = (q[:, :, rows].double() @ k.double().transpose(-1, -2)) * head_dim**-0.5
    hidden = torch.arange(seqlen, device=device) > rows[:, None]
    expected = logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v.double()
    got = out[:, :, rows].double()
    error = float((got - expected).norm() / expected.norm())
    cosine = float(torch.cosine_similarity(got, expected, dim=-1).min())
    say(f"   {len(rows)} rows against float64 on the bf16 inputs: relative L2 {error:.4f}, worst cosine {cosine:.4f}")
    ours = milliseconds(lambda: fp8cutlass.attention(q, k, v, is_causal=True), device)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    theirs = milliseconds(lambda: sdpa(q, k, v, is_causal=True), device)
    say(f"   {ours:.1f} ms with FP8 attention from bf16, quantisation included; {theirs:.1f} ms with bf16 SDPA")
    if device.type == "cpu":
        say("   (the emulator is a specification of the kernels, not a fast path)")
    say()
    left = seqlen // 16
    say(f"4. the same sequence with a window: a token sees itself and the {left} tokens before it")

    def windowed() -> torch.Tensor:
        return fp8cutlass.attention(q, k, v, is_causal=True, window_size=(left, 0))

    try:
        got = windowed()[:, :, rows].double()
    except fp8cutlass.UnsupportedError as error:
        say(f"   skipped: {error}")
        return
    hidden |= torch.arange(seqlen, device=device) < rows[:, None] - left
    expected = logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v.double()
    error = float((got - expected).norm() / expected.norm())
    say(f"   {len(rows)} rows against float64: relative L2 {error:.4f}; {milliseconds(windowed, device):.1f} ms")


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU, emulator"
    say(f"fp8cutlass {fp8cutlass.__version__} on {name}, torch {torch.__version__}")
    if device.type == "cuda" and torch.cuda.get_device_capability() == (9, 0):
        say("(the sm89 kernels run here with emulated matrix instructions: right results, not their speed)")
    say()
    sentences(device)
    sink(device)


if __name__ == "__main__":
    main()
