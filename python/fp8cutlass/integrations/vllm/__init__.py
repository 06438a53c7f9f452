"""Attention of vLLM (0.28 or newer) on its own FP8 cache.

    vllm serve MODEL --attention-backend CUSTOM --kv-cache-dtype fp8

vLLM finds ``plugin`` by the entry point of this package. docs/integrations/vllm.md says what is served.
"""

from __future__ import annotations

from .register import plugin, register

__all__ = ["plugin", "register"]
