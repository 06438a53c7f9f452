"""A checked call: what is asked, without the tensors, and the tensors."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..dtypes import OUT_DTYPES, OUT_NAMES
from ..manifest import KEY_BLOCK
from .options import FAR


class Tensors(NamedTuple):
    """The tensors of a call: q (B, H, Sq, D), k and v (B, Hkv, Sk, D), any strides, or packed K and V.

    bf16 or fp16 operands have no descales, FP8 ones canonical ones (docs/design/numerics.md). ``k_mean`` is what was
    subtracted from packed keys. ``seen`` is a boolean mask; or ``tiles``, ``counts`` and ``bits`` are a packed one
    (``BlockMask``); ``bias`` is added to the scaled scores. All broadcast to (B, H, Sq, Sk), packed ones in tiles.
    ``sinks`` are (H,) float32.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_descale: torch.Tensor | None = None
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None
    out_descale: torch.Tensor | None = None
    k_mean: torch.Tensor | None = None
    seen: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    tiles: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    bits: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    @property
    def empty(self) -> bool:
        """Whether there is nothing to write, or no key to look at."""
        return not (self.q.numel() and self.k.shape[2])


class Outputs(NamedTuple):
    """What a call gives: out (B, H, Sq, D), and where asked for lse (B, H, Sq) and amax (1,), float32."""

    out: torch.Tensor
    lse: torch.Tensor | None = None
    amax: torch.Tensor | None = None


@dataclass(frozen=True)
class Call:
    """What is asked of tensors that are known to fit one another. Hashable, and without any size.

    Attributes:
        kind: "half" (bf16 or fp16 operands), "fp8" (with descales), or "packed" (bf16 or fp16 Q, packed K and V).
        left, right: row i sees the keys from ``i - left`` to ``i + right``; None is no such end.
        merge_lse: the LSE is that of the quantised P.
        bottom_right: i counts from ``keys - rows`` on, not from 0.
        scale: of softmax, of any sign.
        kernel: the id of a variant, "" for the choice of the table.
        precision: "fast" and "balanced" have f16 scores. Q in FP8 is lowered for them, or ``kernel`` asserts that
            Q and K were quantised with amax 14.
        lowered: Q and K are e4m3 with descales of the tensor or of heads, and Q is divided for a kernel with f16 scores
            (``quant/lower.py``). Of few keys the kernel is one that "accurate" has
            (``choose/lowering.py``).
        masked, biased: whether the tensors have a boolean mask, packed or not, and a bias.
        whole: whether it is a packed mask without bits: blocks that are seen whole.
        softcap: a logit x becomes ``softcap * tanh(x / softcap)``; 0 leaves it.
        key_block, amax: of packed K: keys that share a descale, and what K was quantised to.
    """

    kind: str
    out_dtype: torch.dtype
    scale: float
    scaling: str = "block"
    precision: str = "fast"
    left: int | None = None
    right: int | None = None
    bottom_right: bool = False
    return_lse: bool = False
    merge_lse: bool = False
    return_amax: bool = False
    kernel: str = ""
    smooth_k: bool = False
    hadamard: bool = False
    masked: bool = False
    whole: bool = False
    biased: bool = False
    key_block: int = KEY_BLOCK
    amax: float = 0.0
    softcap: float = 0.0
    lowered: bool = False

    @property
    def mask(self) -> str:
        """The kernels' word for it."""
        return mask_of(self.left, self.right)

    def offsets(self, rows: int, keys: int, *, both: bool = False) -> tuple[int, int]:
        """(causal, window): row i sees keys up to ``i + causal``, and with a window from ``i + window`` on.

        ``both``: the kernel reads both, whatever the mask; an end that there is not is far away.
        """
        shift = keys - rows if self.bottom_right else 0
        if both:
            left, right = (FAR if end is None else end for end in (self.left, self.right))
            return shift + right, shift - left
        last = shift if self.mask != "full" else 0
        if self.right is not None:
            last += self.right
        elif self.left is not None:
            last += FAR
        return last, 0 if self.left is None else shift - self.left

    def numbers(self) -> tuple[Any, ...]:
        """What may have no value while torch.compile traces: the fields of NUMBERS."""
        return self.left, self.right, self.key_block, self.scale, self.amax, self.softcap

    def text(self) -> str:
        """All but the ``numbers``, as one word a field: what is a constant where torch.compile traces."""
        values = {name: getattr(self, name) for name in _IN_TEXT}
        values["out_dtype"] = OUT_NAMES[self.out_dtype]
        return " ".join(f"{name}={value}" for name, value in values.items())


def mask_of(left: int | None, right: int | None) -> str:
    """The kernels' word for what rows see: full, causal or window."""
    if left is not None:
        return "window"
    return "full" if right is None else "causal"


NUMBERS = ("left", "right", "key_block", "scale", "amax", "softcap")
_IN_TEXT = tuple(f.name for f in fields(Call) if f.name not in NUMBERS)
_READ: dict[str, Any] = {"bool": lambda text: text == "True", "int": int, "float": float, "str": str}
_TYPES = {f.name: str(f.type) for f in fields(Call)}


@lru_cache(maxsize=4096)
def parse(text: str, numbers: tuple[Any, ...] = (None, None, KEY_BLOCK, 1.0, 0.0, 0.0)) -> Call:
    """Undo :meth:`Call.text` and :meth:`Call.numbers`; ValueError for a text that is none."""
    words = dict(word.partition("=")[::2] for word in text.split(" "))
    if set(words) != set(_IN_TEXT) or words["out_dtype"] not in OUT_DTYPES:
        raise ValueError(f"call must be the text of a Call, with {', '.join(_IN_TEXT)}, got {text!r}")
    values = {name: _READ[_TYPES[name]](word) for name, word in words.items() if name != "out_dtype"}
    return Call(out_dtype=OUT_DTYPES[words["out_dtype"]], **values, **dict(zip(NUMBERS, numbers, strict=True)))
