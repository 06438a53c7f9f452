"""FP8 attention for models and pipelines of the diffusers library.

    from fp8cutlass.integrations import diffusers
    print(diffusers.enable(pipeline))

Models of diffusers take two ways. Most ask its dispatcher, where ``register`` adds a backend. Others (SD, SDXL, SD3,
PixArt, CogVideoX, the VAEs) call torch's attention themselves. ``enable`` reaches both.
"""

from __future__ import annotations

from .backend import register
from .enable import Reached, disable, enable

__all__ = ["Reached", "disable", "enable", "register"]
