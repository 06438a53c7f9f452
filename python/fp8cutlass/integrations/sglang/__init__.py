"""Attention of SGLang (0.5.23) on its own pools of FP8 tokens.

    python -m sglang.launch_server --model MODEL --attention-backend fp8cutlass --kv-cache-dtype fp8_e4m3

SGLang finds ``plugin`` by the entry point of this package. docs/integrations/sglang.md says what is served.
"""

from __future__ import annotations

from .register import NAME, plugin, register

__all__ = ["NAME", "plugin", "register"]
