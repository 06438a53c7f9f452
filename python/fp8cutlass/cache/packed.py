"""Keys and values that are quantised and packed once and attended many times."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..choose.reuse import KVForm

HELD = ("scaling", "precision", "smooth_k", "hadamard")  # arguments of attention that packing has settled


@dataclass(frozen=True, repr=False, eq=False)
class PackedKV:
    """What ``pack_kv`` returns and ``attention`` takes as ``key``. The bytes are those that a call on key and value
    itself would make; docs/design/numerics.md describes them. Not to be made or changed by hand.

    It is a node of torch's pytrees, whose leaves are its tensors, and ``torch.load`` reads it with its defaults.
    """

    k: torch.Tensor  # (B, Hkv, Sk, head_dim of the kernel) uint8
    v: torch.Tensor  # (B, Hkv, head_dim of the kernel, ceil(Sk / 128) * 128) uint8
    k_descale: torch.Tensor  # float32, of the scaling mode; of tokens padded to whole tiles, of channels to head_dim
    v_descale: torch.Tensor
    k_mean: torch.Tensor | None  # (B, Hkv, head_dim of the kernel) float32 with smooth_k
    head_dim: int  # D of key and value
    dtype: torch.dtype  # of key and value, which a query has to have: bf16 or fp16
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
        return torch.Size((*self.k.shape[:3], self.head_dim))

    @property
    def like(self) -> torch.Tensor:
        """One element that nobody reads, expanded to what key and value were."""
        return self.k.new_empty((), dtype=self.dtype).expand(self.shape)

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.k.device

    @property
    def form(self) -> KVForm:
        """What a kernel has to know to read it."""
        return KVForm(self.k.shape[3], self.key_block, self.amax)

    @cached_property
    def metadata(self) -> str:
        """All that tells one from another but for what the tensors hold: a text, whose hash Python keeps."""
        tensors = [None if x is None else (tuple(x.shape), x.stride(), x.dtype, x.device) for x in self._all()]
        return sys.intern(repr((tensors, [getattr(self, name) for name in SETTLED])))

    def __getstate__(self) -> dict[str, Any]:
        """Without ``metadata``, as a copy may be read on another device."""
        return {name: x for name, x in vars(self).items() if name != "metadata"}

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> PackedKV:
        """The same on another device, itself where it is there. Kernels of that device read it if they read such keys
        of their own; ``attention`` refuses it by name if none does."""
        moved = {name: x.to(device, non_blocking=non_blocking) for name, x in self._tensors().items()}
        return self if all(x is getattr(self, name) for name, x in moved.items()) else replace(self, **moved)  # type: ignore[arg-type]

    def _all(self) -> list[torch.Tensor | None]:
        return [getattr(self, name) for name in LEAVES]

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: x for name in LEAVES if (x := getattr(self, name)) is not None}

    def __repr__(self) -> str:
        size = sum(x.numel() * x.element_size() for x in self._tensors().values())
        held = ", ".join(f"{name}={getattr(self, name)!r}" for name in HELD)
        return (
            f"PackedKV({tuple(self.shape)}, {self.dtype}, {self.device}, {held}, key_block={self.key_block}, "
            f"amax={self.amax:g}, for {self.kernel}, {size} bytes)"
        )


# In this order torch.export puts its own names into the text of guards: longer names first, or "k" is found in them.
LEAVES = ("k_descale", "v_descale", "k_mean", "k", "v")
SETTLED = ("head_dim", "dtype", "kernel", "key_block", "amax", *HELD)
Context = tuple[tuple[str, ...], tuple[Any, ...]]  # names of the leaves that are there, values of SETTLED


def _flatten(packed: PackedKV) -> tuple[list[Any], Context]:
    found = {name: x for name in LEAVES if (x := getattr(packed, name)) is not None}
    return list(found.values()), (tuple(found), tuple(getattr(packed, name) for name in SETTLED))


def _flatten_with_keys(packed: PackedKV) -> tuple[list[tuple[pytree.KeyEntry, Any]], Context]:
    leaves, context = _flatten(packed)
    return [(pytree.GetAttrKey(name), x) for name, x in zip(context[0], leaves, strict=True)], context


def _unflatten(leaves: Any, context: Context) -> PackedKV:
    names, settled = context
    held = dict.fromkeys(LEAVES) | dict(zip(names, leaves, strict=True))
    return PackedKV(**held, **dict(zip(SETTLED, settled, strict=True)))  # type: ignore[arg-type]


def _dump(context: Context) -> Any:
    return [list(context[0]), [str(x) if isinstance(x, torch.dtype) else x for x in context[1]]]


def _undump(dumped: Any) -> Context:
    settled = dict(zip(SETTLED, dumped[1], strict=True))
    settled["dtype"] = getattr(torch, settled["dtype"].removeprefix("torch."))
    return tuple(dumped[0]), tuple(settled.values())


pytree.register_pytree_node(
    PackedKV,
    _flatten,
    _unflatten,
    serialized_type_name=f"{__name__.partition('.')[0]}.{PackedKV.__name__}",
    to_dumpable_context=_dump,
    from_dumpable_context=_undump,
    flatten_with_keys_fn=_flatten_with_keys,
)
torch.serialization.add_safe_globals([PackedKV])  # tensors, names and numbers: `torch.load` may build one
