"""What calls of one layer of a cache read, kept from call to call: views take longer to make than a call to launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from .pages import Pages


class Cache(Protocol):
    """What is read of a ``PagedKVCache``."""

    pages: torch.Tensor | None
    k_descale: torch.Tensor
    v_descale: torch.Tensor
    v_scale: str

    def views(self, layer: int = 0) -> Pages:
        """Of one layer."""


@dataclass(frozen=True, slots=True)
class Held:
    """Views of one layer, as :class:`~fp8cutlass.native.decode.Caches` has them. Descales in the pages stand alone."""

    k: torch.Tensor
    v: torch.Tensor
    k_descale: torch.Tensor | None
    v_descale: torch.Tensor | None
    k_token: torch.Tensor | None
    v_page: torch.Tensor | None
    v_written: torch.Tensor | None  # by which V is appended; None where that in the pages grows
    of: tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]  # attributes of the cache that the views are of

    @property
    def pages(self) -> Pages:
        """The views as the cache makes them."""
        return Pages(self.k, self.v, self.k_token, self.v_page)


def held(cache: Cache, layer: int) -> Held:
    """Of eager calls alone: a graph wants views of its own. UnsupportedError for a layer that is not there."""
    kept: dict[int, Held] = cache.__dict__.setdefault("_held", {})
    found = kept.get(layer)
    if found is not None:
        pages, k_descale, v_descale = found.of
        if cache.pages is pages and cache.k_descale is k_descale and cache.v_descale is v_descale:
            return found
    views = cache.views(layer)
    of = (cache.pages, cache.k_descale, cache.v_descale)
    inside = views.k_descale is not None
    k, v = (None, None) if inside else (cache.k_descale[layer], cache.v_descale[layer])
    written = None if cache.v_scale == "pow2" else cache.v_descale[layer]
    kept[layer] = made = Held(views.k, views.v, k, v, views.k_descale, views.v_descale, written, of)
    return made
