"""``PagedKVCache``: keys and values of many sequences in pages of FP8, with their descales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..checking import looks_at
from ..errors import UnsupportedError
from ..native.append import Change, Slots, Table
from ..quant.prepare import prepared
from ..quant.rope import rope
from . import write
from .checks import (
    Descale,
    check_hadamard,
    check_new,
    check_places,
    check_read,
    settled_mean,
    static_descale,
    token_dtypes,
    wrong_numbers,
    wrong_rotary,
    wrong_tokens,
)
from .engines import Source, source_of
from .held import held
from .kernel import Launched, launch
from .pages import Pages, dequantised, page_bytes, views


class PagedKVCache:
    """Keys and values in pages of ``page_size`` tokens, e4m3. docs/serving.md shows how it is used.

    Args:
        num_pages: pages of each layer.
        kv_heads, head_dim: of K and V; head_dim is a multiple of 16.
        page_size: tokens of a page; a multiple of 16 in format ``native``.
        layers: caches of one shape that share page numbers.
        format: ``native`` has all descales in the page: one of K for each token and head, found when it is appended.
            ``nhd`` and ``hnd`` are the layouts of engines, with descales that are given here.
        v_scale: format ``native`` only. ``static``: V's descale is ``v_descale``. ``pow2``: a power of two for each
            page and head, which grows when a larger V is appended.
        k_descale, v_descale: ``real = fp8 * descale``: a float, or float32 (1,), (kv_heads,) or (layers, kv_heads).
            Larger values saturate. Default 1. K's is for ``nhd`` and ``hnd``.
        k_mean: float32 (kv_heads, head_dim) or (layers, kv_heads, head_dim), subtracted from every key. Attention does
            not change by it; the range that keys take does.
        hadamard: keys are rotated as with ``attention(hadamard=True)``, and attention rotates queries.
        device: of the pages, which are zeros at first.

    Attributes:
        pages: (layers, num_pages, page_bytes) uint8, or None for a cache of ``from_tensor``. A page may be copied to
            any other cache of equal arguments as these bytes.

    Raises:
        UnsupportedError: an argument outside the above.
    """

    def __init__(
        self,
        num_pages: int,
        kv_heads: int,
        head_dim: int,
        page_size: int = 64,
        *,
        layers: int = 1,
        format: str = "native",
        v_scale: str = "static",
        k_descale: Descale = None,
        v_descale: Descale = None,
        k_mean: torch.Tensor | None = None,
        hadamard: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        sizes: dict[str, object] = {
            "num_pages": num_pages, "kv_heads": kv_heads, "head_dim": head_dim, "page_size": page_size, "layers": layers
        }  # fmt: skip
        check_new(sizes, format, v_scale, k_descale, v_descale)
        size = page_bytes(kv_heads, head_dim, page_size, format)
        self._source: Source  # of a cache of from_tensor
        self.pages: torch.Tensor | None = torch.zeros(layers, num_pages, size, dtype=torch.uint8, device=device)
        shape = (layers, num_pages, page_size, kv_heads, head_dim)
        self._sizes(shape, self.pages.device, format, v_scale)
        self._settle(k_descale, v_descale, k_mean, hadamard)

    @classmethod
    def from_tensor(
        cls,
        cache: torch.Tensor | Sequence[torch.Tensor],
        *,
        layout: str = "nhd",
        page_size: int | None = None,
        kv_axis: int = 1,
        k_descale: Descale = None,
        v_descale: Descale = None,
        k_mean: torch.Tensor | None = None,
        hadamard: bool = False,
    ) -> PagedKVCache:
        """One layer's cache that an engine has allocated. Nothing is copied, and any strides of whole rows will do.

        Args:
            cache: float8_e4m3fn, or uint8 with the same bytes. One of

                * ``(k, v)``, each (pages, page_size, kv_heads, head_dim) in layout ``nhd``, or (pages, kv_heads,
                  page_size, head_dim) in ``hnd``;
                * ``(k, v)``, each (slots, kv_heads, head_dim), with ``page_size``;
                * one tensor with an axis of 2 for K and V: ``kv_axis`` 1 is (pages, 2, ...), 0 is (2, pages, ...);
                * one tensor with K and V side by side in its last axis of 2 * head_dim.
            layout: ``nhd`` or ``hnd``, the order of tokens and heads in the shape.
            page_size: tokens of a page; needed for slots alone, checked otherwise.
            k_descale, v_descale, k_mean, hadamard: as in the constructor, of one layer.

        Raises:
            UnsupportedError: a shape, dtype or stride outside the above.
        """
        self = cls.bare(source_of(cache, layout, page_size, kv_axis))
        self._settle(k_descale, v_descale, k_mean, hadamard)
        return self

    @classmethod
    def bare(cls, source: Source) -> PagedKVCache:
        """A cache of ``from_tensor`` for one call that has the descales: nothing is made on the device."""
        self = cls.__new__(cls)
        self.pages, self._source = None, source
        k = source.pages().k
        self._sizes((1, *k.shape), k.device, source.layout, "static")
        return self

    def _sizes(self, shape: tuple[int, ...], device: torch.device, format: str, v_scale: str) -> None:
        self.layers, self.num_pages, self.page_size, self.kv_heads, self.head_dim = shape
        self.format, self.v_scale, self.device, self.hadamard = format, v_scale, device, False
        self.k_mean: torch.Tensor | None = None

    def _settle(self, k_descale: Descale, v_descale: Descale, k_mean: torch.Tensor | None, hadamard: bool) -> None:
        heads = (self.layers, self.kv_heads)
        self.k_descale = static_descale("k_descale", k_descale, heads, self.device)  # (layers, kv_heads) float32
        self.v_descale = static_descale("v_descale", v_descale, heads, self.device)
        self.k_mean = settled_mean(k_mean, (*heads, self.head_dim), self.device)
        check_hadamard(hadamard, self.head_dim)
        self.hadamard = hadamard

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer."""
        return page_bytes(self.kv_heads, self.head_dim, self.page_size, self.format)

    def views(self, layer: int = 0) -> Pages:
        """K and V (num_pages, page_size, kv_heads, head_dim) uint8 of a layer, and the descales in its pages."""
        self._check_layer(layer)
        # Made anew in each call: a compiled graph then has one input for all views that it writes to.
        if self.pages is None:
            return self._source.pages()
        return views(self.pages[layer], self.kv_heads, self.head_dim, self.page_size, self.format)

    def __getstate__(self) -> dict[str, Any]:
        """Without what ``held`` keeps: views of a copy's pages would be of another memory."""
        return {name: x for name, x in vars(self).items() if name != "_held"}

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.layers:
            raise UnsupportedError(f"layer must be 0 to {self.layers - 1}, got {layer}")

    def mean(self, layer: int = 0) -> torch.Tensor | None:
        """What is subtracted from the keys of a layer, (kv_heads, head_dim), or None."""
        return None if self.k_mean is None else self.k_mean[layer]

    def append(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        layer: int = 0,
        positions: torch.Tensor | None = None,
        rotary_cos: torch.Tensor | None = None,
        rotary_sin: torch.Tensor | None = None,
        rotary_interleaved: bool = True,
    ) -> None:
        """Quantise tokens and write them to their slots. On a card that is one launch, and nobody waits for it.

        Args:
            k, v: (T, kv_heads, head_dim), bf16, fp16 or float32. K is turned by its position, the mean is subtracted,
                and it is rotated, each where asked for. Then it is quantised. Or float8_e4m3fn, which is copied, for
                formats ``nhd`` and ``hnd`` and keys that none of these change.
            slot_mapping: (T,) int32 or int64, ``page * page_size + position in the page``; -1 for a token that is not
                written. On the CPU any other number out of range and a slot that is given twice are refused. On a card
                the first is ignored, and of two tokens for a slot the last is written; ``FP8CUTLASS_CHECK=1`` refuses
                them there, too.
            positions: (T,) int32 or int64 in the sequence, with ``rotary_cos`` and ``rotary_sin`` (S, R / 2): K's first
                R columns are turned as in FlashAttention, where R is a multiple of 16.

        Raises:
            UnsupportedError: an argument outside the above.
        """
        self._check_layer(layer)
        changed = rotary_cos is not None or self.k_mean is not None or self.hadamard
        dtypes = token_dtypes(self.format, changed)
        wrong = wrong_tokens(k, v, self.kv_heads, self.head_dim, self.device, dtypes)
        wrong += wrong_numbers("slot_mapping", slot_mapping, self.device, k.shape[0] if not wrong else None)
        wrong += wrong_rotary(rotary_cos, rotary_sin, rotary_interleaved, self.head_dim, self.device)
        if (rotary_cos is None) != (positions is None):
            wrong.append("positions goes with rotary_cos and rotary_sin")
        elif positions is not None:
            wrong += wrong_numbers("positions", positions, self.device, k.shape[0] if not wrong else None)
        if wrong:
            raise UnsupportedError(*wrong)
        if looks_at(slot_mapping):
            check_places("slot_mapping", slot_mapping, self.num_pages * self.page_size, -1)
        descales = (self.k_descale[layer], self.v_descale[layer])
        turn = None if rotary_cos is None or rotary_sin is None else (rotary_cos, rotary_sin, rotary_interleaved)
        if self.launch(k, v, Slots(slot_mapping, positions), layer, descales, turn) is not None:
            return
        if positions is not None and turn is not None:
            k = rope(k, *turn[:2], positions, turn[2])
        self.write(k, v, slot_mapping, layer, descales)

    def launch(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        at: Slots | Table,
        layer: int,
        descales: tuple[torch.Tensor, torch.Tensor],
        turn: tuple[torch.Tensor, torch.Tensor, bool] | None,
    ) -> Launched | None:
        """``append`` of what is checked, by the kernel; None where torch operations have to: a turn, then ``write``."""
        given = (descales[0], None if self.v_scale == "pow2" else descales[1])
        anew = self.pages is None or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
        pages = self.views(layer) if anew else held(self, layer).pages
        return launch(pages, k, v, at, given, Change(turn, self.mean(layer), self.hadamard))

    def write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        slots: torch.Tensor,
        layer: int,
        descales: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """``append`` of what is checked and turned, by static descales (kv_heads,) or (T, kv_heads)."""
        mean = self.mean(layer)
        mean = None if mean is None else mean[None]
        k = prepared(k.transpose(0, 1)[None], mean, head_dim=self.head_dim, hadamard=self.hadamard)[0].transpose(0, 1)
        k_descale, v_descale = descales
        with torch.no_grad():
            write.append(self.views(layer), k, v, slots, (k_descale, None if self.v_scale == "pow2" else v_descale))

    def copy_pages(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy whole pages of all layers, descales and all: what a sequence does before it writes to a shared page.

        ``src`` and ``dst`` are (n,) int32 or int64 page numbers. All are read before one is written. On the CPU numbers
        out of range and a page that is written twice are refused; on a card such a pair is ignored, or the last wins.
        """
        wrong = wrong_numbers("src", src, self.device) + wrong_numbers("dst", dst, self.device)
        if not wrong and src.shape != dst.shape:
            wrong.append(f"src and dst differ in pages: {src.shape[0]} and {dst.shape[0]}")
        if wrong:
            raise UnsupportedError(*wrong)
        if looks_at(src):
            check_places("dst", dst, self.num_pages, 0)
            if len(src) and not 0 <= int(src.min()) <= int(src.max()) < self.num_pages:
                raise UnsupportedError(f"src must be pages 0 to {self.num_pages - 1}, got {src.tolist()}")
        if not len(src):
            return
        known = (src >= 0) & (src < self.num_pages)
        writes = write.plan(torch.where(known, dst, -1), self.num_pages)
        source = src.long()[writes.source].clamp(0, self.num_pages - 1)
        for x in self._rooms():
            write.put(x, (writes.place,), x[source], writes)

    def reset(self, pages: torch.Tensor | None = None) -> None:
        """Zero pages of all layers, (n,) int32 or int64, or every page. A page need not be zeroed to be used again."""
        if pages is None:
            for x in self._rooms():
                x.zero_()
            return
        if wrong := wrong_numbers("pages", pages, self.device):
            raise UnsupportedError(*wrong)
        if looks_at(pages):
            check_places("pages", pages, self.num_pages, 0)
        if len(pages):
            writes = write.plan(pages, self.num_pages)
            for x in self._rooms():
                write.put(x, (writes.place,), x.new_zeros(()), writes)

    def _rooms(self) -> list[torch.Tensor]:
        """All bytes, as tensors (num_pages, ...)."""
        if self.pages is not None:
            return list(self.pages)
        pages = self._source.pages()
        return [pages.k, pages.v]

    def dequantise(
        self, page_table: torch.Tensor, lens: torch.Tensor, layer: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as attention reads them, float32 (sequences, kv_heads, pages of the table * page_size, head_dim).

        ``page_table`` is (sequences, pages) int32, and ``lens`` (sequences,) int32 or int64. Tokens past a length are
        0. K is what was appended, turned, less its mean and rotated. UnsupportedError for a page that is not there, or
        for a length beyond the table, as far as the host looks (``FP8CUTLASS_CHECK``).
        """
        check_read(page_table, lens, self.num_pages, self.page_size, self.device)
        return dequantised(self.views(layer), (self.k_descale[layer], self.v_descale[layer]), page_table, lens)

    def __repr__(self) -> str:
        shared = f"v_scale={self.v_scale!r}, " if self.format == "native" else ""
        return (
            f"PagedKVCache({self.num_pages} pages of {self.page_size} tokens, {self.page_bytes} bytes each, "
            f"kv_heads={self.kv_heads}, head_dim={self.head_dim}, layers={self.layers}, format={self.format!r}, "
            f"{shared}hadamard={self.hadamard}, k_mean={'yes' if self.k_mean is not None else 'no'}, {self.device})"
        )
