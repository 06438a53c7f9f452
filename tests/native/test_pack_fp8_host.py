"""The kernels that bring FP8 operands to attention kernels, on the host: the sources that nvcc gets, built with g++.

Regressions these catch: V that is packed in another order than ``pack_v`` has, or to whose tails other bytes go; rows
that are not padded with zeros; a sign that is turned of V or K; a descale of another head; a barrier that is missing;
keys of another sequence of a ragged batch; lowered rows of which a part is summed up.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from compilers import ROOT, host_library

from codegen.pack import Pack, Source
from codegen.render import environment, render_pack
from fp8cutlass.call.ragged import RaggedCall, fp8_by_torch
from fp8cutlass.manifest import Variant
from fp8cutlass.quant.lower import MEAN, lowered
from fp8cutlass.quant.v_layout import pack_v

HEAD_DIMS = (32, 64, 96, 128, 192, 256)
HEADERS = ("pack_fp8.cuh", "pack_fp8_ragged.cuh", "pack_ragged.cuh", "lower.cuh")  # that edits may change
POISON = 0xA5
ORDER = ("v", "k", "q")  # PackOrder


class Operand(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("stride_batch", "stride_head", "stride_row")),
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("heads", "tokens", "rows")),
        ("flip", ctypes.c_uint32),
        *((name, ctypes.c_int) for name in ("lowers", "block", "blocks", "ctas")),
    ]


class Descale(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        ("value", ctypes.c_float),
        *((name, ctypes.c_int64) for name in ("stride_batch", "stride_head", "stride_part")),
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("heads", "parts", "given", "count")),
    ]


class Params(ctypes.Structure):
    _fields_ = [
        ("operand", Operand * 3),
        ("descale", Descale * 3),
        *((name, ctypes.c_int) for name in ("batch", "head_dim", "first_cta", "pieces")),
    ]


class Batch(ctypes.Structure):
    """RaggedBatch."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("tiles", "count")),
        ("most", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("cu_q", "cu_k", "used_q", "used_k")),
        *((name, ctypes.c_int) for name in ("sequences", "key_tokens", "keys_in_blocks", "bottom_right")),
        *((f"{name}_descale_sequence", ctypes.c_int) for name in "qkv"),
        ("early", ctypes.c_int),
    ]


class Ragged(ctypes.Structure):
    """RaggedPack."""

    _fields_ = [
        ("batch", Batch),
        ("out", ctypes.c_void_p),
        ("row_bytes", ctypes.c_int64),
        ("lse", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("tokens", "heads", "first_cta")),
    ]


KIND = ({"score": "f32", "dtype": "e4m3"}, {"score": "f16", "dtype": "e4m3"})  # whether Q is lowered


def build(head_dim: int, folder: Path, edit: tuple[str, str] | None = None) -> ctypes.CDLL:
    """The kernel of a head_dim as a library; ``edit`` replaces a text in its source or its header."""
    pack = Pack(head_dim=head_dim, key_block=128, source=Source.FP8)
    folder.mkdir(parents=True, exist_ok=True)
    kernel = render_pack(pack, environment())
    headers = {name: (ROOT / "include" / "fp8cutlass" / name).read_text() for name in HEADERS}
    if edit is not None:
        assert sum(text.count(edit[0]) for text in (kernel, *headers.values())) == 1, edit
        kernel, headers = kernel.replace(*edit), {name: text.replace(*edit) for name, text in headers.items()}
    source = folder / "kernel.cu"
    source.write_text(kernel)
    (folder / "fp8cutlass").mkdir(exist_ok=True)
    for name, text in headers.items():
        (folder / "fp8cutlass" / name).write_text(text)
    flags = [
        *(["-DRAGGED"] if pack.ragged else []),
        f"-DKERNEL={pack.id}",
        f'-DKERNEL_FILE="{source}"',
        "-I",
        str(folder),
    ]
    loaded = host_library("pack_fp8_host.cpp", folder, ROOT / "include", *flags)
    loaded.run.restype = ctypes.c_char_p
    assert loaded.params_bytes() == ctypes.sizeof(Params)
    if pack.ragged:
        loaded.run_ragged.restype = ctypes.c_char_p
        assert loaded.ragged_bytes() == ctypes.sizeof(Ragged)
    return loaded


@dataclass
class Call:
    """What is copied, and to where."""

    params: Params
    outs: dict[str, torch.Tensor] = field(default_factory=dict)
    kept: list[torch.Tensor] = field(default_factory=list)

    def operand(self, name: str, x: torch.Tensor, head_dim: int, *, negate: bool = False, lowers: bool = False) -> None:
        batch, heads, tokens, _ = x.shape
        rows = -(-tokens // 128) * 128 if name == "v" else tokens
        shape = (batch, heads, head_dim, rows) if name == "v" else (batch, heads, rows, head_dim)
        out = self.outs[name] = torch.full(shape, POISON, dtype=torch.uint8)
        flip = 0x80808080 if negate else 0
        self.params.operand[ORDER.index(name)] = Operand(
            x.data_ptr(), *x.stride()[:3], out.data_ptr(), heads, tokens, rows, flip, lowers, 0
        )
        self.kept.append(x)

    def descale(self, name: str, x: torch.Tensor | float, shape: tuple[int, ...], given: int) -> None:
        """x a number, or (B, H, given) with any strides."""
        out = self.outs[f"{name}_descale"] = torch.full(shape, torch.nan)
        tensor = isinstance(x, torch.Tensor)
        at, value, strides = (x.data_ptr(), 0.0, x.stride()) if tensor else (None, x, (0, 0, 0))  # type: ignore[union-attr]
        self.params.descale[ORDER.index(name)] = Descale(
            at, value, *strides, out.data_ptr(), shape[1], shape[2], given, out.numel()
        )
        self.kept += [x] if tensor else []  # type: ignore[list-item]


def bytes_of(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def call_of(head_dim: int, width: int, tokens: int, seed: int) -> tuple[Call, dict[str, torch.Tensor]]:
    """A call and what it has to make, by the operations of torch that are the specification."""
    call, want = Call(Params(batch=2, head_dim=width)), {}
    v = bytes_of(seed, 2, tokens, 2, width).transpose(1, 2)  # in the memory order (B, S, H, D)
    k = bytes_of(seed + 1, 2, 2, tokens + 5, width)[:, :, 5:]
    q = bytes_of(seed + 2, 2, 1, tokens + 9, width).expand(2, 2, tokens + 9, width)
    for name, x in (("v", v), ("k", k), ("q", q)):
        if name == "k" and width == head_dim:
            continue  # read as it lies
        call.operand(name, x, head_dim, negate=name == "q")
        padded = F.pad(x ^ 0x80 if name == "q" else x, (0, head_dim - width), value=0x80 if name == "q" else 0)
        want[name] = pack_v(padded) if name == "v" else padded
    per_token = torch.rand(2, tokens, 2).transpose(1, 2)
    parts = -(-tokens // 128) * 128
    call.descale("k", per_token, (2, 2, parts), tokens)
    want["k_descale"] = F.pad(per_token, (0, parts - tokens), value=1.0)
    per_head = torch.rand(2)[None, :, None].expand(2, 2, 1)
    call.descale("v", per_head.expand(2, 2, width), (2, 2, head_dim), width)
    want["v_descale"] = F.pad(per_head.expand(2, 2, width), (0, head_dim - width), value=1.0)
    call.descale("q", 0.375, (2, 2, tokens + 9), tokens + 9)
    want["q_descale"] = torch.full((2, 2, tokens + 9), 0.375)
    return call, want


def numbers_of(seed: int, *shape: int) -> torch.Tensor:
    """e4m3 bytes of rows whose magnitudes differ, with a NaN, a row of zeros, and one that a power of two brings to the
    limit."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=random) * 2.0 ** torch.randint(-7, 7, (*shape[:3], 1), generator=random)
    x[:, :, shape[2] // 2 :] *= 2.0**-4
    x[0, 0, -1], x[-1, -1, 0, 3], x[0, 0, 1] = 0.0, torch.nan, 8 * MEAN
    return x.clamp(-448, 448).to(torch.float8_e4m3fn)


def lowering_call(head_dim: int, width: int, tokens: int, seed: int) -> tuple[Call, dict[str, torch.Tensor]]:
    """Q that is lowered, and what it becomes by the operations of torch that are the specification."""
    call = Call(Params(batch=2, head_dim=width))
    q, given = numbers_of(seed, 2, 2, tokens, width), torch.rand(2, 2)
    call.operand("q", q.view(torch.uint8), head_dim, negate=True, lowers=True)
    made, descale = lowered(q, given, head_dim)
    call.descale("q", given[:, :, None].expand(2, 2, tokens), (2, 2, tokens), tokens)
    call.params.descale[ORDER.index("q")].count = 0  # not spread
    return call, {"q": F.pad(made.view(torch.uint8), (0, head_dim - width)) ^ 0x80, "q_descale": descale}


def lowering_differences(library: ctypes.CDLL, head_dim: int, seed: int = 0) -> list[Any]:
    found = []
    for width, tokens in ((head_dim, 130), (head_dim - 16, 200)):
        call, want = lowering_call(head_dim, width, tokens, seed)
        failure = library.run(ctypes.byref(call.params), 0, seed)
        assert failure is None, failure
        found += [(width, tokens, name) for name in want if not torch.equal(call.outs[name], want[name])]
    return found


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_lowered_operands_are_those_of_the_specification(head_dim: int, tmp_path: Path) -> None:
    library = build(head_dim, tmp_path)
    assert lowering_differences(library, head_dim, seed=head_dim) == []


@pytest.mark.parametrize(
    "edit",
    [
        ("step < kLanes; step *= 2", "step < kLanes / 2; step *= 2"),
        ("sum += sum_of_magnitudes(x[pass][i])", "sum += sum_of_magnitudes(x[0][i])"),
        ("bytes & 0x7f7f7f7fu", "bytes"),
        ("above + kOctave - 1", "above + kOctave"),
        ("7.f / 16 * kColumns", "7.f / 32 * kColumns"),
        ("kMostOctaves = 10", "kMostOctaves = 9"),
        ("of.head, row) * power_of_two(int(octaves & ((1u << kBits) - 1)))", "of.head, row)"),
        ("given_descale(d, sequence_of(row), of.head, row)", "given_descale(d, 0, of.head, row)"),
    ],
    ids=range(8),
)
def test_it_sees_what_is_wrong_of_lowered_operands(edit: tuple[str, str], tmp_path: Path) -> None:
    library = build(64, tmp_path, edit)
    assert any(lowering_differences(library, 64, seed) for seed in range(4))


def differences(library: ctypes.CDLL, head_dim: int, seed: int = 0) -> list[Any]:
    found = []
    for width, tokens in ((head_dim, 140), (head_dim - 16, 1)):
        call, want = call_of(head_dim, width, tokens, seed)
        failure = library.run(ctypes.byref(call.params), 3, seed)
        assert failure is None, failure
        assert call.outs.keys() == want.keys()
        found += [(width, tokens, name) for name in want if not torch.equal(call.outs[name], want[name])]
    return found


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_what_it_makes_is_what_the_specification_makes(head_dim: int, tmp_path: Path) -> None:
    library = build(head_dim, tmp_path)
    assert differences(library, head_dim, seed=head_dim) == []


@pytest.mark.parametrize(
    "edit",
    [
        ("(stage, x);\n  __syncthreads();\n", "(stage, x);\n"),
        (": uint4{0, 0, 0, 0};", ": uint4{0, 0, 0, 1};"),
        ("if (part >= d.given) return 1.f;", "if (part >= d.given) return 0.f;"),
        ("head * d.stride_head + part", "0 * d.stride_head + part"),
        ("d.x == nullptr ? d.value", "d.x == nullptr ? 1.f"),
        ("c.x ^ flip, c.y ^ flip", "c.x, c.y"),
        ("batch * o.stride_batch + head * o.stride_head;", "batch * o.stride_batch;"),
    ],
    ids=range(7),
)
def test_it_sees_what_is_wrong(edit: tuple[str, str], tmp_path: Path) -> None:
    library = build(64, tmp_path, edit)
    assert any(differences(library, 64, seed) for seed in range(4))


def ragged_case(
    head_dim: int, width: int, variant: dict[str, Any], seed: int, descales: Any = ()
) -> tuple[Params, Ragged, list[Any]]:
    """A ragged call and pairs (name, made, wanted). With ``descales`` Q is lowered. Sequences use fewer tokens than
    they have, one has none, one ends in the middle of a block, and tokens lie before the first and behind the last."""
    rows, keys = [3, 0, 140, 70], [130, 40, 0, 300]
    cu_q, cu_k = (torch.tensor([2, *rows_], dtype=torch.int32).cumsum(0).to(torch.int32) for rows_ in (rows, keys))
    used_q = torch.tensor([3, 0, 137, 70], dtype=torch.int32)
    used_k = torch.tensor([129, 40, 0, 260], dtype=torch.int32)
    tokens, key_tokens, block = int(cu_q[-1]) + 4, int(cu_k[-1]) + 3, variant["key_block"]
    make = numbers_of if descales else bytes_of
    q, k, v = (
        make(seed + i, 1, count, heads, width)[0].view(torch.float8_e4m3fn)
        for i, (count, heads) in enumerate(((tokens, 4), (key_tokens, 2), (key_tokens, 2)))
    )
    one = descales or (torch.ones(1),) * 3
    call = RaggedCall(
        q, k, v, cu_q, cu_k, used_q, used_k, 140, 300, one, -0.5, -1, 0, True, torch.bfloat16, "fast", True, ""
    )  # fmt: skip
    made = fp8_by_torch(
        call, cast(Variant, SimpleNamespace(head_dim=head_dim, key_block=block, **KIND[bool(descales)]))
    )
    columns = made.v.shape[-1]
    outs = {
        "q": torch.full((4, tokens, head_dim), POISON, dtype=torch.uint8),
        "k": torch.full((2, key_tokens, head_dim), POISON, dtype=torch.uint8),
        "v": torch.full((2, head_dim, columns), POISON, dtype=torch.uint8),
    }
    out, lse = torch.full((tokens, 4, head_dim), 5.0, dtype=torch.bfloat16), torch.full((4, tokens), 5.0)
    there = torch.zeros(tokens, dtype=torch.bool)
    for begin, count in zip(cu_q.tolist(), used_q.tolist(), strict=False):
        there[begin : begin + count] = True
    params = Params(batch=1, head_dim=width)
    for name, x in (("v", v), ("k", k), ("q", q)):
        rows_ = columns if name == "v" else x.shape[0]
        flip = 0x80808080 if name == "q" else 0
        lowers = bool(descales) and name == "q"
        params.operand[ORDER.index(name)] = Operand(
            x.data_ptr(), 0, x.stride(1), x.stride(0), outs[name].data_ptr(), x.shape[1], x.shape[0], rows_, flip,
            lowers, block if name == "v" else 0,
        )  # fmt: skip
        if lowers:
            given = descales[0]
            scale = outs["q_descale"] = torch.full((1, 4, tokens), torch.nan)
            steps = (given.stride(0), 1) if given.dim() == 2 else (0, 0)
            params.descale[ORDER.index("q")] = Descale(
                given.data_ptr(), 0.0, *steps, 0, scale.data_ptr(), 4, tokens, tokens, 0
            )
    batch = Batch(
        cu_q=cu_q.data_ptr(), cu_k=cu_k.data_ptr(), used_q=used_q.data_ptr(), used_k=used_k.data_ptr(), sequences=4,
        key_tokens=key_tokens,
    )  # fmt: skip
    ragged = Ragged(batch, out.data_ptr(), out[0].nbytes, lse.data_ptr(), tokens, 4)
    wanted = {"q": made.q.transpose(0, 1), "k": made.k.transpose(0, 1), "v": made.v}
    if descales:
        wanted["q_descale"] = made.descales[0].expand(1, 4, tokens)
    pairs = [(name, outs[name], wanted[name]) for name in wanted]
    pairs += [("out", out, torch.where(there[:, None, None], 5.0, 0.0).to(out.dtype).expand_as(out))]
    pairs += [("lse", lse, torch.where(there, 5.0, -torch.inf).expand_as(lse)), ("kept", (call, cu_q), (call, cu_q))]
    return params, ragged, pairs


def ragged_differences(library: ctypes.CDLL, head_dim: int, seed: int = 0) -> list[Any]:
    found = []
    for width, block in ((head_dim, 128), (head_dim - 16, 192), (head_dim, 256)):
        params, ragged, pairs = ragged_case(head_dim, width, {"key_block": block}, seed)
        failure = library.run_ragged(ctypes.byref(params), ctypes.byref(ragged), seed)
        assert failure is None, failure
        found += [(width, block, name) for name, x, want in pairs[:-1] if not torch.equal(x, want)]
    return found


def of_sequences(sequences: int) -> Any:
    return torch.rand(sequences, 4), torch.rand(sequences, 2), torch.rand(sequences, 2)


def ragged_lowering_differences(library: ctypes.CDLL, head_dim: int, seed: int = 0) -> list[Any]:
    found = []
    for width, block, descales in (
        (head_dim, 128, of_sequences(4)),
        (head_dim - 16, 192, (torch.rand(1),) * 3),
        (head_dim, 256, of_sequences(4)),
    ):
        params, ragged, pairs = ragged_case(head_dim, width, {"key_block": block}, seed, descales)
        failure = library.run_ragged(ctypes.byref(params), ctypes.byref(ragged), seed)
        assert failure is None, failure
        # Of a token of no sequence any descale will do, and nothing reads it.
        alike = {name: (x == want) | (want != want) for name, x, want in pairs[:-1]}
        found += [(width, block, name) for name, same in alike.items() if not bool(same.all())]
    return found


@pytest.mark.parametrize("head_dim", [d for d in HEAD_DIMS if d != 32])
def test_a_lowered_ragged_batch_is_what_the_specification_makes(head_dim: int, tmp_path: Path) -> None:
    library = build(head_dim, tmp_path)
    assert ragged_lowering_differences(library, head_dim, seed=head_dim) == []


@pytest.mark.parametrize("head_dim", [d for d in HEAD_DIMS if d != 32])
def test_a_ragged_batch_is_what_the_specification_makes(head_dim: int, tmp_path: Path) -> None:
    """V of a sequence in another block, keys past its end that stay, a row of O of no sequence that is not cleared."""
    library = build(head_dim, tmp_path)
    assert ragged_differences(library, head_dim, seed=head_dim) == []


@pytest.mark.parametrize(
    "edit",
    [
        ("keys.first * o.stride_row,", "0 * o.stride_row,"),
        ("keys.begin, keys.count, block", "keys.begin, keys.count + 1, block"),
        ("keys.sequence, block.head},\n          o.block}", "keys.sequence, block.head},\n          64}"),
        ("block.head * o.stride_head + keys", "0 * o.stride_head + keys"),
        ("there ? begin : 0,", "there ? begin + 16 : 0,"),
        ("token >= rows.first + rows.count)", "token > rows.first + rows.count)"),
        ("__syncthreads();  // the rows", "// the rows"),
        ("decode::wait<0>();", "decode::wait<1>();"),
    ],
    ids=range(8),
)
def test_it_sees_what_is_wrong_of_a_ragged_batch(edit: tuple[str, str], tmp_path: Path) -> None:
    library = build(64, tmp_path, edit)
    assert any(ragged_differences(library, 64, seed) for seed in range(4))
