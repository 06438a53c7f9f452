"""The kernels that bring FP8 operands to attention kernels, on the host: the sources that nvcc gets, built with g++.

Regressions these catch: V that is packed in another order than ``pack_v`` has, or to whose tails other bytes go; rows
that are not padded with zeros; a sign that is turned of V or K; a descale of another head; a barrier that is missing.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compilers import ROOT, host_library

from codegen.pack import Pack, Source
from codegen.render import environment, render_pack
from fp8cutlass.quant.v_layout import pack_v

HEAD_DIMS = (32, 64, 96, 128, 192, 256)
POISON = 0xA5
ORDER = ("v", "k", "q")  # PackOrder


class Operand(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("stride_batch", "stride_head", "stride_row")),
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("heads", "tokens", "rows")),
        ("flip", ctypes.c_uint32),
        *((name, ctypes.c_int) for name in ("blocks", "ctas")),
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
        *((name, ctypes.c_int) for name in ("batch", "head_dim", "first_cta")),
    ]


def build(head_dim: int, folder: Path, edit: tuple[str, str] | None = None) -> ctypes.CDLL:
    """The kernel of a head_dim as a library; ``edit`` replaces a text in its source or its header."""
    pack = Pack(head_dim=head_dim, key_block=128, source=Source.FP8)
    folder.mkdir(parents=True, exist_ok=True)
    kernel = render_pack(pack, environment())
    header = (ROOT / "include" / "fp8cutlass" / "pack_fp8.cuh").read_text()
    if edit is not None:
        assert kernel.count(edit[0]) + header.count(edit[0]) == 1, edit
        kernel, header = kernel.replace(*edit), header.replace(*edit)
    source = folder / "kernel.cu"
    source.write_text(kernel)
    (folder / "fp8cutlass").mkdir(exist_ok=True)
    (folder / "fp8cutlass" / "pack_fp8.cuh").write_text(header)
    flags = ["-O2", f"-DKERNEL={pack.id}", f'-DKERNEL_FILE="{source}"', "-I", str(folder)]
    loaded = host_library("pack_fp8_host.cpp", folder, ROOT / "include", *flags)
    loaded.run.restype = ctypes.c_char_p
    assert loaded.params_bytes() == ctypes.sizeof(Params)
    return loaded


@dataclass
class Call:
    """What is copied, and to where."""

    params: Params
    outs: dict[str, torch.Tensor] = field(default_factory=dict)
    kept: list[torch.Tensor] = field(default_factory=list)

    def operand(self, name: str, x: torch.Tensor, head_dim: int, *, negate: bool = False) -> None:
        batch, heads, tokens, _ = x.shape
        rows = -(-tokens // 128) * 128 if name == "v" else tokens
        shape = (batch, heads, head_dim, rows) if name == "v" else (batch, heads, rows, head_dim)
        out = self.outs[name] = torch.full(shape, POISON, dtype=torch.uint8)
        flip = 0x80808080 if negate else 0
        self.params.operand[ORDER.index(name)] = Operand(
            x.data_ptr(), *x.stride()[:3], out.data_ptr(), heads, tokens, rows, flip
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
        ("  __syncthreads();\n", ""),
        (": uint4{0, 0, 0, 0};", ": uint4{0, 0, 0, 1};"),
        ("int(part) >= d.given ? 1.f", "int(part) >= d.given ? 0.f"),
        ("int64_t(head % unsigned(d.heads)) * d.stride_head", "int64_t(0) * d.stride_head"),
        ("d.x == nullptr ? d.value", "d.x == nullptr ? 1.f"),
        ("o.tokens, o.flip)", "o.tokens, 0)"),
        ("head * o.stride_head,", "0 * o.stride_head,"),
    ],
    ids=range(7),
)
def test_it_sees_what_is_wrong(edit: tuple[str, str], tmp_path: Path) -> None:
    library = build(64, tmp_path, edit)
    assert any(differences(library, 64, seed) for seed in range(4))
