"""`fp8cutlass explain --pages`: the kernel of decode for sizes, for cards that are not here.

Regressions these catch: a kernel that the call would not take, a number that is another kernel's, an option that is
ignored.
"""

from __future__ import annotations

import re

import pytest
from test_command_explain import MODEL_CARDS, bare, run

from codegen.decode import ALL, HEAD_DIMS

__all__ = ["bare"]  # no card and no library, whatever machine this is


@pytest.mark.parametrize("arch", MODEL_CARDS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("tokens", "heads", "kv_heads"), [(1, 8, 8), (1, 32, 2), (5, 8, 2), (70, 8, 8)])
def test_the_kernel_is_that_of_the_fewest_rows(
    arch: str, head_dim: int, tokens: int, heads: int, kv_heads: int
) -> None:
    rows = tokens * heads // kv_heads
    own = [d for d in ALL if (d.target, d.head_dim) == (arch, head_dim)]
    wanted = min((d for d in own if d.rows >= rows), default=max(own, key=lambda d: d.rows), key=lambda d: d.rows)
    few = wanted.rows == 64 and rows <= 32  # three sequences on eight heads at most are fewer units than SMs
    if few:
        wanted = max((d for d in own if d.rows < 64), key=lambda d: d.rows)
    shape = f"3,{heads},{tokens},{head_dim}"
    said = run("--pages", "64", "--shape", shape, "--kv-heads", str(kv_heads), "--causal", "--arch", arch).output
    assert f"kernel:    {wanted.id}\n" in said and f"for:       {arch}, {MODEL_CARDS[arch][2]} SMs" in said
    numbers = re.search(
        r"shape: +(\d+) keys a tile, (\d+) stages, (\d+) warps, CTAs an SM: (\d+), ([\d,]+) bytes", said
    )
    assert numbers is not None
    assert [int(x.replace(",", "")) for x in numbers.groups()] == [
        wanted.tile, wanted.stages, wanted.threads // 32, wanted.ctas_per_sm, wanted.smem_bytes
    ]  # fmt: skip
    assert f"{rows} rows: {tokens} query token" in said and "built: no; the CUDA kernels are not built" in said
    assert ("are the fewest that hold" in said) == (wanted.rows >= rows)
    assert ("as there are few units: 3 sequences" in said) == few
    times = -(-rows // wanted.rows)
    assert f"keys are read {'once' if times == 1 else f'{times} times'}" in said
    others = re.search(r"others: +units of (.*) rows", said)
    assert others is not None and others[1] == ", ".join(str(d.rows) for d in own if d != wanted)


def test_options_reach_the_text() -> None:
    said = run("--pages", "16", "--splits", "1", "--shape", "2,8,1,64", "--arch", "sm90a", "--sms", "8").output
    kernel = next(d for d in ALL if d.id == "decode_sm90a_d64_r8")
    assert f"{8 * kernel.ctas_per_sm} CTAs take whole units (num_splits=1)" in said and "pages of 16 tokens" in said
    assert "all keys before and all after" in said
    assert "emulator of decode" in run("--pages", "16", "--shape", "2,8,1,80", "--device", "cpu").output


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--pages", "16", "--shape", "1,8,1,80", "--arch", "sm90a"), 1, "no kernel: .*head_dim 64, 96, .*got 80"),
        (("--pages", "16", "--shape", "1,8,1,100"), 2, "multiple of 16, got 100"),
        (("--pages", "16", "--shape", "1,8,1,64", "--kv-heads", "3"), 2, "multiple of --kv-heads, got 8 and 3"),
        (("--pages", "16", "--shape", "1,8,1,64", "--dtype", "e4m3"), 2, "bf16 or fp16"),
        (("--pages", "16", "--shape", "1,8,1,64", "--precision", "high"), 2, "goes with no --kernel"),
        (("--splits", "2", "--shape", "1,8,1,64"), 2, "--splits goes with --pages"),
        (("--pages", "0", "--shape", "1,8,1,64"), 2, "0 is not in the range"),
    ],
)
def test_refused(arguments: tuple[str, ...], code: int, text: str) -> None:
    assert re.search(text, " ".join(run(*arguments, code=code).output.split()))
