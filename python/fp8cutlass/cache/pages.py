"""The bytes of a page, and views of them. docs/serving.md has a picture.

A page of format ``native`` holds, for one KV head after the other, K, V and their descales::

    K      page_size x head_dim bytes   e4m3, token by token
    V      page_size x head_dim bytes   e4m3, token by token, not transposed
    K's    page_size x 4 bytes          float32, the descale of each token
    V's    4 bytes                      float32, the descale of the page's V, then zeros

A head's record ends at a multiple of 128 bytes, so that rows of 128 bytes are lines of a card's memory.

The others are FlashInfer's: ``nhd`` is (2, page_size, kv_heads, head_dim) and ``hnd`` (2, kv_heads, page_size,
head_dim), K before V, e4m3. Their descales are not in the page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..dtypes import widened

FORMATS = ("native", "nhd", "hnd")
LINE = 128  # bytes of a card's memory that are fetched together: records of heads begin at multiples of it
VECTOR = 16  # bytes of one vector access: rows begin at multiples of it


@dataclass(frozen=True)
class Pages:
    """Views of one layer: what ``append`` writes and attention reads, whatever the format."""

    k: torch.Tensor  # (pages, page_size, Hkv, D) uint8, the bytes of e4m3, any strides
    v: torch.Tensor
    k_descale: torch.Tensor | None  # (pages, page_size, Hkv) float32 in the pages; None where it is outside
    v_descale: torch.Tensor | None  # (pages, Hkv) float32


def page_bytes(kv_heads: int, head_dim: int, page_size: int, format: str) -> int:
    """Of one layer."""
    keys = 2 * page_size * head_dim
    return kv_heads * (-(-(keys + 4 * page_size + 4) // LINE) * LINE if format == "native" else keys)


def views(raw: torch.Tensor, kv_heads: int, head_dim: int, page_size: int, format: str) -> Pages:
    """Of one layer's pages, ``raw`` (pages, page_bytes) uint8."""
    if format == "native":
        heads = raw.unflatten(1, (kv_heads, -1))
        size = page_size * head_dim
        k, v = (heads[:, :, i * size : (i + 1) * size].unflatten(2, (page_size, head_dim)) for i in (0, 1))
        tail = heads[:, :, 2 * size :].view(torch.float32)
        k_descale = tail[:, :, :page_size].transpose(1, 2)
        return Pages(k.transpose(1, 2), v.transpose(1, 2), k_descale, tail[:, :, page_size])
    order = (page_size, kv_heads) if format == "nhd" else (kv_heads, page_size)
    k, v = raw.unflatten(1, (2, *order, head_dim)).unbind(1)
    return Pages(k, v, None, None) if format == "nhd" else Pages(k.transpose(1, 2), v.transpose(1, 2), None, None)


def dequantised(
    pages: Pages, static: tuple[torch.Tensor, torch.Tensor], page_table: torch.Tensor, lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V float32 (sequences, Hkv, entries * page_size, D); tokens past a length are 0.

    ``static`` are the descales (Hkv,) of K and V, where the pages hold none.
    """
    count, page_size = pages.k.shape[:2]
    at = page_table.long().clamp(0, count - 1)
    key = torch.arange(at.shape[1] * page_size, device=at.device)
    there = (key < lens[:, None])[:, None, :, None]
    found = []
    for x, inside, given in (
        (pages.k, pages.k_descale, static[0]),
        (pages.v, None if pages.v_descale is None else pages.v_descale[:, None], static[1]),
    ):
        descale = given if inside is None else inside[at]
        real = (widened(x[at].view(torch.float8_e4m3fn)) * descale[..., None]).flatten(1, 2).transpose(1, 2)
        found.append(torch.where(there, real, 0.0))
    return found[0], found[1]
