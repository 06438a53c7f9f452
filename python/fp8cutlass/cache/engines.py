"""Caches that an engine has allocated, as :class:`~fp8cutlass.cache.pages.Pages`: nothing is copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import UnsupportedError
from .checks import wrong_sizes
from .pages import VECTOR, Pages

DTYPES = (torch.float8_e4m3fn, torch.uint8)
SHAPES = """accepted are
(k, v), each (pages, page_size, kv_heads, head_dim) in layout nhd or (pages, kv_heads, page_size, head_dim) in hnd;
(k, v), each (slots, kv_heads, head_dim), with page_size;
one tensor (pages, 2, ...) of either layout, or (2, pages, ...) with kv_axis=0;
one tensor with K and V side by side in its last axis, (pages, page_size, kv_heads, 2 * head_dim) in layout nhd or
(pages, kv_heads, page_size, 2 * head_dim) in hnd""".replace("\n", " ")


Given = torch.Tensor | Sequence[torch.Tensor]


@dataclass(frozen=True)
class Source:
    """An engine's tensors, and how they are to be read."""

    cache: Given
    layout: str
    page_size: int | None
    kv_axis: int

    def pages(self) -> Pages:
        """Views (pages, page_size, kv_heads, head_dim)."""
        k, v = _pair(self.cache, self.page_size, self.kv_axis)
        if self.layout == "hnd" and (isinstance(self.cache, torch.Tensor) or self.cache[0].dim() == 4):
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        return Pages(k.view(torch.uint8), v.view(torch.uint8), None, None)


def source_of(cache: Given, layout: str, page_size: int | None = None, kv_axis: int = 1) -> Source:
    """UnsupportedError with what is wrong."""
    if layout not in ("nhd", "hnd"):
        raise UnsupportedError(f"layout must be nhd or hnd, got {layout!r}")
    if page_size is not None and (wrong := wrong_sizes({"page_size": page_size})):
        raise UnsupportedError(*wrong)
    k, v = _pair(cache, page_size, kv_axis)
    if k.shape != v.shape:
        raise UnsupportedError(f"the caches of K and V differ in shape: {tuple(k.shape)} and {tuple(v.shape)}")
    wrong = [
        f"the cache of {name} must be float8_e4m3fn, or its bytes as uint8, got {x.dtype}"
        for name, x in (("K", k), ("V", v))
        if x.dtype not in DTYPES
    ]
    if k.device != v.device:
        wrong.append(f"the caches of K and V are on {k.device} and {v.device}")
    if wrong:
        raise UnsupportedError(*wrong)
    source = Source(cache, layout, page_size, kv_axis)
    pages = source.pages()
    if page_size is not None and pages.k.shape[1] != page_size:
        wrong.append(f"page_size={page_size}, and the pages of the cache have {pages.k.shape[1]} tokens")
    wrong += _wrong("K", pages.k) + _wrong("V", pages.v)
    if wrong:
        raise UnsupportedError(*wrong)
    return source


def _pair(cache: Given, page_size: int | None, kv_axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V with four axes each."""
    if isinstance(cache, torch.Tensor):
        if cache.dim() == 5 and kv_axis in (0, 1) and cache.shape[kv_axis] == 2:
            k, v = cache.unbind(kv_axis)
            return k, v
        if cache.dim() == 4 and cache.shape[3] % 2 == 0:
            k, v = cache.chunk(2, 3)
            return k, v
        raise UnsupportedError(f"a cache of shape {tuple(cache.shape)}, kv_axis={kv_axis}; {SHAPES}")
    if not isinstance(cache, (tuple, list)) or len(cache) != 2 or not all(isinstance(x, torch.Tensor) for x in cache):
        raise UnsupportedError(f"a cache must be a tensor or a pair of tensors, got {type(cache).__name__}")
    k, v = cache
    if k.dim() == v.dim() == 4:
        return k, v
    if k.dim() == v.dim() == 3 and page_size is not None:
        if k.shape[0] % page_size or v.shape[0] != k.shape[0]:
            raise UnsupportedError(
                f"slots must be whole pages of page_size={page_size}, got {k.shape[0]} of K and {v.shape[0]} of V"
            )
        return k.unflatten(0, (-1, page_size)), v.unflatten(0, (-1, page_size))
    shapes = " and ".join(str(tuple(x.shape)) for x in cache)
    raise UnsupportedError(f"caches of shape {shapes}, page_size={page_size}; {SHAPES}")


def _wrong(name: str, x: torch.Tensor) -> list[str]:
    """Of a view (pages, page_size, kv_heads, head_dim)."""
    wrong = []
    if x.shape[3] % VECTOR or not x.shape[3]:
        wrong.append(f"head_dim of the cache of {name} must be a multiple of {VECTOR}, got {x.shape[3]}")
    if not x.shape[1] or not x.shape[2]:
        wrong.append(f"the cache of {name} needs tokens and heads, got {tuple(x.shape)}")
    if x.stride(3) != 1:
        wrong.append(f"the last axis of the cache of {name} must be contiguous, its stride is {x.stride(3)}")
    for axis, what in enumerate(("page", "token", "head")):
        stride = x.stride(axis)
        if x.shape[axis] > 1 and (stride % VECTOR or stride < x.shape[3]):
            wrong.append(
                f"the {what} stride of the cache of {name} must be a multiple of {VECTOR} bytes and at least head_dim, "
                f"got {stride}"
            )
    if not torch.compiler.is_compiling() and x.data_ptr() % VECTOR:
        wrong.append(f"the cache of {name} must begin at a multiple of {VECTOR} bytes")
    return wrong
