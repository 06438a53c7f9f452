"""FP8 attention for models of the transformers library.

    from fp8cutlass.integrations import transformers
    transformers.register()
    model.set_attn_implementation("fp8cutlass")

``register`` makes two names: ``fp8cutlass`` for models that build masks, and ``fp8cutlass_flash`` for the way of
FlashAttention. docs/integrations/transformers.md says which to take.
"""

from __future__ import annotations

from .register import register

__all__ = ["PackedCrossAttentionCache", "PagedCache", "register"]


def __getattr__(name: str) -> object:
    if name == "PackedCrossAttentionCache":
        from .cache import PackedCrossAttentionCache

        return PackedCrossAttentionCache
    if name == "PagedCache":
        from .paged_cache import PagedCache

        return PagedCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
