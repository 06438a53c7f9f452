"""Makes the attention functions known to transformers under names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

NAME = "fp8cutlass"


def register(name: str = NAME) -> tuple[str, str]:
    """Register attention and mask functions, and return their two names: ``name`` and ``name + "_flash"``.

    With the first one models build the masks of ``sdpa``. With the second one they take the way of FlashAttention:
    no masks but (batch, keys), and sequences of unequal lengths in one call. May be called again.

    Raises:
        ValueError: for a name that transformers gives another meaning: with "flash", "sdpa", "flex", "/", ":" or "|".
        ImportError: where transformers is not installed, or does not build masks as 5.20 does.
    """
    if wrong := [part for part in ("flash", "sdpa", "flex", "/", ":", "|") if part in name] or not name:
        raise ValueError(f"transformers gives another meaning to names with {wrong or 'nothing'}, got {name!r}")
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    if "q_offset" not in inspect.signature(masking_utils.sdpa_mask).parameters:
        raise ImportError("fp8cutlass needs transformers 5.20 or newer")
    from . import masks, route

    AttentionInterface.register(name, route.full)
    AttentionMaskInterface.register(name, masks.full_mask)
    flash_name = f"{name}_flash"
    AttentionInterface.register(flash_name, route.flash)
    AttentionMaskInterface.register(flash_name, masks.flash_mask)
    _import_as_flash(flash_name)
    return name, flash_name


def _import_as_flash(name: str) -> None:
    """transformers imports the package behind a name with "flash" in it. Behind this one there is none to import.

    There is no public way to say so.
    """
    from transformers import modeling_flash_attention_utils as utils

    known = getattr(utils._lazy_imports, "fp8cutlass_names", None)
    if known is not None:
        known.add(name)
        return
    original: Callable[..., Any] = utils._lazy_imports
    names = {name}

    def lazy_imports(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if implementation in names:
            return _not_called, _not_called, None, utils._pad_input, utils._unpad_input
        return original(implementation, *args, **kwargs)

    lazy_imports.fp8cutlass_names = names  # type: ignore[attr-defined]
    utils._lazy_imports = lazy_imports


def _not_called(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, causal: bool = False, **rest: Any
) -> Any:
    """In the place of a function of FlashAttention, which the registered function does not call."""
    raise NotImplementedError("fp8cutlass does not come through flash_attention_forward: call register() first")
