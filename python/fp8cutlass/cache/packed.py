"""Keys and values that are quantised and packed once and attended many times."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..choose.reuse import KVForm

HELD = ("scaling", "precision", "smooth_k", "hadamard")  # arguments of attention that packing has settled


@dataclass(frozen=True, repr=False, eq=False)
class PackedKV:
    """What ``pack_kv`` returns and ``attention`` takes as ``key``. The bytes are those that a call on key and value
    itself would make; docs/numerics.md describes them. Not to be made or changed by hand."""

    k: torch.Tensor  # (B, Hkv, Sk, head_dim of the kernel) uint8
    v: torch.Tensor  # (B, Hkv, head_dim of the kernel, ceil(Sk / 128) * 128) uint8
    k_descale: torch.Tensor  # float32, of the scaling mode; of tokens padded to whole tiles, of channels to head_dim
    v_descale: torch.Tensor
    k_mean: torch.Tensor | None  # (B, Hkv, head_dim of the kernel) float32 with smooth_k
    like: torch.Tensor  # one element that nobody reads, expanded to (B, Hkv, Sk, D): what key and value were
    kernel: str  # the variant that they were packed for; others read them too
    key_block: int  # keys that share a descale of scaling "block"
    amax: float  # what K was quantised to
    scaling: str
    precision: str
    smooth_k: bool
    hadamard: bool

    @property
    def shape(self) -> torch.Size:
        """(B, Hkv, Sk, D) of key and value."""
        return self.like.shape

    @property
    def dtype(self) -> torch.dtype:
        """That of key and value, which a query has to have: bf16 or fp16."""
        return self.like.dtype

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.k.device

    @property
    def form(self) -> KVForm:
        """What a kernel has to know to read it."""
        return KVForm(self.k.shape[3], self.key_block, self.amax)

    def __repr__(self) -> str:
        tensors = (self.k, self.v, self.k_descale, self.v_descale, self.k_mean)
        size = sum(x.numel() * x.element_size() for x in tensors if x is not None)
        held = ", ".join(f"{name}={getattr(self, name)!r}" for name in HELD)
        return (
            f"PackedKV({tuple(self.shape)}, {self.dtype}, {self.device}, {held}, key_block={self.key_block}, "
            f"amax={self.amax:g}, for {self.kernel}, {size} bytes)"
        )


torch.serialization.add_safe_globals([PackedKV])  # tensors, names and numbers: `torch.load` may build one
