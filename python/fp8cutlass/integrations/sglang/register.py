"""Makes the backend known to SGLang."""

from __future__ import annotations

import logging
from typing import Any

from ..pages import installed

NAME = "fp8cutlass"


def register(name: str = NAME) -> str:
    """Register the backend under a name of ``--attention-backend``, and return the name. May be called again.

    Raises:
        ImportError: where SGLang is not installed, or has no backends of this form.
    """
    if not installed("sglang"):
        raise ImportError("fp8cutlass.integrations.sglang needs SGLang, which is not installed: pip install sglang")
    try:
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
        from sglang.srt.server_args import add_attention_backend_choices
    except ImportError as error:
        raise ImportError(f"fp8cutlass needs SGLang 0.5.23 or one like it: {error}") from error
    if name not in ATTENTION_BACKENDS:
        add_attention_backend_choices([name])
    register_attention_backend(name)(create)
    return name


def create(runner: Any) -> Any:
    """The backend of a model runner."""
    from .backend import FP8CutlassBackend

    return FP8CutlassBackend(runner)


def plugin() -> None:
    """What SGLang calls when it starts. One that cannot take the backend runs on without it, and a warning says so."""
    try:
        register()
    except ImportError as error:
        logging.getLogger("fp8cutlass.sglang").warning("the attention backend is not registered: %s", error)
