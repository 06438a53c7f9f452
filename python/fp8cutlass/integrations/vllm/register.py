"""Makes the backend known to vLLM."""

from __future__ import annotations

import logging

from ..pages import installed

PATH = "fp8cutlass.integrations.vllm.backend.FP8CutlassBackend"


def register() -> str:
    """Register the backend as vLLM's ``CUSTOM``, and return its path. May be called again.

    Raises:
        ImportError: where vLLM is not installed, or has no backends of this form.
        RuntimeError: where ``CUSTOM`` is another package's.
    """
    if not installed("vllm"):
        raise ImportError("fp8cutlass.integrations.vllm needs vLLM, which is not installed: pip install vllm")
    try:
        from vllm.v1.attention.backend import AttentionBackend
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        raise ImportError(f"fp8cutlass needs vLLM 0.28 or newer: {error}") from error
    if hasattr(AttentionBackend, "get_kv_cache_shape"):
        raise ImportError("fp8cutlass needs vLLM 0.28 or newer: in this one a backend allocates its cache by shape")
    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != PATH:
        raise RuntimeError(f"vLLM's attention backend CUSTOM is taken by {custom.get_path()}")
    register_backend(custom, PATH)
    return PATH


def plugin() -> None:
    """What vLLM calls when it starts. A vLLM that cannot take the backend runs on without it, and a warning says so."""
    try:
        register()
    except (ImportError, RuntimeError) as error:
        logging.getLogger("fp8cutlass.vllm").warning("the attention backend is not registered: %s", error)
