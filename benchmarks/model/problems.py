"""What is timed: a stack of video blocks, the prefill of a language model, and a step of its decoding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Problem:
    """Layers of a transformer and their input.

    ``layers`` are timed, ``of`` is how many the model has. ``tokens`` are those of a sequence that a forward computes,
    ``keys`` those that they attend to. ``context`` are tokens of text for cross-attention, ``grid`` frames, height and
    width of the tokens of a video.
    """

    name: str
    what: str
    layers: int
    of: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    batch: int
    tokens: int
    keys: int
    context: int = 0
    grid: tuple[int, int, int] = (1, 1, 1)
    vocabulary: int = 0

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def label(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads} on {self.kv_heads}"
        keys = f" against {self.keys} keys" if self.keys != self.tokens else ""
        context = f" and {self.context} of text" if self.context else ""
        return (
            f"{self.what}: {self.layers} of {self.of} layers, width {self.width}, {heads} heads x {self.head_dim}, "
            f"ffn {self.ffn}; {self.batch} x {self.tokens} tokens{keys}{context}"
        )


# 81 frames of 480 x 832 pixels: 21 x 60 x 104 latents, in patches of 1 x 2 x 2.
VIDEO_GRID = (21, 30, 52)
_VIDEO = Problem(
    "video", "blocks like those of Wan 14B", layers=2, of=40, width=5120, heads=40, kv_heads=40, ffn=13824, batch=1,
    tokens=math.prod(VIDEO_GRID), keys=math.prod(VIDEO_GRID), context=512, grid=VIDEO_GRID,
)  # fmt: skip
_PREFILL = Problem(
    "prefill", "a model like Llama 8B, prefill", layers=32, of=32, width=4096, heads=32, kv_heads=8, ffn=14336, batch=1,
    tokens=16384, keys=16384, vocabulary=128256,
)  # fmt: skip
_DECODE = replace(_PREFILL, name="decode", what="a model like Llama 8B, decoding", batch=32, tokens=1, keys=4096)

_SMALL: dict[str, Any] = {"layers": 2, "of": 4, "width": 128, "heads": 2, "ffn": 160}
_SMALL_LLAMA = _SMALL | {"kv_heads": 1, "vocabulary": 64}
_TINY = (  # the same layers, to try the command
    replace(_VIDEO, what="tiny blocks", kv_heads=2, tokens=48, keys=48, context=16, grid=(2, 4, 6), **_SMALL),
    replace(_PREFILL, what="a tiny model, prefill", tokens=72, keys=72, **_SMALL_LLAMA),
    replace(_DECODE, what="a tiny model, decoding", batch=3, keys=130, **_SMALL_LLAMA),
)

PROBLEMS: Mapping[str, Problem] = MappingProxyType({problem.name: problem for problem in (_VIDEO, _PREFILL, _DECODE)})
TINY: Mapping[str, Problem] = MappingProxyType({problem.name: problem for problem in _TINY})
