"""Edge cases that no other file covers, on the CPU; the numbers are those of tests/edge_cases.py."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference import attention64, min_row_cosine, operands_of, randn, relative_l2, z_test

import fp8cutlass
from fp8cutlass import attention, quantize, supports
from fp8cutlass.accuracy.measures import max_error, rmse
from fp8cutlass.call import launch
from fp8cutlass.manifest import generated_dir, load_manifest
from fp8cutlass.memory import aligned

E4M3 = torch.float8_e4m3fn
ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (1, 2, 3, 7, 9, 12, 31, 63, 64, 65, 127, 128, 129, 257, 1023)
both = pytest.mark.parametrize("precision", ["fast", "accurate"])


def kernel(*operands: torch.Tensor, precision: str) -> str:
    """The id of the kernel that a call runs."""
    return supports(*operands, precision=precision)[1].split()[0]


@pytest.mark.edge(1)
@pytest.mark.parametrize("poison", [0x7F, 0xFF])
def test_nan_bytes_behind_keys_and_values(poison: int) -> None:
    clean = [randn(2, 2, s, 64, seed=s).to(E4M3) for s in (130, 77, 77)]
    descales = {"q_descale": 1.0, "k_descale": 1.0, "v_descale": 1.0}
    dirty = []
    for x in clean:
        room = torch.full((2, 2, x.shape[2] + 64, 64), poison, dtype=torch.uint8)
        room[:, :, : x.shape[2]] = x.view(torch.uint8)
        dirty.append(room.view(E4M3)[:, :, : x.shape[2]])
    assert bool(room.view(E4M3)[:, :, 77:].float().isnan().all())
    for scaling in ("head", "block", "token"):
        got = attention(*dirty, scaling=scaling, **descales)
        assert torch.equal(got, attention(*clean, scaling=scaling, **descales))


@pytest.mark.edge(3)
@pytest.mark.parametrize("seqlen_q", LENGTHS)
def test_lengths(seqlen_q: int) -> None:
    """Each length against each, held to float64 on the operands of the kernel: a tail that is off by one key shows."""
    for seqlen_k in LENGTHS:
        q, k, v = (
            randn(1, 1, seqlen_q, 32, seed=1),
            randn(1, 1, seqlen_k, 32, seed=2),
            randn(1, 1, seqlen_k, 32, seed=3),
        )
        variant = load_manifest(generated_dir()).find(kernel(q, k, v, precision="accurate"))
        x = operands_of(variant, q, k, v, "block")
        want = attention64(*x.real, 32**-0.5)
        got, lse = attention(q, k, v, precision="accurate", return_lse=True)
        z = z_test(got, want, "exp2")
        assert z.rms <= 1.5 and z.max <= 7, (seqlen_k, z)  # one row of 32 columns scatters
        assert float((lse - want.lse).abs().max()) <= 1e-4 + 2.0**-12 * want.max_score, seqlen_k


@pytest.mark.edge(5)
@pytest.mark.parametrize("shape", [(0, 2, 5, 64), (2, 0, 5, 64), (2, 2, 0, 64)])
def test_nothing_to_do_launches_nothing(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise LookupError("a kernel was run")

    monkeypatch.setattr(launch, "_run_half", refuse)
    x = torch.empty(shape, dtype=torch.bfloat16)
    assert attention(x, x, x).shape == shape
    with pytest.raises(LookupError):
        attention(*[randn(1, 1, 4, 64, seed=1)] * 3)


@pytest.mark.edge(9)
@pytest.mark.parametrize("side", ["out", "reference"])
def test_a_nan_on_one_side_fails_every_comparison(side: str) -> None:
    """What the tests compare with: no figure of a tensor with a NaN satisfies a limit."""
    q, k, v = (randn(1, 1, 40, 64, seed=seed) for seed in range(3))
    want = attention64(q, k, v, 0.125)
    out = want.out.bfloat16()
    (out if side == "out" else want.out)[0, 0, 7, 5] = math.nan
    distances: tuple[Callable[[torch.Tensor, torch.Tensor], float], ...] = (relative_l2, rmse, max_error)
    assert not any(distance(out, want.out) <= 1e9 for distance in distances)
    assert not min_row_cosine(out, want.out) >= -1e9
    assert len(z_test(out, want, "exp2").refusals()) == 5
    assert not torch.allclose(out.double(), want.out, rtol=1e9)


@pytest.mark.edge(11)
@both
@pytest.mark.parametrize("scale", [1e30, -1e30, 2.3e38, -2.3e38])
def test_scales_that_overflow_float32(scale: float, precision: str) -> None:
    """Scores up to 64 times that scale: float64 says one key, and so does float32 without overflowing.

    A limit: slopes end at 2^80, and of keys with unequal descales the sizes are then lost; finite they stay.
    """
    q = torch.ones(1, 1, 5, 64).bfloat16()
    k = torch.linspace(-1, 1, 300)[None, None, :, None].expand(1, 1, 300, 64).contiguous().bfloat16()
    k[:, :, 1:-1] *= 0.8
    v = randn(1, 1, 300, 64, seed=1)
    got = attention(q, k, v, scale=scale, precision=precision, scaling="tensor")
    assert relative_l2(got, v[:, :, -1 if scale > 0 else 0, None].expand_as(got)) <= 0.04
    for scaling in ("block", "token"):
        assert bool(attention(q, k, v, scale=scale, precision=precision, scaling=scaling).isfinite().all())


@pytest.mark.edge(14)
@both
@pytest.mark.parametrize("seqlen_k", [77, 4096, 131072])
def test_uniform_attention_over_a_constant(seqlen_k: int, precision: str) -> None:
    q, k = torch.zeros(1, 1, 3, 32).bfloat16(), randn(1, 1, seqlen_k, 32, seed=1)
    for constant in (1.0, -0.37, 300.0):
        v = torch.full_like(k, constant)
        got = attention(q, k, v, precision=precision).double()
        assert float((got / float(v[0, 0, 0, 0]) - 1).abs().max()) <= 2.0**-8


@both
def test_values_at_the_end_of_fp16(precision: str) -> None:
    q, k = (randn(1, 2, 300, 64, seed=seed).half() for seed in range(2))
    v = torch.full_like(k, 65504.0)
    assert torch.equal(attention(q, k, v, precision=precision), v)


@pytest.mark.edge(16)
@both
@pytest.mark.parametrize("seqlen_k", [32768, 131072, 163841])
def test_long_keys(seqlen_k: int, precision: str) -> None:
    """The z-test with its gate on the mean (a sum that loses bits drifts to zero), and a needle at tile boundaries."""
    q, k, v = randn(1, 2, 64, 32, seed=1), randn(1, 2, seqlen_k, 32, seed=2), randn(1, 2, seqlen_k, 32, seed=3)
    variant = load_manifest(generated_dir()).find(kernel(q, k, v, precision=precision))
    want = attention64(*operands_of(variant, q, k, v, "block").real, 32**-0.5)
    assert z_test(attention(q, k, v, precision=precision), want, variant.softmax).refusals(floor=0.2) == []
    places = torch.tensor([0, 127, 128, 129, 8191, 8192, seqlen_k - 130, seqlen_k - 1])
    k, v = 0.1 * k[:, :1], 0.1 * v[:, :1]
    needles = torch.eye(len(places), 32)
    k[0, 0, places], v[0, 0, places] = (64 * needles).bfloat16(), torch.arange(1.0, 9.0)[:, None].bfloat16()
    got = attention((64 * needles)[None, None].bfloat16(), k, v, precision=precision)[0, 0].float()
    assert float((got / torch.arange(1.0, 9.0)[:, None] - 1).abs().max()) <= 0.07  # half a step of e4m3: 2^-4


@pytest.mark.edge(30)
@pytest.mark.parametrize("base", [1, 2, 4, 8])
def test_unaligned_bases_are_copied(base: int) -> None:
    room = torch.zeros(2 * 130 * 64 + 64, dtype=torch.uint8)
    start = -room.data_ptr() % 16
    x = randn(1, 2, 130, 64, seed=1).to(E4M3)
    view = room[start + base : start + base + x.numel()].view(E4M3).view_as(x)
    view.view(torch.uint8).copy_(x.view(torch.uint8))
    assert view.data_ptr() % 16 == base and aligned(view) is not view and aligned(view).data_ptr() % 16 == 0
    options = {"scaling": "tensor", "q_descale": 0.9, "k_descale": 1.1, "v_descale": 1.0}
    assert torch.equal(attention(view, view, view, **options), attention(x, x, x, **options))


@pytest.mark.edge(35)
@pytest.mark.parametrize("scaling", ["block", "token"])
def test_new_memory_is_written_in_full(scaling: str) -> None:
    """In deterministic mode torch fills what it allocates with NaN: none of it may come back."""
    operands = [randn(2, 3, s, 40, seed=s) for s in (130, 77, 77)]  # head_dim is padded, too
    kwargs = {"scaling": scaling, "return_lse": True, "return_amax": True}
    want = attention(*operands, **kwargs)
    torch.use_deterministic_algorithms(True)
    try:
        assert bool(torch.empty(3).isnan().all())
        got = attention(*operands, **kwargs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.edge(39)
def test_the_first_calls_of_a_process_at_once() -> None:
    """Tables are read and caches filled by whoever comes first: eight threads, one barrier, one answer."""
    code = (
        "import threading, torch, fp8cutlass\n"
        "x = torch.randn(1, 2, 70, 64, generator=torch.Generator().manual_seed(1)).bfloat16()\n"
        "gate, results, errors = threading.Barrier(8), [], []\n"
        "def call():\n"
        "    gate.wait()\n"
        "    try:\n        results.append(fp8cutlass.attention(x, x, x, scaling='token'))\n"
        "    except BaseException as error:\n        errors.append(error)\n"
        "threads = [threading.Thread(target=call) for _ in range(8)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "print(len(results), all(torch.equal(r, results[0]) for r in results), errors)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(fp8cutlass.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout == "8 True []\n", done.stderr


@pytest.mark.edge(49)
@both
def test_a_pinned_kernel_gives_a_row_the_same_bits_anywhere(precision: str) -> None:
    """In another batch, and among other queries of its sequence, where descales do not mix rows. Small integers, whose
    sums are exact, as the order of a sum is the CPU library's."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randint(-2, 3, (5, 4, s, 64), generator=generator).bfloat16() for s in (70, 300, 300))
    pinned = {"kernel": kernel(q, k, v, precision=precision), "precision": precision}
    all_of_it = attention(q, k, v, **pinned)
    alone = attention(q[2:3], k[2:3], v[2:3], **pinned)
    assert torch.equal(all_of_it[2:3], alone)
    assert torch.equal(alone[:, :, 33:34], attention(q[2:3, :, 33:34], k[2:3], v[2:3], **pinned))


@pytest.mark.edge(50)
@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
@pytest.mark.parametrize("value", [0.0, -1.0, 1e-40, 1e30, math.inf, math.nan])
def test_descales_in_tensors_are_not_checked_but_harm_their_head_alone(name: str, value: float) -> None:
    """What multiplies scores counts as the smallest normal number where it is less, and as 2^80 where it is more, so
    that the result is the mean of V, or one row of it; what multiplies V multiplies. A NaN stays one, and an infinity,
    the overflow of a scale, becomes one instead of a plausible result."""
    q, k, v = (randn(1, 2, s, 64, seed=s).to(E4M3) for s in (9, 200, 201))
    v = v[:, :, :200]
    good = {n: torch.full((1, 2), 0.5) for n in ("q_descale", "k_descale", "v_descale")}
    want = attention(q, k, v, scaling="head", **good)
    got = attention(q, k, v, scaling="head", **good | {name: torch.tensor([[value, 0.5]])})
    assert torch.equal(got[:, 1], want[:, 1])
    bad = got[0, 0].double()
    if math.isnan(value) or (math.isinf(value) and name != "v_descale"):
        assert bool(bad.isnan().all())
    elif name == "v_descale":
        expected = want[0, 0].double() * (value / 0.5) if abs(value) > 1e-38 else torch.zeros_like(bad)
        assert torch.equal(bad, expected) if value in (0.0, math.inf) else relative_l2(bad + 1, expected + 1) <= 2.0**-7
    elif value <= 1e-40:
        assert relative_l2(bad, 0.5 * v[0, 0].double().mean(0).expand_as(bad)) <= 0.04
    else:
        top = (q[0, 0].double() @ k[0, 0].double().T).argmax(-1)
        assert relative_l2(bad, 0.5 * v[0, 0].double()[top]) <= 2.0**-7


@pytest.mark.edge(51)
def test_one_block_of_zeros() -> None:
    """Its descale is 1, and it neither disturbs nor is disturbed."""
    x = randn(1, 2, 400, 64, seed=1)
    x[:, :, 128:256] = 0
    x8, descale = quantize(x, granularity="block")
    assert bool((descale[:, :, 1] == 1).all()) and not x8[:, :, 128:256].float().any()
    got = attention(x, x, x)
    assert bool(got.isfinite().all()) and relative_l2(got, attention64(x, x, x, 0.125).out) <= 0.07


@pytest.mark.edge(59)
@pytest.mark.parametrize(("target", "loop"), [("sm89", "l.qmma"), ("sm90a", "l.qgmma")])
def test_reported_kernels_run_fp8_instructions(target: str, loop: str) -> None:
    """In the committed report on the machine code of every kernel; that it is current is a test of test_gates.py."""
    lines = (ROOT / "generated" / "gates" / f"{target}_release.txt").read_text().splitlines()
    titles = next(line.split() for line in lines if re.match(r"kernel\s", line))
    rows = {line.split()[0]: dict(zip(titles, line.split(), strict=True)) for line in lines if line.startswith(target)}
    native = [v for v in load_manifest(generated_dir()).variants if v.family == target]
    forms = {f"{v.id}.keys{most}" for v in native for _, most in v.unrolled}
    plain = {f"{v.id}.plain" for v in native if 0 in v.plain}
    assert {v.id for v in native} | forms | plain == set(rows)
    integer = {v.id for v in native if v.dtype == "s8u8"}  # whose products are counted by the gate QMMA-COUNT alone
    assert all((int(row[loop]) > 0) != (name in integer) for name, row in rows.items())
    assert all(int(row.get("hmma", 0)) == 0 for row in rows.values())
