"""What kernels do with boolean masks, on the host, from the sources that nvcc compiles: the kernel that packs them
writes what torch operations do, and threads that compute see of a tile what its bits say.

Regressions these catch: a bit of another row or key; keys past the end that are seen; a list with a tile too many, too
few or twice; a tile that is seen in part and said to be whole; strides and alignments of memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from compilers import ROOT, host_library

from codegen.render import environment, render_single
from fp8cutlass.masks.bits import TILE, WORDS, Packed, pack

_P, _L, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
CUT, IN_PART, FLAGS, HIDDEN = 1, 2, 4, -1  # of walk/tile_mask.h


class _Params(ctypes.Structure):
    """masking::PackMaskParams"""

    _fields_ = [
        ("seen", _P), ("strides", _L * 4), ("bits", _P), ("tiles", _P), ("counts", _P),
        *((name, _I) for name in ("heads", "rows", "columns", "keys", "row_tiles", "key_tiles", "bit_tiles", "word")),
    ]  # fmt: skip


class Kernel:
    """``edits`` replace texts in the kernel's header."""

    def __init__(self, folder: Path, edits: Sequence[tuple[str, str]] = ()) -> None:
        headers = folder / "include" / "fp8cutlass"
        for name in ("mask/params.h", "mask/pack_mask.cuh", "walk/tile_mask.h", "host_device.h", "seen.cuh"):
            (headers / name).parent.mkdir(parents=True, exist_ok=True)
            text = (ROOT / "include" / "fp8cutlass" / name).read_text()
            for old, new in edits if name == "mask/pack_mask.cuh" else ():
                assert text.count(old) == 1, old
                text = text.replace(old, new)
            (headers / name).write_text(text)
        kernel = folder / "kernel.cu"
        kernel.write_text(render_single("pack_mask.cu", environment()))
        self.library = host_library("mask_host.cpp", folder, folder / "include", f'-DKERNEL_FILE="{kernel}"')
        self.library.run.restype = self.library.see.restype = ctypes.c_char_p
        self.library.params_bytes.restype = ctypes.c_size_t
        assert self.library.params_bytes() == ctypes.sizeof(_Params), "masking::PackMaskParams has changed"

    def pack(self, seen: torch.Tensor, keys: int, word: int = 16, seed: int = 0) -> Packed:
        """As csrc/masks.cpp launches it; ``word`` is the most bytes that are read at a time."""
        batch, heads, rows, columns = seen.shape
        row_tiles, key_tiles = -(-rows // TILE), -(-keys // TILE)
        bit_tiles = 1 if columns == 1 else key_tiles
        strides = [step if size > 1 else 0 for step, size in zip(seen.stride(), seen.shape, strict=True)]
        together = [seen.data_ptr(), *strides[:3], columns]
        word = next((w for w in (16, 4) if w <= word and strides[3] == 1 and not any(x % w for x in together)), 1)
        made = Packed(
            torch.full((batch, heads, row_tiles, bit_tiles, WORDS), -7, dtype=torch.int32),
            torch.full((batch, heads, row_tiles, key_tiles), -7, dtype=torch.int32),
            torch.full((batch, heads, row_tiles), -7, dtype=torch.int32),
        )
        assert made.bits is not None
        p = _Params(
            seen.data_ptr(), (_L * 4)(*strides), made.bits.data_ptr(), made.tiles.data_ptr(), made.counts.data_ptr(),
            heads, rows, columns, keys, row_tiles, key_tiles, bit_tiles, word,
        )  # fmt: skip
        failure = self.library.run(ctypes.byref(p), batch * heads * row_tiles, seed)
        assert failure is None, failure
        return made

    def see(self, bits: torch.Tensor | None, visit: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(128, 128) bool: what rows see of a tile by float32 scores, and by f16 ones."""
        wide, narrow = (torch.full((TILE, TILE), 7, dtype=torch.uint8) for _ in range(2))
        at = None if bits is None else _P(bits.data_ptr())
        failure = self.library.see(at, visit, keys, _P(wide.data_ptr()), _P(narrow.data_ptr()))
        assert failure is None, failure
        return wide.bool(), narrow.bool()


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    return Kernel(tmp_path_factory.mktemp("masks"))


def random_mask(density: float, *shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))) < density


def same(one: Packed, other: Packed) -> bool:
    return all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(one, other, strict=True))


def orders(seen: torch.Tensor) -> list[torch.Tensor]:
    """The same mask in other places of memory."""
    wide = torch.ones((*seen.shape[:3], seen.shape[3] + 20), dtype=torch.bool)
    found = [seen, seen.mT.contiguous().mT, seen.transpose(1, 2).contiguous().transpose(1, 2)]
    for begin in (1, 4):
        found.append(wide.clone()[..., begin : begin + seen.shape[3]])
        found[-1].copy_(seen)
    return found


SHAPES = [(1, 2, 129, 300), (2, 1, 100, 272), (1, 1, 128, 128), (1, 2, 1, 260), (2, 1, 140, 1), (1, 1, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("density", [0.0, 0.5, 0.998, 1.0])
def test_it_packs_as_torch_does(shape: tuple[int, ...], density: float, kernel: Kernel) -> None:
    seen, keys = random_mask(density, *shape), 400 if shape[3] == 1 else shape[3]
    for x in orders(seen):
        for word in (16, 1):
            assert same(kernel.pack(x, keys, word), pack(seen, keys)), (x.stride(), word)


def test_lists_of_more_tiles_than_lanes_and_warps(kernel: Kernel) -> None:
    seen = random_mask(0.5, 1, 1, 3, 64 * TILE + 5)
    tiles = torch.rand(65, generator=torch.Generator().manual_seed(1)) < 0.5
    seen &= tiles.repeat_interleave(TILE)[: seen.shape[3]]
    seen[..., 7 * TILE : 9 * TILE] = True
    for seed in (0, 3):
        assert same(kernel.pack(seen, seen.shape[3], seed=seed), pack(seen, seen.shape[3]))


FAULTS = {
    "keys past the end are seen": ("p.columns == 1 ? 0 : bits_from(", "p.columns == 1 ? 0 : ~bits_from("),
    "two rows change places": ("make_uint2(exchange(keys[2 * i], lane), exchange(keys[2 * i + 1], lane))",
                               "make_uint2(exchange(keys[2 * i + 1], lane), exchange(keys[2 * i], lane))"),
    "lanes of a quad change places": ("= 2 * (lane & 1) + (lane >> 1 & 1);", "= (lane & 1) + (lane & 2);"),
    "a list of another head": ("pair % p.heads * p.stride_head", "0 * p.stride_head"),
    "flags are read before they are there": ("  __syncthreads();\n", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name: str, tmp_path: Path) -> None:
    broken, seen = Kernel(tmp_path, [FAULTS[name]]), random_mask(0.9, 1, 2, 129, 700)
    seen[:, :, :, 128:256], seen[:, :, :, 256:640], seen[:, :, :, 640:] = True, False, True
    assert not all(same(broken.pack(seen, 700, seed=seed), pack(seen, 700)) for seed in range(4))


@pytest.mark.parametrize("keys", [300, 384, 257, 383])
def test_threads_see_what_the_bits_say(keys: int, kernel: Kernel) -> None:
    """Of each tile, whole or in part, cut by the end of the keys or not, by float32 and by f16 scores."""
    seen = random_mask(0.5, 1, 1, TILE, keys)
    seen[..., 128:256] = True
    packed = pack(seen, keys)
    assert packed.bits is not None
    padded = torch.zeros(TILE, 384, dtype=torch.bool)
    padded[:, :keys] = seen[0, 0]
    for place, entry in enumerate(packed.tiles[0, 0, 0].tolist()):
        tile = entry // 2
        cut = CUT if (tile + 1) * TILE > keys else 0
        visit = cut + (IN_PART + FLAGS * tile if entry % 2 else 0)
        want = padded[:, tile * TILE : (tile + 1) * TILE]
        assert place == tile and all(torch.equal(x, want) for x in kernel.see(packed.bits, visit, keys))
    whole = torch.arange(TILE) + 2 * TILE < keys
    assert all(torch.equal(x, whole.expand(TILE, TILE)) for x in kernel.see(None, CUT if keys < 384 else 0, keys))
    assert not any(bool(x.any()) for x in kernel.see(None, HIDDEN, keys))
    rows = random_mask(0.5, 1, 1, TILE, 1)  # the same for all keys: bits go past the end
    column = pack(rows, keys)
    visit = IN_PART + (CUT if keys < 384 else 0)
    want = rows[0, 0] & whole
    assert all(torch.equal(x, want) for x in kernel.see(column.bits, visit, keys))
